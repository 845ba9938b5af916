"""The timeline shows what the trace says: bars, numbers, words and table."""

import base64
import math
import random
import re

import pytest
import viz_checks

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.metrics import sequence_metrics, slot_utilisation
from cbserve.core.policies import Priority
from cbserve.core.trace import Preempted, Trace
from cbserve.errors import FigureError
from cbserve.serving import serve
from cbserve.viz import Figure, timeline, timeline_text
from cbserve.viz.spans import order_of_arrival, spans
from cbserve.viz.style import index_of_letter, letter, percent

LENGTHS = [4, 9, 22, 6, 12, 3, 16, 5, 7, 10, 4, 8]
long_tailed = [int(random.Random(1).expovariate(1 / 60)) + 1 for _ in range(1)] + [
    int(x) + 1 for x in (random.Random(i).expovariate(1 / 60) for i in range(2, 121))
]


def static(lengths: list[int] = LENGTHS, slots: int = 3) -> Trace:
    return serve(lengths, StaticBatching(slots))


def continuous(lengths: list[int] = LENGTHS, slots: int = 3, **options: object) -> Trace:
    return serve(lengths, ContinuousBatching(max_num_seqs=slots), **options)


def preempted() -> Trace:
    batching = ContinuousBatching(max_num_seqs=4, max_num_batched_tokens=16)
    return serve([20, 30, 12, 25, 8, 9], batching, num_blocks=9, block_size=8, prompt_tokens=20)


def displaced() -> Trace:
    policy = Priority(displace=True)
    return continuous([20, 30, 12, 25, 3], policy=policy, priorities=[5, 5, 5, 5, 0], arrivals_s=[0, 0, 0, 0, 6])


def stalled() -> Trace:
    return serve([20, 30, 12, 25, 8], ContinuousBatching(max_num_seqs=4, mixed=False), arrivals_s=[0, 1, 4, 6, 9])


