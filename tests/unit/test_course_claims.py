"""Claim cards: the verdict is a function of the learner's numbers."""

import json
import re

import numpy as np
import pytest

from cbserve.course import checking, claims
from cbserve.course.claims import CLAIMS, ClaimError, Evidence, verdict
from cbserve.course.show import Shown
from cbserve.course.store import Store


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ledger", Store("ledger"))
    monkeypatch.setattr(checking, "_lab", "")
    monkeypatch.delenv("CBSERVE_STATE", raising=False)
    monkeypatch.setattr(claims, "show", lambda text, html: SCREEN.append(Shown(text, html)))


SCREEN: list[Shown] = []


def claim(id: str, **evidence: object) -> Shown:
    """What `claim` shows."""
    claims.claim(id, **evidence)
    return SCREEN.pop()


def ledger(**options: bool) -> Shown:
    claims.ledger(**options)
    return SCREEN.pop()


@pytest.mark.parametrize(
    ("id", "evidence", "said"),
    [
        ("static-40.7", 610 / 1500, "holds"),
        ("static-40.7", 0.41, "does not hold"),
        ("static-20-40", {8: 0.48, 64: 0.34}, "holds if B = 64"),
        ("static-20-40", {8: 0.37, 16: 0.30, 32: 0.25}, "holds"),
        ("static-20-40", {"equal lengths": 1.0}, "does not hold"),
        ("waste-40-80", {8: 0.52, 64: 0.66, 512: 0.9}, "holds if B = 8 or B = 64"),
        ("utilisation-100", {"queue never empty": 0.99, "queue runs empty": 0.6}, "holds if queue never empty"),
        ("utilisation-100", 0.9, "does not hold"),
        ("speedup-2-3x", 1.99, "holds"),
        ("speedup-2-3x", 1.8, "does not hold"),
        ("speedup-2-3x", 3.5, "does not hold"),
        ("kv-admission", {"200 blocks": 1.0, "2,000 blocks": 0.0}, "holds if 200 blocks"),
        ("pitfall-1", {"admit all": 37, "reserve": 0}, "holds if admit all"),
        ("max-concurrency", {"decimal": 201, "binary": 211, "90 % of the memory": 177}, "holds if decimal"),
        ("max-concurrency", {"binary": 211}, "does not hold"),
    ],
)
def test_the_verdict_follows_the_numbers(id, evidence, said) -> None:
    shown = claim(id, **{CLAIMS[id].measure: evidence})
    assert shown.text.splitlines()[0] == f"Claim {id}: {said}"
    assert f">{said}</span>" in shown.html


@pytest.mark.parametrize("known", CLAIMS.values(), ids=CLAIMS)
def test_each_verdict_flips_with_its_evidence(known) -> None:
    assert verdict(known, None) == "not measured here"
    outside = known.low - 1
    assert verdict(known, Evidence({"": known.low})) == "holds"
    assert verdict(known, Evidence({"": outside})) == "does not hold"
    assert verdict(known, Evidence({"a": known.low, "b": outside})) == "holds if a"


def test_a_claim_without_evidence_says_so_and_then_remembers_the_last() -> None:
    assert "not measured here" in claim("speedup-2-3x").text
    claim("speedup-2-3x", speedup=1.2)
    claim("speedup-2-3x", speedup=np.float32(2.5), label="simulated for H200")
    shown = claim("speedup-2-3x").text
    assert "2.50x" in shown and "simulated for H200" in shown and "1.2" not in shown


@pytest.mark.parametrize(
    ("id", "evidence", "said"),
    [
        ("no-such", {}, "the ids are: static-40.7"),
        ("static-40.7", {"utilization": 0.4}, "asks for utilisation= "),
        ("static-40.7", {"utilisation": "0.4"}, "a finite number is wanted"),
        ("static-40.7", {"utilisation": float("nan")}, "a finite number is wanted"),
        ("static-40.7", {"utilisation": True}, "a finite number is wanted"),
        ("static-40.7", {"utilisation": {}}, "empty dict"),
        ("static-40.7", {"utilisation": {8: None}}, "at 8 is None"),
        ("static-40.7", {"utilisation": object()}, "is an object"),
        ("static-40.7", {"utilisation": 0.4, "label": "made up"}, "measured here"),
    ],
)
def test_evidence_must_be_the_number_that_is_asked_for(id, evidence, said) -> None:
    with pytest.raises(ClaimError, match=said):
        claim(id, **evidence)
    assert "1 of" not in ledger().text


