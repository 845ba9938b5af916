"""Claim cards and the ledger: what the lecture says, beside what the learner's own machine says.

Every claim is a band in which one measured number must lie. Evidence is that number, or a dict of numbers by the
condition under which each was measured (a batch size, a trace, a pool). The verdict is computed from it alone:

    holds                all numbers lie in the band
    holds if ...         some do; the conditions of those are named
    does not hold        none does
    not measured here    there is no evidence
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbserve.course.claim_list import CLAIMS, Claim
from cbserve.course.show import Shown, badge, cell, escape, facts, html_table, show, table
from cbserve.course.store import Store
from cbserve.course.values import NotPlainError, plain
from cbserve.errors import CBServeError

__all__ = ["CLAIMS", "Claim", "ClaimError", "Evidence", "claim", "ledger", "verdict"]

NOT_MEASURED = "not measured here"
MEASURED = "measured here"
_ledger = Store("ledger")


class ClaimError(CBServeError):
    """A claim is unknown, or its evidence is not the number it asks for."""


@dataclass(frozen=True)
class Evidence:
    """Numbers by condition ("" for a single one), how they were got, and on which machine."""

    values: Mapping[str, float]
    label: str = MEASURED
    machine: str = ""
    date: str = ""


def verdict(claim: Claim, evidence: Evidence | None) -> str:
    """The verdict's words, a pure function of the numbers."""
    if evidence is None:
        return NOT_MEASURED
    inside = [condition for condition, value in evidence.values.items() if claim.low <= value <= claim.high]
    if len(inside) == len(evidence.values):
        return "holds"
    return f"holds if {' or '.join(inside)}" if inside else "does not hold"


def claim(id: str, *, label: str = MEASURED, **evidence: Any) -> None:
    """Show the card of a claim. Evidence goes into the ledger first, in place of earlier evidence for the claim.

    evidence: one keyword, named by the card: a number or a dict {condition: number}; an int n as a condition is read
    as a batch size, B = n. label: "measured here", or a text that begins with "simulated".

    Raises ClaimError for anything else.
    """
    known = _get(id)
    if evidence:
        values = _numbers(known, evidence)
        if label != MEASURED and not (isinstance(label, str) and label.startswith("simulated")):
            raise ClaimError(f'label is {label!r}; it is "{MEASURED}", or begins with "simulated"')
        entry = {"values": values, "label": label, "machine": _machine(), "date": datetime.date.today().isoformat()}
        _ledger.update(lambda kept: kept.update({id: entry}))
    _display(claim_card(known, _evidence(id)))


def ledger(dates: bool = False) -> None:
    """Show all claims in one table with their verdicts so far; `dates` adds when each was measured."""
    _display(ledger_table(dates))


def ledger_table(dates: bool = False) -> Shown:
    """The ledger as text and as HTML."""
    found = {id: _evidence(id) for id in CLAIMS}
    machines = sorted({evidence.machine for evidence in found.values() if evidence})
    header = ["chapter", "claim", "your numbers", "verdict", "how", *(["date"] if dates else [])]
    rows = []
    for known in CLAIMS.values():
        evidence = found[known.id]
        row = [str(known.chapter), known.id, _values(known, evidence), verdict(known, evidence)]
        how = ([evidence.label] + [evidence.machine] * (len(machines) > 1)) if evidence else []
        rows.append(row + ["; ".join(how)] + ([evidence.date if evidence else ""] if dates else []))
    text, _ = table(header, rows)
    # A terminal has no room for the sentences; claim(id) shows them there.
    claims = [f"{cell(known.text)}<br><code>{known.id}</code>" for known in CLAIMS.values()]
    cells = [
        # Only what was tested gets a badge: the eye should find those.
        [row[0], claim, cell(row[2]), row[3] if row[3] == NOT_MEASURED else badge(row[3], _kind(row[3]))]
        + list(map(escape, row[4:]))
        for row, claim in zip(rows, claims, strict=True)
    ]
    tested = sum(evidence is not None for evidence in found.values())
    title = f"Ledger: {tested} of {len(rows)} claims tested" + (f" on {machines[0]}" if len(machines) == 1 else "")
    header[1] = "the lecture says"
    return Shown(f"{title}\n{text}", f"<p><strong>{escape(title)}</strong></p>{html_table(header, cells)}")


def _display(shown: Shown) -> None:
    show(shown.text, shown.html)


def _kind(said: str) -> str:
    return {"holds": "good", "does not hold": "bad", NOT_MEASURED: "none"}.get(said, "partly")


def _get(id: str) -> Claim:
    if not isinstance(id, str) or id not in CLAIMS:
        raise ClaimError(f"there is no claim {id!r}; the ids are: {', '.join(CLAIMS)}")
    return CLAIMS[id]


def _numbers(known: Claim, evidence: Mapping[str, Any]) -> dict[str, float]:
    if set(evidence) != {known.measure}:
        raise ClaimError(
            f"claim {known.id!r} asks for {known.measure}= ({known.unit}), and got {', '.join(sorted(evidence))}"
        )
    try:
        given = plain(evidence[known.measure])
    except NotPlainError as error:
        raise ClaimError(f"{known.measure} {error}") from None
    by_condition = given if isinstance(given, dict) else {"": given}
    if not by_condition:
        raise ClaimError(f"{known.measure} is an empty dict; give at least one number")
    for condition, value in by_condition.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            at = f" at {condition!r}" if condition != "" else ""
            raise ClaimError(f"{known.measure}{at} is {value!r}; a finite number is wanted ({known.unit})")
    return {f"B = {key}" if type(key) is int else str(key): float(value) for key, value in by_condition.items()}


def _evidence(id: str) -> Evidence | None:
    entry = _ledger.read().get(id)
    try:
        return Evidence(**entry) if entry and entry["values"] else None
    except (KeyError, TypeError):  # written by another version
        return None


def claim_card(known: Claim, found: Evidence | None) -> Shown:
    """A claim with its evidence and verdict as text and as HTML."""
    said = verdict(known, found)
    rows = [
        ("the lecture says", known.text),
        ("tested by", known.test),
        ("it depends on", known.condition),
        ("counts as holding", f"{known.measure} {known.band()}"),
        ("source", known.source),
        ("your numbers", _values(known, found) if found else "none yet"),
    ]
    if found:
        rows.append(("how", f"{found.label}; {found.machine}"))
    width = max(len(name) for name, _ in rows)
    text = "\n".join([f"Claim {known.id}: {said}", *(f"  {name.ljust(width)}  {value}" for name, value in rows)])
    style = "border-left:4px solid #56b4e9;padding:4px 12px"
    heading = f"<p>{badge(said, _kind(said))} <strong>{cell(known.text)}</strong> <code>{known.id}</code></p>"
    return Shown(text, f'<div style="{style}">{heading}{facts(rows[1:])}</div>')


def _values(known: Claim, found: Evidence | None) -> str:
    if found is None:
        return ""
    return ", ".join(f"{name}: {known.written(n)}" if name else known.written(n) for name, n in found.values.items())


def _machine() -> str:
    """What the numbers were measured on, without the machine's name."""
    cores = os.cpu_count() or 1
    label = f"{platform.system()} {platform.machine()}, {cores} core{'' if cores == 1 else 's'}"
    torch = sys.modules.get("torch")  # who measured on a GPU has imported it
    if torch is not None and torch.cuda.is_available():
        label += f", {torch.cuda.get_device_name()}"
    return label