CASES = {
    "static above continuous": lambda: timeline(static(), continuous()),
    "three panels": lambda: timeline(static(), continuous(), continuous(slots=2), labels=["a", "b", "c"]),
    "three steps": lambda: timeline(static([1, 2, 3])),
    "one long answer": lambda: timeline(static([10, 100, 500])),
    "preemptions": lambda: timeline(preempted(), queue=True),
    "displacement": lambda: timeline(displaced(), queue=True),
    "in seconds": lambda: timeline(stalled(), axis="time"),
    "a part": lambda: timeline(static(), continuous(), first_step=10, last_step=30),
    "up to a cursor": lambda: timeline(static(), continuous(), cursor=8),
    "narrow": lambda: timeline(static(), continuous(), width=480),
    "wide": lambda: timeline(static(), continuous(), width=1200, queue=True),
    "32 slots": lambda: timeline(static(long_tailed, 32), continuous(long_tailed, 32)),
    "over 1000 steps": lambda: timeline(continuous(long_tailed, 4), queue=True),
    "80 slots": lambda: timeline(continuous([5, 9, 2, 1] * 30, 80)),
    "nothing ran": lambda: timeline(Trace({"num_slots": 2})),
}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {name: make() for name, make in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_named_legible_and_within_its_frame(name: str, figures: dict[str, Figure]) -> None:
    viz_checks.check(figures[name].svg)


def test_ids_of_two_figures_never_meet(figures: dict[str, Figure]) -> None:
    ids = [set(re.findall(r'\sid="([^"]+)"', figure.svg)) for figure in figures.values()]
    assert sum(map(len, ids)) == len(set().union(*ids))


def test_an_equal_trace_gives_an_equal_figure() -> None:
    assert timeline(static()).svg == timeline(static()).svg


@pytest.mark.parametrize("make", [static, continuous, preempted, displaced, stalled])
def test_numbers_in_words_are_those_of_the_metrics(make: object) -> None:
    trace = make()
    figure = timeline(trace)
    assert percent(slot_utilisation(trace)) in {box.text for box in viz_checks.texts(figure.svg)}
    assert percent(slot_utilisation(trace)) in figure.desc
    assert f"done at step {len(trace.steps)}" in figure.svg


def test_ten_hundred_and_five_hundred_tokens_use_forty_percent() -> None:
    figure = timeline(static([10, 100, 500]))
    assert figure.title == "The hatched steps are computed and thrown away: 40.7 % used"
    assert figure.title in figure.caption


def test_two_traces_are_compared_in_the_title() -> None:
    a, b = static(), continuous()
    title = timeline(a, b).title
    for trace in (a, b):
        assert f"{percent(slot_utilisation(trace))} in {len(trace.steps)} steps" in title
    assert f"{len(a.steps) - len(b.steps)} steps sooner" in timeline(a, b).svg


def test_preemptions_and_displacements_are_told_apart_with_their_reasons() -> None:
    for trace, word in ((preempted(), "is preempted"), (displaced(), "is displaced")):
        svg = timeline(trace).svg
        assert all(event.reason in svg for event in trace.of(Preempted)) and word in svg
    assert "computes again" in timeline(displaced()).svg
    assert "displaced by a more urgent request" not in timeline(preempted()).svg


@pytest.mark.parametrize(
    "options, ways",
    [
        ({}, ["40 tokens must be computed again"]),
        ({"preemption": "swap"}, ["40 tokens must be copied back from the host"]),
        (
            {"preemption": "swap", "num_host_blocks": 7},  # room for the first victim only
            ["16 tokens must be copied back from the host", "24 tokens must be computed again"],
        ),
    ],
    ids=["recompute", "swap", "both"],
)
def test_what_a_victim_loses_is_told_apart_from_what_waits_in_the_host(options: dict, ways: list[str]) -> None:
    trace = serve([20] * 3, num_blocks=12, block_size=4, **options)
    figure = timeline(trace)
    assert figure.title == f"2 preemptions: {', '.join(ways)}"
    for event in trace.of(Preempted):
        way = "copied back from the host" if event.how == "swap" else "computed again"
        assert f"{event.num_computed_tokens} tokens will be {way}" in figure.svg
    assert ("computes again" in figure.svg) == ("computed again" in figure.title)


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_a_prefill_that_was_swapped_out_goes_on_and_computes_nothing_again(how: str) -> None:
    batching = ContinuousBatching(max_num_seqs=2, max_num_batched_tokens=8)
    urgent = {"policy": Priority(displace=True), "priorities": [1, 1, 0], "arrivals_s": [0, 0, 2]}
    trace = serve([6, 6, 3], batching, prompt_tokens=[4, 40, 4], block_size=4, preemption=how, **urgent)
    (event,) = trace.of(Preempted)
    prefills = [s for s in spans(trace) if s.request_id == event.request_id and s.kind == "prefill"]
    assert [s.recomputes for s in prefills] == [False, how == "recompute"]
    assert sum(s.num_tokens for s in prefills) == 40 + event.num_computed_tokens * (how == "recompute")


def test_a_slot_that_waits_inside_a_step_is_not_drawn_as_computing() -> None:
    held = [span for span in spans(stalled()) if span.kind == "held"]
    assert held and "holds the slot and computes nothing" in timeline(stalled()).svg


@pytest.mark.parametrize("make", [static, continuous, preempted, displaced, stalled])
def test_spans_cover_each_row_once(make: object) -> None:
    trace = make()
    rows = {(s.step, r.slot): (r.seq_id, r.kind) for s in trace.steps for r in s.rows}
    found = {}
    for span in spans(trace):
        for step in range(span.first, span.last + 1):
            assert (step, span.slot) not in found
            found[step, span.slot] = (span.seq_id, span.kind)
    assert {k: v for k, v in found.items() if v[1] != "held"} == rows


@pytest.mark.parametrize("make", [static, continuous, preempted, displaced, stalled])
def test_the_table_equals_the_trace(make: object) -> None:
    trace = make()
    header, rows = timeline(trace).table
    told = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    ends = {s.end_s: s.step for s in trace.steps}
    for metrics in sequence_metrics(trace):
        row = told[metrics.request_id]
        assert row["tokens"] == metrics.num_output_tokens
        assert row["preemptions"] == metrics.num_preemptions
        assert row["first token"] == ends[metrics.token_times_s[0]]
        assert row["finished"] == ends[metrics.finished_s]
        assert row["left"] >= row["finished"] >= row["first token"] >= row["admitted"]


def test_a_cursor_shows_only_what_has_happened() -> None:
    header, rows = timeline(continuous(), cursor=8).table
    told = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert told["A"]["finished"] == 3 and told["C"]["finished"] is None
    assert "F" not in told
    assert all(bar.right <= 66 + 664 * 9 / 37 + 3 for bar, _ in viz_checks.bars(timeline(continuous(), cursor=8).svg))


def test_a_request_keeps_its_letter_in_every_figure() -> None:
    late = continuous([5, 5, 5], arrivals_s=[3, 0, 1])
    assert order_of_arrival([late]) == {"A": 0, "B": 1, "C": 2}
    assert [index_of_letter(letter(i)) for i in range(100)] == list(range(100))
    assert [letter(0), letter(25), letter(26), letter(52)] == ["A", "Z", "A1", "A2"]


def test_more_slots_than_can_be_drawn_are_named() -> None:
    assert "16 more slots not drawn" in timeline(continuous([5, 9, 2, 1] * 30, 80)).svg


def test_slots_that_stay_empty_are_counted_but_not_drawn() -> None:
    trace = serve([5, 6, 7])  # 32 slots by default
    svg = timeline(trace).svg
    assert "29 more slots stay empty" in svg and ">slot 3<" not in svg and percent(18 / (32 * 7)) in svg


def test_slots_that_are_asked_for_are_drawn_alone_and_tabled_alone() -> None:
    part = {"first_step": 10, "last_step": 30}
    whole, chosen = timeline(continuous(), **part), timeline(continuous(), slots=[2, 0], **part)
    drawn = {text.text for text in viz_checks.texts(chosen.svg)}
    assert {"slot 0", "slot 2", "1 more slot not drawn; the numbers count all", "to step 30"} <= drawn
    assert "slot 1" not in drawn and chosen.title == whole.title
    assert chosen.table[1] == [row for row in whole.table[1] if row[1] in (0, 2)]


def test_the_key_shows_decoding_in_several_colours() -> None:
    """In one it would be read as one request's."""
    figure = timeline(continuous(), first_step=10, last_step=30)
    assert "decode: one token a step" in {text.text for text in viz_checks.texts(figure.svg)}
    assert len({path.get("stroke") for path in viz_checks.drawn(figure.svg, "path") if path.get("stroke")}) == 3


def test_many_short_requests_do_not_make_a_huge_file() -> None:
    trace = continuous([1 + i % 5 for i in range(3000)], 4)
    figure = timeline(trace)
    assert len(figure.svg) < 400_000 and "requests, " in figure.svg


def test_static_form_is_an_image_and_live_form_inline(tmp_path: object) -> None:
    figure = timeline(static())
    html = figure._repr_html_()
    assert "<svg" not in html and "<img alt=" in html and "<details>" in html
    assert base64.b64decode(re.search(r"base64,([^\"]+)", html)[1]).decode() == figure.svg
    assert "--jp-layout-color0" in figure.live_html() and "prefers-color-scheme" not in figure.live_html()
    figure.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == figure.svg
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (0, {}),
        (1, {"axis": "metres"}),
        (1, {"labels": ["a", "b"]}),
        (1, {"width": 100}),
        (1, {"first_step": 900}),
        (1, {"first_step": "a"}),
        (1, {"cursor": 1.5}),
        (1, {"names": 5}),
        (1, {"labels": 5}),
        (1, {"title": 5}),
        (1, {"width": math.nan}),
        (1, {"width": "wide"}),
        (1, {"width": 10**6}),
    ],
)
def test_a_wrong_argument_is_named(arguments: int, options: dict[str, object]) -> None:
    with pytest.raises(FigureError, match=next(iter(options), "trace")):
        timeline(*[static()] * arguments, **options)


