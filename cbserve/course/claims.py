"""Claim cards and the ledger: what the lecture says, beside what the learner's own machine says.

Every claim is a band in which one measured number must lie. Evidence is that number, or a dict of numbers by the
condition under which each was measured (a batch size, a trace, a pool). The verdict is computed from it alone:

    holds                all numbers lie in the band
    holds if ...         some do; the conditions of those are named
    does not hold        none does
    not measured here    there is no evidence

Each chapter and each lab keeps evidence of its own, with a verdict of its own, and all of them are shown side by side:
what a lab measures with a tiny model neither overrules nor hides what a chapter measured with a larger one.
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

from cbserve.course.checking import lab_here
from cbserve.course.claim_list import CLAIMS, Claim
from cbserve.course.show import Shown, badge, cell, escape, facts, html_table, show, table
from cbserve.course.store import Store
from cbserve.course.values import NotPlainError, plain
from cbserve.errors import CBServeError

__all__ = ["CLAIMS", "Claim", "ClaimError", "Evidence", "claim", "ledger", "verdict"]

NOT_MEASURED = "not measured here"
MEASURED = "measured here"
EARLIER = "an earlier run"  # the place of evidence that was kept when a claim had one place only
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
    """Show the card of a claim. Evidence goes into the ledger first, in place of what this chapter or lab said earlier.

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
        place = lab_here() or f"chapter {known.chapter}"
        _ledger.update(lambda kept: kept.update({id: _with(kept.get(id, {}), place, entry)}))
    _display(claim_card(known, _evidence(id)))


def ledger(dates: bool = False) -> None:
    """Show all claims in one table with their verdicts so far; `dates` adds when each was measured."""
    _display(ledger_table(dates))


def ledger_table(dates: bool = False) -> Shown:
    """The ledger as text and as HTML: a row for each place that tested a claim."""
    found = {id: _evidence(id) for id in CLAIMS}
    tests = [(known, place, evidence) for known in CLAIMS.values() for place, evidence in found[known.id].items()]
    machines = sorted({evidence.machine for _, _, evidence in tests})
    elsewhere = any(place != f"chapter {known.chapter}" for known, place, _ in tests)
    header = ["chapter", "claim", *(["tested in"] if elsewhere else []), "your numbers", "verdict", "how"]
    rows, cells = [], []
    for known in CLAIMS.values():
        for place, evidence in found[known.id].items() or [("", None)]:
            said = verdict(known, evidence)
            how = ([evidence.label] + [evidence.machine] * (len(machines) > 1)) if evidence else []
            middle = [*([place] if elsewhere else []), _values(known, evidence)]
            end = ["; ".join(how), *([evidence.date if evidence else ""] if dates else [])]
            rows.append([str(known.chapter), known.id, *middle, said, *end])
            # A terminal has no room for the sentences; claim(id) shows them there. Here each stands once.
            is_first = evidence is None or place == next(iter(found[known.id]))
            name = f"{cell(known.text)}<br><code>{known.id}</code>" if is_first else f"<code>{known.id}</code>"
            # Only what was tested gets a badge: the eye should find those.
            mark = badge(said, _kind(said)) if evidence else said
            cells.append([str(known.chapter), name, *map(cell, middle), mark, *map(escape, end)])
    if dates:
        header.append("date")
    text, _ = table(header, rows)
    tested = sum(map(bool, found.values()))
    title = f"Ledger: {tested} of {len(CLAIMS)} claims tested" + (f" on {machines[0]}" if len(machines) == 1 else "")
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


def _by_place(kept: dict[str, Any]) -> dict[str, Any]:
    """The entries of a claim by place; an entry itself is what was kept when there was one place."""
    return {EARLIER: kept} if "values" in kept else kept


def _with(kept: dict[str, Any], place: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The entries of a claim with a new one. One without a place makes way for its own cell, which names the same
    conditions."""
    entries = dict(_by_place(kept))
    if list(entries.get(EARLIER, {}).get("values", ())) == list(entry["values"]):
        del entries[EARLIER]
    return entries | {place: entry}


def _evidence(id: str) -> dict[str, Evidence]:
    """What was found for a claim, by place: chapters first."""
    found = {}
    for place, entry in sorted(_by_place(_ledger.read().get(id, {})).items()):
        try:
            if entry["values"] and isinstance(entry["values"], dict):
                found[place] = Evidence(**entry)
        except (KeyError, TypeError):  # written by another version
            continue
    return found


def claim_card(known: Claim, found: Mapping[str, Evidence]) -> Shown:
    """A claim with its evidence and verdicts, by place, as text and as HTML."""
    verdicts = {place: verdict(known, evidence) for place, evidence in found.items()} or {"": verdict(known, None)}
    names = {place: f"{place}: " if len(found) > 1 else "" for place in verdicts}
    rows = [
        ("the lecture says", known.text),
        ("tested by", known.test),
        ("it depends on", known.condition),
        ("counts as holding", f"{known.measure} {known.band()}"),
        ("source", known.source),
    ]
    if not found:
        rows.append(("your numbers", "none yet"))
    for place, evidence in found.items():
        of = names[place]
        rows += [(f"{of}your numbers", _values(known, evidence)), (f"{of}how", f"{evidence.label}; {evidence.machine}")]
    width = max(len(name) for name, _ in rows)
    said = "; ".join(f"{names[place]}{words}" for place, words in verdicts.items())
    text = "\n".join([f"Claim {known.id}: {said}", *(f"  {name.ljust(width)}  {value}" for name, value in rows)])
    style = "border-left:4px solid #56b4e9;padding:4px 12px"
    badges = " ".join(f"{escape(names[place])}{badge(words, _kind(words))}" for place, words in verdicts.items())
    heading = f"<p>{badges} <strong>{cell(known.text)}</strong> <code>{known.id}</code></p>"
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