def test_the_ledger_is_kept_across_restarts_with_machine_and_date(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    claim("static-40.7", utilisation=0.40667)
    monkeypatch.setattr(claims, "_ledger", Store("ledger"))
    kept = json.loads((tmp_path / "ledger.json").read_text())["static-40.7"]["chapter 1"]
    assert kept["date"] and kept["machine"]
    shown = ledger()
    assert shown.text.startswith(f"Ledger: 1 of {len(CLAIMS)} claims tested")
    assert "40.7 %" in shown.text and kept["machine"] in shown.text
    assert kept["date"] not in shown.text + shown.html and kept["date"] in ledger(dates=True).text


def test_a_ledger_of_another_version_is_no_evidence(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    for other in (
        {"number": 1},
        {"values": [1]},
        {"chapter 1": {"values": {}}},
        {"chapter 1": {"values": {"": 1}, "by": "me"}},
    ):
        (tmp_path / "ledger.json").write_text(json.dumps({"static-40.7": other}))
        assert "not measured here" in claim("static-40.7").text


A100 = {"speedup": {"A100, short answers": 2.1, "A100, long prompts": 1.4}, "label": "simulated for an A100"}
TINY = {"speedup": {"tiny, 8 slots": 1.2}}


def in_lab(number: int) -> None:
    """From here on this process runs a lab: its cells ask whether exercises are solved before they show a claim."""
    checking.solved(f"lab{number}.ex1")


@pytest.mark.parametrize("chapter_first", [True, False])
def test_a_lab_and_a_chapter_keep_their_own_evidence_and_verdict(chapter_first, monkeypatch) -> None:
    for number, evidence in [(0, A100), (2, TINY)] if chapter_first else [(2, TINY), (0, A100)]:
        monkeypatch.setattr(checking, "_lab", "")
        if number:
            in_lab(number)
        shown = claim("speedup-2-3x", **evidence)
    assert shown.text.splitlines()[0] == (
        "Claim speedup-2-3x: chapter 2: holds if A100, short answers; lab 2: does not hold"
    )
    assert "A100, long prompts: 1.40x" in shown.text and "tiny, 8 slots: 1.20x" in shown.text
    assert "simulated for an A100; " in shown.text and "measured here; " in shown.text
    assert "chapter 2: <span" in shown.html and "lab 2: <span" in shown.html
    rows = [line for line in ledger().text.splitlines() if "speedup-2-3x" in line]
    assert [row.split("  ")[0:1] for row in rows] == [["2"], ["2"]]
    assert "holds if A100, short answers" in rows[0] and "chapter 2" in rows[0] and "tiny" not in rows[0]
    assert "does not hold" in rows[1] and "lab 2" in rows[1] and "tiny, 8 slots: 1.20x" in rows[1]
    assert ledger().text.startswith(f"Ledger: 1 of {len(CLAIMS)} claims tested")
    assert ledger().html.count(CLAIMS["speedup-2-3x"].text) == 1


def test_a_place_takes_its_own_evidence_back() -> None:
    in_lab(2)
    claim("speedup-2-3x", **TINY)
    shown = claim("speedup-2-3x", speedup={"tiny, 4 slots": 2.0})
    assert "4 slots" in shown.text and "8 slots" not in shown.text and "lab 2" not in shown.text
    assert "lab 2" in ledger().text, "the chapter itself has tested nothing"


def test_where_nothing_was_tested_elsewhere_the_ledger_has_no_column_for_it() -> None:
    claim("speedup-2-3x", **A100)
    assert "tested in" not in ledger().text


def test_a_ledger_from_before_there_were_places_is_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    old = {"values": A100["speedup"], "label": A100["label"], "machine": "Linux, 2 cores", "date": "2026-11-01"}
    (tmp_path / "ledger.json").write_text(json.dumps({"speedup-2-3x": old}))
    assert "Claim speedup-2-3x: holds if A100, short answers" in claim("speedup-2-3x").text
    in_lab(2)
    both = claim("speedup-2-3x", **TINY).text
    assert "an earlier run: holds if A100, short answers; lab 2: does not hold" in both and "Linux, 2 cores" in both
    monkeypatch.setattr(checking, "_lab", "")
    again = claim("speedup-2-3x", **A100).text  # the cell that it came from
    assert "an earlier run" not in again and "chapter 2: holds if A100, short answers; lab 2: does not hold" in again


def test_conditions_are_escaped() -> None:
    assert "<script>" not in claim("static-40.7", utilisation={"<script>": 0.1}).html


@pytest.mark.parametrize("id", [[], {}, 5, None])
def test_a_claim_that_is_none_is_named(id) -> None:
    with pytest.raises(ClaimError, match=re.escape(f"there is no claim {id!r}; the ids are")):
        claims.claim(id)


@pytest.mark.parametrize("label", [5, None, "made up"])
def test_a_label_is_one_of_two(label) -> None:
    with pytest.raises(ClaimError, match="measured here"):
        claims.claim("static-40.7", utilisation=0.4, label=label)