@pytest.mark.parametrize("wrong", [5, None, [], [5], "trace"])
def test_what_is_no_trace_is_named(wrong: object) -> None:
    with pytest.raises(FigureError, match="trace"):
        timeline(wrong)


@pytest.mark.parametrize("several", [list, tuple])
def test_traces_may_come_as_one_list(several: type) -> None:
    assert timeline(several([static(), continuous()])).svg == timeline(static(), continuous()).svg


def test_an_empty_trace_is_drawn_as_one() -> None:
    assert timeline(Trace()).title == "Nothing has run: 0 requests"
    viz_checks.check(timeline(Trace()).svg)


def test_text_twin_has_a_line_a_slot_and_the_same_steps() -> None:
    trace = static()
    text = timeline_text(trace, width=80, color=False)
    lines = [line for line in text.splitlines() if line.startswith("slot")]
    cells = [line.removeprefix(f"slot {i} ") for i, line in enumerate(lines)]
    assert [len(line) for line in cells] == [60, 60, 60]
    wasted = sum(row.kind == "padding" for step in trace.steps for row in step.rows)
    assert sum(line.count("/") for line in cells) == wasted
    assert "58.9 % used" in text and "\x1b" not in text
    assert max(map(len, timeline_text(static([10, 100, 500]), width=60, color=False).splitlines()[1:5])) <= 60


@pytest.mark.parametrize("make", [static, continuous, preempted, displaced, stalled])
@pytest.mark.parametrize("color", [True, False])
def test_text_twin_has_one_title_and_its_key_names_every_sign_and_no_other(make: object, color: bool) -> None:
    title, *lines = re.sub(r"\x1b\[[0-9;]*m", "", timeline_text(make(), color=color)).splitlines()
    assert "batching:" in title and lines[0].startswith("slot 0 ")
    cells = "".join(line.split(maxsplit=2)[2] for line in lines if line.startswith("slot"))
    drawn = {char for char in cells if not char.isalnum() and char != " "}
    named = {part.split()[0] for part in lines[-1].split(", ") if not part.split()[0].strip(":").isalpha()}
    assert named == drawn


def test_text_twin_falls_back_to_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    text = timeline_text(preempted(), color=False)
    assert text.isascii() and "#" in text
    assert "\x1b[" in timeline_text(preempted(), color=True)


@pytest.mark.parametrize("make", [static, continuous, preempted, displaced, stalled])
def test_slot_steps_are_written_as_one_word(make: object) -> None:
    figure = timeline(make())
    assert "slot-steps gave a token" in figure.desc and not re.search("slot step", figure.title + figure.desc)
