"""The frontier explorer shows the runs of its sweep, and its controls change them."""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import viz_checks

from cbserve import ContinuousBatching, Job, Roofline, Workload, azure_twin, sequence_metrics, simulate
from cbserve.calibration import Calibration
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import CBServeError, FigureError
from cbserve.explorers import ParetoExplorer, Scene, Setting, cold_start_scene, long_prefill_scene, pareto_explorer
from cbserve.explorers.curves import FIRST_LOOK, Line
from cbserve.explorers.machines import Machines
from cbserve.explorers.pareto_view import GOODPUT, ITL, TOKENS, TTFT
from cbserve.explorers.pitfall_scenes import WHOLE
from cbserve.explorers.pressable import WIDTHS
from cbserve.explorers.scene import Answer, Control
from cbserve.explorers.scene_runs import machine_of, settled
from cbserve.explorers.setting import PREFILL_FIRST, STATIC
from cbserve.explorers.showing import PAUSE_S, Background, alert
from cbserve.hardware.models import model_shape
from cbserve.viz.frontier import Curve, Mark, frontier
from cbserve.viz.style import round_ms, said_s
from cbserve.viz.token_gaps import TokenRow, token_gaps

pytest.importorskip("ipywidgets")
NUM, RATES = 50, (1.0, 4.0, 9.0)
SMALL = (Setting(), Setting(PREFILL_FIRST, 64, 2048))
LONG = 2 * FIRST_LOOK  # requests of a run that is not over with the first look


@pytest.fixture(autouse=True)
def no_event_loop() -> Iterator[None]:
    """After browser tests of the same session: Playwright's synchronous API leaves its loop marked as running."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(loop)


@pytest.fixture(scope="module")
def cost() -> Roofline:
    return Roofline.on("a100-80", "llama-3.1-8b")


def made(**options: Any) -> ParetoExplorer:
    explorer = pareto_explorer(**{"num_requests": NUM, "rates": RATES, "settings": SMALL, **options})
    explorer.build()
    return explorer


def at(explorer: ParetoExplorer, setting: Setting, rate: float) -> tuple[Line, float]:
    """A point of a curve on the machine that is chosen."""
    return Line(explorer.place, setting), rate


@pytest.fixture
def explorer() -> ParetoExplorer:
    return made()


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """Of this machine, in a cache folder of its own."""
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path / "home"))
    values = {"eff_compute": 0.5, "eff_memory": 0.25, "overhead_s": 0.002, "overlap": 0.0}
    about = {"threads": 2, "max_model_len": 2048}
    calibration = Calibration(
        model_shape("qwen2.5-0.5b"), "a small box", 100e9, 10e9, values, {}, "2026-01-02T03:04:05Z", environment=about
    )
    calibration.save()
    return calibration


def table_of(explorer: ParetoExplorer) -> dict[tuple[str, float], dict[str, Any]]:
    header, rows = explorer.draw().table
    return {(row[0], row[1]): dict(zip(header, row, strict=True)) for row in rows}


def words(explorer: ParetoExplorer) -> str:
    return " ".join(f"{who}: {what}" for who, what in explorer.story())


# ---- picture, table, words -------------------------------------------------------------------------------------------


def test_picture_table_and_words_have_the_numbers_of_the_runs(explorer: ParetoExplorer, cost: Roofline) -> None:
    viz_checks.check(explorer.figure.svg)
    rows = table_of(explorer)
    assert len(rows) == len(SMALL) * len(RATES)
    carried = dict.fromkeys(SMALL, 0.0)
    for (name, rate), row in rows.items():
        setting = next(s for s in SMALL if s.name == name)
        point = explorer.sweep.point(setting, rate, NUM)
        kept = point.summary.ttft_p99_s <= 1 and point.summary.itl_p99_s <= 0.1
        assert (row["tokens/s"], row["answers/s"]) == (point.tokens_per_s, point.answer_rate)
        assert row["goodput/s"] == point.goodput(1.0, 0.1)
        assert (row["TTFT p99 (s)"], row["ITL p99 (s)"]) == (point.summary.ttft_p99_s, point.summary.itl_p99_s)
        assert row["both p99 kept"] == ("yes" if kept else "no")
        if kept:
            carried[setting] = max(carried[setting], rate)
    assert carried[SMALL[0]] > carried[SMALL[1]]  # chunks keep the gaps short
    for setting, rate in carried.items():
        said = f"{rate:g} requests/s" if rate else "none of the rates"
        assert f"{setting.name} carries {said}" in explorer.figure.title
    assert f"F/BW {cost.critical_batch():.0f}" in explorer.figure.svg
    assert "simulated" in explorer.figure.caption.lower()
    point = explorer.point()
    assert f"{point.answer_rate:.3g} answers/s × {point.seconds_each:.3g} s" in words(explorer)
    assert f"{point.in_flight:.3g} requests in flight" in words(explorer)


def test_a_slider_changes_curve_table_and_words(explorer: ParetoExplorer) -> None:
    picture = explorer.picture.value
    explorer.data.value = True
    explorer.cap.value = 4
    point = explorer.sweep.point(Setting(max_num_seqs=4), RATES[1], NUM)
    assert explorer.picture.value != picture
    assert f"{point.tokens_per_s:,.0f} tokens/s" in explorer.sentence.value
    assert f"{point.tokens_per_s:.1f} tokens/s" in explorer.table.value
    assert explorer.points_menu.value == at(explorer, Setting(max_num_seqs=4), RATES[1])
    assert {name for name, _ in table_of(explorer)} == {"chunk 512, batch 4", SMALL[1].name}
    assert "chunk 512, batch 4" in explorer.steps_picture.value


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("x", [TTFT, ITL])
@pytest.mark.parametrize("y", [TOKENS, GOODPUT])
def test_every_view_is_well_drawn(explorer: ParetoExplorer, x: str, y: str, width: int) -> None:
    explorer.across.value, explorer.up.value = x, y
    figure = explorer.draw(width)
    viz_checks.check(figure.svg)
    assert figure.live_svg() in explorer.picture.value
    assert f"{x} in seconds" in figure.svg
    assert ("goodput" in figure.svg) == (y == GOODPUT)


def test_limits_decide_what_is_kept(explorer: ParetoExplorer) -> None:
    kept = [row["both p99 kept"] for row in table_of(explorer).values()]
    explorer.ttft.value = 0.1
    assert [row["both p99 kept"] for row in table_of(explorer).values()] == ["no"] * len(kept) != kept
    assert "carries none of the rates" in explorer.draw().title and ">none<" in explorer.picture.value
    assert "beyond 100 ms" in explorer.sentence.value


def test_p99_and_goodput_each_say_their_rule_where_they_stand() -> None:
    """Prefill first at 1/s: the p99 of all gaps is within the limit, and yet many answers have a gap beyond it."""
    explorer = made(rates=(1.0,), settings=SMALL[1:])
    point = explorer.point()
    good = point.num_good(1.0, 0.1)
    assert point.keeps(1.0, 0.1) and good < 0.8 * point.num_answers
    assert "Within TTFT p99 ≤ 1 s and ITL p99 ≤ 100 ms: prefill first 2048, batch 64 carries 1" in explorer.draw().title
    assert "both p99 within the limits" in " ".join(box.text for box in viz_checks.texts(explorer.draw().svg))
    assert f"{good} of the {point.num_answers} answers in that time kept the limits with TTFT and every gap; a p99" in (
        words(explorer)
    )
    assert "over all gaps together" in explorer.draw().caption and "only if its TTFT and every gap" in (
        explorer.draw().caption
    )
    explorer.up.value = GOODPUT
    assert "goodput/s: TTFT and every gap in the limits" in explorer.picture.value


# ---- at once, and then completely ------------------------------------------------------------------------------------


def test_a_first_look_says_that_it_is_one_until_whole_runs_have_replaced_it() -> None:
    explorer = pareto_explorer(num_requests=LONG, rates=RATES[:2], settings=SMALL)
    rough, faint = explorer.draw(), 'stroke-dasharray="2 2"'
    viz_checks.check(rough.svg)
    assert rough.title == f"First look, {FIRST_LOOK} requests a point: whole runs will say what each setting carries"
    assert ">…</text>" in rough.svg and "carries" not in rough.title.replace("each setting carries", "")
    assert rough.svg.count(faint) == 6  # four points, and two in the strip
    assert "within their limits" not in rough.svg  # no point is filled before its whole run
    assert f"first look with {FIRST_LOOK} requests" in words(explorer)
    assert {row["requests"] for row in table_of(explorer).values()} == {FIRST_LOOK}
    explorer.sweep.point(explorer.setting, explorer.chosen[1], LONG)
    # a curve is of one kind: it changes when all its runs are whole
    assert explorer.draw().svg.count(faint) == 6 and "first look" not in words(explorer)
    explorer.sweep.point(SMALL[0], RATES[0], LONG)
    half = explorer.draw()
    assert half.svg.count(faint) == 2 and f"{SMALL[0].name} carries" in half.title
    assert half.title.endswith(f". First look yet: {SMALL[1].name}")
    whole = explorer.figure  # what a notebook that is exported shows
    assert "first look" not in whole.title.lower() + whole.svg.lower() + words(explorer) and faint not in whole.svg
    assert {row["requests"] for row in table_of(explorer).values()} == {LONG}


def test_without_an_event_loop_a_control_is_answered_with_whole_runs() -> None:
    explorer = made(num_requests=LONG, rates=RATES[:1], settings=SMALL[:1])
    assert "First look" not in explorer.picture.value
    explorer.cap.value = 32
    assert "First look" not in explorer.picture.value and explorer.point().num_requests == LONG


def test_in_a_live_kernel_the_chosen_point_comes_first_and_the_curves_behind_it() -> None:
    async def move() -> tuple[int, str]:
        explorer = made(num_requests=LONG)
        explorer.cap.value = 2
        at_once = [row["requests"] for (name, _), row in table_of(explorer).items() if name == "chunk 512, batch 2"]
        explorer.cap.value = 16  # overtakes the rest of batch 2
        assert "first look" in explorer.sentence.value
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if "First look" not in explorer.picture.value:
                break
        assert explorer.sweep.known(Setting(max_num_seqs=2), RATES[-1], FIRST_LOOK) is None
        assert {row["requests"] for row in table_of(explorer).values()} == {LONG}
        assert "first look" not in explorer.sentence.value and "batch 16" in explorer.steps_picture.value
        return at_once

    assert asyncio.run(move()) == [FIRST_LOOK]


def test_the_live_picture_is_there_before_the_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from cbserve.explorers import showing

    explorer = pareto_explorer(num_requests=LONG, rates=RATES[:1], settings=SMALL[:1])
    shown: list[tuple[Any, bool]] = []
    monkeypatch.setattr(showing, "has_kernel", lambda: True)
    monkeypatch.setattr(
        "IPython.display.display",
        lambda data, **_: shown.append((data, explorer.point().num_requests == LONG)),
    )

    async def cell() -> None:
        explorer._ipython_display_()

    asyncio.run(cell())
    assert [is_whole for _, is_whole in shown] == [False, True]
    assert "First look" not in explorer.picture.value  # it was refined meanwhile


def test_where_a_person_waits_the_cell_ends_with_first_looks_and_what_is_saved_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cbserve.explorers import showing

    class Shown:
        def __init__(self, html: Any) -> None:
            self.update(html)

        def update(self, html: Any) -> None:
            self.html = html.data

    handles: list[Shown] = []

    def display(thing: Any, raw: bool = False, display_id: bool = False) -> Any:
        return None if raw else handles.append(Shown(thing)) or handles[-1]

    monkeypatch.setattr(showing, "has_kernel", lambda: True)
    monkeypatch.setattr(showing, "is_attended", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    explorer = pareto_explorer(num_requests=LONG, rates=RATES[:1], settings=SMALL[:1])

    async def cell() -> str:
        explorer._ipython_display_()
        (handle,) = handles
        assert "First look" in handle.html and explorer.sweep.known(explorer.setting, explorer.chosen[1], LONG) is None
        while not explorer._background._task.done():
            await asyncio.sleep(PAUSE_S)
        whole = handle.html
        explorer.cap.value = 2
        while not explorer._background._task.done():
            await asyncio.sleep(PAUSE_S)
        assert "batch 2 carries" in handle.html
        return whole

    whole = asyncio.run(asyncio.wait_for(cell(), 60))
    assert "First look" not in whole and "batch 64 carries" in whole


def test_steps_of_another_run_are_grey_until_they_are_drawn_anew() -> None:
    async def move() -> None:
        explorer = made()
        while not explorer._background._task.done():
            await asyncio.sleep(PAUSE_S)
        assert "cbserve-stale" not in explorer.steps_picture._dom_classes
        explorer.cap.value = 2
        assert "cbserve-stale" in explorer.steps_picture._dom_classes
        while "batch 2 " not in explorer.steps_picture.value:
            await asyncio.sleep(PAUSE_S)
        assert "cbserve-stale" not in explorer.steps_picture._dom_classes

    asyncio.run(asyncio.wait_for(move(), 60))


def test_a_menu_gets_its_options_and_its_choice_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two messages the page would show another choice, and what a learner chooses then would be lost."""
    explorer = made(rates=RATES[1:], settings=SMALL[:1])
    sent: list[set[str]] = []
    monkeypatch.setattr(
        explorer.moments_menu, "send_state", lambda key: sent.append({key} if isinstance(key, str) else set(key))
    )
    explorer.points_menu.value = at(explorer, SMALL[0], 4.0)
    assert [keys for keys in sent if keys] == [{"_options_labels", "index"}]


@pytest.mark.parametrize("num_slices", range(10))
def test_the_moment_that_is_chosen_last_stays_shown(monkeypatch: pytest.MonkeyPatch, num_slices: int) -> None:
    """Also where the steps of another one were being drawn, in whichever slice of that work the choice falls."""
    monkeypatch.setattr("cbserve.explorers.showing.SLICE_S", -1.0)  # every part is a slice
    explorer = made(rates=RATES[1:])
    for rate in RATES[1:]:
        explorer.points_menu.value = at(explorer, SMALL[0], rate)
        assert [moment.kind for moment in explorer.moments()] == ["queue", "start"]

    async def choose() -> None:
        explorer.points_menu.value = at(explorer, SMALL[0], RATES[1])
        await asyncio.sleep(num_slices * PAUSE_S)
        explorer.moments_menu.value = "start"
        while not explorer._background._task.done():
            await asyncio.sleep(PAUSE_S)

    asyncio.run(asyncio.wait_for(choose(), 60))
    shown = re.findall(r"<title[^>]*>([^<]*): the longest of", unescape(explorer.steps_picture.value))
    assert len(shown) == len(WIDTHS) and all(title.endswith("at 4 requests/s, the beginning") for title in shown), shown


def test_small_parts_of_background_work_share_a_slice() -> None:
    """A pause between any two of a thousand answers would take longer than the run."""

    async def work() -> int:
        background, pauses = Background(), 0
        background.start(iter([None] * 10_000))
        while not background._task.done():
            await asyncio.sleep(0)
            pauses += 1
        return pauses

    assert asyncio.run(asyncio.wait_for(work(), 60)) < 5_000


def test_a_scene_that_still_answers_keeps_no_warning_from_the_learner(long_prompt: Scene) -> None:
    def answers(prompt_tokens: int) -> Iterator[Answer]:
        for _ in range(50):
            yield long_prompt._draw, [("tokens", str(prompt_tokens))]

    scene = Scene(answers, {"prompt_tokens": Control("prompt tokens", [("1", 1), ("2", 2)])}, {"prompt_tokens": 1})
    scene.build()

    async def move() -> bool:
        scene.widgets["prompt_tokens"].value = 2
        await asyncio.sleep(0.1)  # a cell of the learner runs between two answers
        logger = logging.getLogger("cbserve")
        return logger.isEnabledFor(logging.WARNING) and not logger.disabled

    assert asyncio.run(move())


def test_a_refusal_stays_until_the_control_is_moved_again(long_prompt: Scene) -> None:
    """Whatever comes behind an earlier answer, and whatever else is switched."""

    def answers(x: int) -> Iterator[Answer]:
        if x == 2:
            raise FigureError("x=2: too large")
        for part in range(50):
            yield long_prompt._draw, [("x", f"{x}, part {part}")]

    scene = Scene(answers, {"x": Control("x", [("1", 1), ("2", 2), ("3", 3)])}, {"x": 1})
    scene.build()

    async def move() -> None:
        scene.widgets["x"].value = 3
        scene.widgets["x"].value = 2
        assert "too large" in scene.error.value
        scene.data.value = True
        while not scene._background._task.done():
            await asyncio.sleep(PAUSE_S)

    asyncio.run(asyncio.wait_for(move(), 60))
    assert "too large" in scene.error.value and "3, part 49" in scene.sentence.value
    scene.widgets["x"].value = 1
    assert scene.error.value == ""


def test_background_work_without_a_loop_is_done_at_once() -> None:
    done: list[int] = []
    Background().start(done.append(i) for i in range(3))
    assert done == [0, 1, 2]


# ---- the chosen point ------------------------------------------------------------------------------------------------


def test_a_point_is_chosen_with_mouse_or_list(explorer: ParetoExplorer) -> None:
    buttons = explorer.pressable.buttons
    seen = [button for button in buttons if button.layout.display != "none"]
    assert len(seen) == len(SMALL) * len(RATES)
    number = next(i for i, b in enumerate(buttons) if b.tooltip == f"{SMALL[1].name} at 9 requests/s")
    buttons[number].click()
    assert explorer.points_menu.value == at(explorer, SMALL[1], 9.0)
    assert f"{SMALL[1].name} at 9 requests/s" in explorer.sentence.value
    assert f"{SMALL[1].name} at 9 requests/s" in explorer.steps_picture.value
    explorer.points_menu.value = at(explorer, SMALL[0], 1.0)
    assert f"{SMALL[0].name} at 1 requests/s" in explorer.sentence.value
    for width in WIDTHS:  # each button lies over its point
        figure = explorer.draw(width)
        x, y = figure.places[1][2]
        place = f"left:{x / figure.size[0]:.3%};top:{y / figure.size[1]:.3%}"
        assert f"cbserve-pt-{number}{{{place}" in explorer.pressable.style.value


def test_the_strip_and_the_large_number_follow_the_chosen_curve() -> None:
    other = Setting(max_num_seqs=8)
    explorer = made(settings=(Setting(), other))
    for setting, cap, not_shown in ((other, 8, 64), (Setting(), 64, 8)):
        explorer.points_menu.value = at(explorer, setting, 4.0)
        texts = [box.text for box in viz_checks.texts(explorer.draw().svg)]
        assert any(text.startswith(f"Requests in flight with {setting.name} ") for text in texts)
        assert f"batch cap {cap}" in texts and f"batch cap {not_shown}" not in texts
        assert f"requests with {setting.name}: both" in " ".join(texts)
        assert explorer.draw().svg.count("<circle") == 2  # ringed in the plot and in the strip
        shown = explorer.sweep.point(setting, 4.0, NUM)
        assert f"4/s: {shown.in_flight:.4g} in flight" in explorer.draw().svg


def test_curves_are_kept_and_forgotten(explorer: ParetoExplorer) -> None:
    explorer.keep.click()
    explorer.budget.value = 2048
    names = {name for name, _ in table_of(explorer)}
    assert names == {"chunk 2048, batch 64", SMALL[0].name, SMALL[1].name}
    explorer.forget.click()
    assert {name for name, _ in table_of(explorer)} == {"chunk 2048, batch 64"}


def test_a_chosen_curve_that_makes_room_for_others_is_chosen_no_more(explorer: ParetoExplorer) -> None:
    for cap in (1, 2, 4):
        explorer.cap.value = cap
        explorer.keep.click()
    explorer.points_menu.value = at(explorer, SMALL[1], 4.0)
    explorer.cap.value = 8
    explorer.points_menu.value = at(explorer, SMALL[1], 4.0)
    explorer.keep.click()
    assert Line(explorer.place, SMALL[1]) not in explorer.lines
    assert explorer.chosen == at(explorer, Setting(max_num_seqs=8), 4.0)
    assert "batch 8 at 4 requests/s" in explorer.sentence.value


def test_a_kept_curve_stays_on_its_machine(explorer: ParetoExplorer) -> None:
    explorer.forget.click()
    here = explorer.sweep.point(SMALL[0], 4.0, NUM).summary.ttft_p99_s
    explorer.keep.click()
    assert f"Kept: {SMALL[0].name}, Llama-3.1-8B on A100-80 SXM" in explorer.kept_said.value
    explorer.gpus.value = "H100 SXM"
    there = explorer.sweep.point(SMALL[0], 4.0, NUM).summary.ttft_p99_s
    names, rows = [f"{SMALL[0].name} on {gpu}" for gpu in ("H100 SXM", "A100-80 SXM")], table_of(explorer)
    assert list(dict.fromkeys(name for name, _ in rows)) == names and there < here
    assert [rows[name, 4.0]["TTFT p99 (s)"] for name in names] == [there, here]
    assert "Llama-3.1-8B on one H100 SXM and Llama-3.1-8B on one A100-80 SXM" in explorer.draw().caption
    assert all(f"{name} carries" in explorer.draw().title for name in names)
    viz_checks.check(explorer.draw().svg)
    next(b for b in explorer.pressable.buttons if b.tooltip == f"{names[1]} at 9 requests/s").click()
    assert explorer.chosen[0].place[0] == "A100-80 SXM" and names[1] in explorer.steps_picture.value
    explorer.models.value = "Qwen2.5-0.5B"  # the curve of what the controls say is chosen then
    assert explorer.name(explorer.chosen[0]) == f"{SMALL[0].name}, Qwen2.5-0.5B on H100 SXM"
    explorer.forget.click()
    assert explorer.kept_said.value == "" and {name for name, _ in table_of(explorer)} == {SMALL[0].name}


def test_where_nothing_is_carried_the_lightest_load_says_why() -> None:
    explorer = made(settings=SMALL[:1], ttft_s=0.001, itl_s=0.001)
    said = dict(explorer.story())["No rate keeps the limits"]
    lightest = explorer.sweep.point(SMALL[0], RATES[0], NUM).summary
    assert said.startswith(f"At 1 requests/s, the lightest load, TTFT p99 is {said_s(lightest.ttft_p99_s)} and ITL p99")
    assert said.endswith("Try a wider limit, shorter prompts and a smaller chunk.")
    explorer.ttft.value, explorer.itl.value = 10.0, 1.0
    assert "No rate keeps the limits" not in dict(explorer.story())
    assert ">≥ 9/s<" in explorer.picture.value and "carries 9 requests/s or more" in explorer.draw().title


def test_requests_that_the_model_cannot_take_are_told_and_the_others_judged() -> None:
    explorer = made(model="llama-2-7b", num_requests=200, rates=(1.0, 2.0), settings=SMALL[:1])
    point = explorer.point()
    assert point.summary.num_refused and point.summary.ttft_p99_s < 1 and explorer.carries([point]) == 2.0
    assert f"{point.summary.num_refused} of the 200 requests can never be served, most of them longer than" in words(
        explorer
    )
    with pytest.raises(
        InvalidRequestError, match="was made for 2,048 tokens, and the shortest prompt of mine has 3,000"
    ):
        made(model="opt-13b", workload=Workload("mine", [Job(float(at), range(3000), 5) for at in range(9)]))


def test_what_has_no_run_yet_carries_nothing_yet() -> None:
    async def move() -> None:
        explorer = made(num_requests=LONG)
        explorer.gpus.value = "H100 SXM"  # the chosen point comes at once, the curves behind it
        assert "none" not in explorer.draw().title and "carries" not in explorer.draw().title.replace(
            "each setting carries", ""
        )

    asyncio.run(move())


def test_while_a_machine_is_refused_nothing_is_kept_or_chosen(explorer: ParetoExplorer) -> None:
    about = (explorer.points_menu, explorer.keep, explorer.forget)
    explorer.gpus.value = "T4"
    assert "does not fit on one T4" in explorer.error.value and all(widget.disabled for widget in about)
    explorer.gpus.value = "A100-80 SXM"
    assert explorer.error.value == "" and not any(widget.disabled for widget in about)


def test_kept_curves_are_told_apart_and_a_fifth_takes_the_place_of_the_first(explorer: ParetoExplorer) -> None:
    for model in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B", "Llama-2-13B", "Qwen3-8B"):
        explorer.models.value = model
        explorer.keep.click()
    assert [line.place[1] for line in explorer.kept] == ["Qwen2.5-7B", "Llama-3.1-8B", "Llama-2-13B", "Qwen3-8B"]
    assert "with Azure conv (twin); chunk" in explorer.kept_said.value and "4 at most" in explorer.kept_said.value
    for width in WIDTHS:
        viz_checks.check(explorer.draw(width).svg)
    explorer.works.value = "Azure code (twin)"
    assert (
        f"{NUM} requests of Azure code 2023 (synthetic twin) and {NUM} requests of Azure conv"
        in explorer.draw().caption
    )


def test_a_rate_that_varies_is_told_as_it_was_while_answers_were_counted() -> None:
    times = [*range(0, 60, 6), *range(60, 110)]  # one every six seconds, then six times as many
    explorer = made(
        workload=Workload("late", [Job(at, range(100), 5) for at in times]), rates=(0.5,), settings=SMALL[:1]
    )
    point = explorer.point()
    assert point.arrival_rate == pytest.approx(44 / point.window.seconds) and point.arrival_rate > 0.6
    assert f"while {point.arrival_rate:.3g} requests/s arrive (the rate varies)" in words(explorer)


def test_static_batching_and_another_policy(explorer: ParetoExplorer) -> None:
    explorer.kind.value = STATIC
    assert explorer.budget.disabled and "static, batch 64" in explorer.sentence.value
    explorer.kind.value = "mixed"
    explorer.policy.value = "shortest prompt first"
    assert not explorer.budget.disabled and "shortest prompt first" in explorer.sentence.value
    viz_checks.check(explorer.draw().svg)


def test_the_steps_open_at_a_telling_moment_and_can_be_moved() -> None:
    explorer = made(settings=SMALL[:1], num_blocks=300)  # blocks run out
    kinds = [kind for _, kind in explorer.moments_menu.options]
    assert kinds == ["preemption", "queue", "start"] and explorer.moments_menu.value == "preemption"
    seen = set()
    for name, kind in explorer.moments_menu.options:
        explorer.moments_menu.value = kind
        assert f"at 4 requests/s, {name}: the longest of" in explorer.steps_picture.value
        viz_checks.check(explorer.steps().svg)
        seen.add(explorer.steps_picture.value)
    assert len(seen) == 3
    explorer.points_menu.value = at(explorer, SMALL[0], 9.0)  # what was asked for holds for the next run too
    assert explorer.moments_menu.value == "start" and "at 9 requests/s, the beginning" in explorer.steps_picture.value


# ---- what can be chosen ----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_the_rest_is_greyed(explorer: ParetoExplorer) -> None:
    picture = explorer.picture.value
    explorer.gpus.value = "T4"
    said = unescape(explorer.error.value)
    advice, arithmetic = said.split("<pre")
    columns = re.search(r"\n(  memory +[\d.]+) GB .*\n(  usable, x 0.9 +[\d.]+) GB\n", arithmetic)
    assert columns and len(columns[1]) == len(columns[2])
    assert "weights alone are too large; choose a GPU with more memory (L4, A10G" in advice
    assert "or a smaller model" in advice and "Greyed below: what was shown before, Llama-3.1-8B on A100" in advice
    assert "dtype_bytes" not in said and "split" not in said  # there is no control for those
    assert "cbserve-stale" in explorer.shown._dom_classes
    assert explorer.picture.value == picture and explorer.gpu == "A100-80 SXM"
    explorer.gpus.value = "H100 SXM"
    assert not explorer.error.value and "H100 SXM" in explorer.caption.value
    assert "cbserve-stale" not in explorer.shown._dom_classes


def test_an_alert_keeps_the_columns_of_its_later_lines() -> None:
    assert not alert("")
    assert "<pre" not in alert("one <line>") and "one &lt;line&gt;" in alert("one <line>")
    assert re.search(r"<pre [^>]*word-break:normal;", alert("first\n  a    1\n  bcd  2"))
    assert "  a    1\n  bcd  2" in alert("first\n  a    1\n  bcd  2")


def test_this_machine_is_in_the_menu_once_it_is_calibrated(calibration: Calibration) -> None:
    explorer = made(rates=(0.01, 0.02), settings=SMALL[:1])
    name = "this machine (calibrated 2026-01-02)"
    assert explorer.gpus.options[-1] == name and not explorer.models.disabled
    explorer.gpus.value = name
    assert not explorer.error.value and explorer.models.disabled and explorer.models.value == "Qwen2.5-0.5B"
    assert "Qwen2.5-0.5B on a small box, calibrated with Qwen2.5-0.5B on 2026-01-02" in explorer.caption.value
    assert explorer.sweep.cost == calibration.cost()
    # As `cbserve sim --gpu this` has it: so many requests of the model's length, and no more than fit
    room = 512_000_000 // calibration.model.block_bytes(16, 2)
    assert explorer.sweep.num_blocks(Setting()) == min(64 * 128, room)
    explorer.gpus.value = "A100-80 SXM"
    assert not explorer.models.disabled and "Qwen2.5-0.5B on one A100-80 SXM" in explorer.caption.value
    same = made(gpu="this", rates=(0.01,), settings=SMALL[:1])
    assert same.gpus.value == name and same.models.value == "Qwen2.5-0.5B"
    # What a CPU can answer: short chats, with limits that fit, unless others are asked for
    assert same.works.value == "short chats" and (same.ttft.value, same.itl.value) == (5.0, 0.5)
    conv = made(gpu="this", rates=(0.01,), settings=SMALL[:1], workload="conv", ttft_s=2.0)
    assert conv.works.value == "Azure conv (twin)" and (conv.ttft.value, conv.itl.value) == (2.0, 0.5)


def test_a_calibration_in_a_file_is_a_machine_too(calibration: Calibration, tmp_path: Path) -> None:
    path = calibration.save(tmp_path / "their-box.json")
    for given in (path, str(path)):
        explorer = made(gpu=given, rates=(0.01,), settings=SMALL[:1])
        assert explorer.gpus.value == "their-box.json (calibrated)" and explorer.models.disabled
        assert explorer.sweep.cost == calibration.cost()


def test_a_machine_whose_memory_nobody_knows_needs_its_number_of_blocks(calibration: Calibration) -> None:
    replace(calibration, environment={"threads": 0}).save()
    with pytest.raises(InvalidRequestError, match="a small box for a KV cache is not known: give num_blocks"):
        pareto_explorer(gpu="this")
    assert made(gpu="this", rates=(0.01,), settings=SMALL[:1], num_blocks=500).sweep.num_blocks(Setting()) == 500


def test_this_machine_without_a_calibration_or_with_another_model(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FigureError, match="calibrated with Qwen2.5-0.5B; leave model out"):
        pareto_explorer(gpu="this", model="llama-3.1-8b")
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(CBServeError, match="cbserve calibrate"):
        pareto_explorer(gpu="this")
    assert not [name for name in made(rates=(1.0,), settings=SMALL[:1]).gpus.options if "this machine" in name]


def test_a_model_of_ones_own_is_the_folder_of_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-mistral"
    folder.mkdir()
    config = {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 16, "intermediate_size": 14336, "vocab_size": 32000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for given in (folder, str(folder), folder / "config.json", model_shape(folder)):
        explorer = made(model=given, rates=(4.0,), settings=SMALL[:1])
        assert explorer.models.value == "my-mistral" and explorer.sweep.cost.model.num_layers == 16
    explorer.models.value = "Llama-3.1-8B"
    explorer.models.value = "my-mistral"
    assert explorer.sweep.cost.model.num_layers == 16 and "my-mistral on one A100" in explorer.caption.value


def test_a_workload_is_a_trace_file_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows = [f"2023-11-16 18:15:{second:02d}.0,{100 + second},20" for second in range(60)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    for given in (path, str(path)):
        explorer = made(workload=given, rates=(4.0,), settings=SMALL[:1])
        assert explorer.works.options[0] == explorer.works.value == "mine"
        assert explorer.point().num_requests == NUM
    assert [len(job.prompt) for job in explorer.sweep.workload.jobs] == list(range(100, 160))
    with pytest.raises(FigureError, match=r"'mine\.csv'.*path of a trace.*read_trace"):
        pareto_explorer(workload="mine.csv")  # not there


def test_a_workload_of_ones_own_comes_first_in_the_menu() -> None:
    own = azure_twin("code", 50, seed=7)
    explorer = made(workload=Workload("mine", own.jobs), rates=(2.0,), settings=SMALL[:1])
    assert explorer.works.options[0] == "mine" and "50 requests of mine" in explorer.figure.caption


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"settings": ()}, FigureError),
        ({"settings": (Setting(policy="nobody"),)}, FigureError),
        ({"rates": ()}, FigureError),
        ({"rates": (4.0, 1.0)}, FigureError),
        ({"workload": "chats"}, FigureError),
        ({"gpu": "t4"}, InvalidRequestError),
        ({"model": "gpt-9"}, Exception),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options)) if error is FigureError else "t4|T4|gpt-9"):
        pareto_explorer(**options)
    with pytest.raises(InvalidRequestError, match="batching='magic'"):
        Setting("magic")


# ---- the figure ------------------------------------------------------------------------------------------------------


def test_a_frontier_of_points_in_one_place_is_well_drawn() -> None:
    marks = [Mark(0.5, 100.0, f"{i}/s", f"point {i}", True) for i in range(3)]
    figure = frontier(
        [Curve("one", marks[:1]), Curve("two", marks[1:2]), Curve("none", [])], title="All in one place", x_name="x",
        y_name="y", caption="c", table=(["a"], [[1]]), limit=(3.0, "limit 3"), chosen=marks[0],
    )  # fmt: skip
    viz_checks.check(figure.svg)
    assert [len(line) for line in figure.places] == [1, 1, 0]
    with pytest.raises(FigureError, match="nothing to draw"):
        frontier([Curve("none", [])], title="t", x_name="x", y_name="y", caption="c", table=(["a"], []))


@pytest.mark.parametrize("width", [320, *WIDTHS])
@pytest.mark.parametrize("chosen", [0, 7])
def test_rates_that_would_stand_on_each_other_are_left_out_but_never_the_chosen_one(width: int, chosen: int) -> None:
    marks = [Mark(0.5 + 0.001 * i, 100.0 + i, f"{i / 7:.3g}/s", f"point {i}", True, False, 30.0 + i) for i in range(12)]
    figure = frontier(
        [Curve("one", marks)], title="Close to each other", x_name="x", y_name="y", caption="c", table=(["a"], [[1]]),
        limit=(0.505, "limit"), chosen=marks[chosen], bounds=[(32.0, "batch cap 32"), (169.0, "critical batch 169")],
        large=("5/s", ["requests"]), width=width,
    )  # fmt: skip
    viz_checks.check(figure.svg)
    drawn = [box.text for box in viz_checks.texts(figure.svg)]
    assert drawn.count(marks[chosen].label) == 2  # in the plot and in the strip
    assert 2 <= sum(mark.label in drawn for mark in marks) < len(marks)


def test_a_mark_without_a_value_is_left_out_everywhere() -> None:
    marks = [Mark(0.5, 100.0, "1/s", "one", True, in_flight=3.0), Mark(float("nan"), 1.0, "2/s", "two", False)]
    figure = frontier(
        [Curve("one", marks)], title="t", x_name="x", y_name="y", caption="c", table=(["a"], []), chosen=marks[1],
        bounds=[(8.0, "batch cap 8")],
    )  # fmt: skip
    viz_checks.check(figure.svg)
    assert len(figure.places[0]) == 1 and "2/s" not in figure.svg and "<circle" not in figure.svg


# ---- pitfall 2 -------------------------------------------------------------------------------------------------------


def naive_gaps(cost: Roofline, budget: int, others: int = 8, prompt: int = 10_000) -> tuple[float, float]:
    """(longest gap of the first of the others, TTFT of the long prompt) from the metrics of every token."""
    machine = machine_of(Machines("a100-80", None), "A100-80 SXM", "Llama-3.1-8B")
    jobs = [Job(0.0, range(10**6 * i, 10**6 * i + 100), 200) for i in range(1, others + 1)]
    jobs.append(Job(settled(machine, others, budget)[0], range(prompt), 8))
    batching = ContinuousBatching(max_num_seqs=others + 1, max_num_batched_tokens=budget)
    records = {
        r.request_id: r for r in sequence_metrics(simulate(Workload("w", jobs), cost, 26_000, batching=batching).trace)
    }
    return max(records["0"].itl_s), records[str(others)].ttft_s


@pytest.fixture
def long_prompt() -> Scene:
    made = long_prefill_scene()
    made.build()
    return made


@pytest.mark.parametrize("budget", [256, 512, 2048, WHOLE])
def test_the_gaps_of_the_others_are_those_of_every_token(long_prompt: Scene, cost: Roofline, budget: int) -> None:
    long_prompt.widgets["token_budget"].value = budget
    gap, ttft = naive_gaps(cost, budget)
    viz_checks.check(long_prompt.figure.svg)
    name = "whole" if budget == WHOLE else f"chunk {budget:,}"
    row = next(row for row in long_prompt.figure.table[1] if row[0] == name)
    assert row[1] == pytest.approx(1e3 * gap, rel=1e-6) and row[3] == pytest.approx(1e3 * ttft, rel=1e-6)
    assert f"for {said_s(gap)}" in long_prompt.figure.title
    assert said_s(gap) in long_prompt.sentence.value and said_s(ttft) in long_prompt.sentence.value
    assert row[2] == 0 if gap <= 0.1 else row[2] > 0


def test_the_handouts_half_second_stall_comes_from_an_uncut_prompt(long_prompt: Scene) -> None:
    header, rows = long_prompt.figure.table
    gaps = [row[1] for row in rows]
    assert gaps == sorted(gaps) and gaps[-1] > 500 > 50 > gaps[1]  # ms: whole, and in chunks of 512
    waits = [row[3] for row in rows]
    assert waits == sorted(waits, reverse=True)  # the price: smaller chunks, a later first token
    long_prompt.data.value = True
    assert long_prompt.table.value.count("<tr>") == 1 + len(rows)


@pytest.mark.parametrize("make", [long_prefill_scene, cold_start_scene])
def test_a_scene_refuses_what_does_not_fit_with_a_cure_that_it_has_and_greys_the_rest(
    make: Callable[..., Scene],
) -> None:
    scene = make()
    scene.build()
    picture = scene.picture.value
    scene.widgets["gpu"].value = "T4"
    advice = unescape(scene.error.value)
    assert "choose a GPU with more memory (L4, A10G" in advice and "or a smaller model" in advice
    assert "dtype_bytes" not in advice and "= left for K and V" in advice
    assert "Greyed below: what was shown before, GPU A100-80 SXM." in advice
    assert "cbserve-stale" in scene.shown._dom_classes and scene.picture.value == picture
    scene.widgets["prompt_tokens"].value = 1_000
    assert "before, GPU A100-80 SXM, prompt tokens 10,000." in unescape(scene.error.value)
    scene.widgets["gpu"].value = "H100 SXM"
    assert not scene.error.value and "H100 SXM" in scene.picture.value
    assert "cbserve-stale" not in scene.shown._dom_classes


@pytest.mark.parametrize("num_others", [1, 32])
@pytest.mark.parametrize("prompt_tokens", [1_000, 100_000])
@pytest.mark.parametrize("make", [long_prefill_scene, cold_start_scene])
def test_a_scene_is_well_drawn_at_its_ends_in_every_width(
    make: Callable[..., Scene], num_others: int, prompt_tokens: int
) -> None:
    scene = make(num_others=num_others, prompt_tokens=prompt_tokens)
    scene.build()
    drawn = re.findall(r'<div class="cbserve-w(\d+)">.*?(<svg.*?</svg>)', scene.picture.value, re.S)
    assert [int(width) for width, _ in drawn] == [*WIDTHS]
    for width, svg in drawn:
        viz_checks.check(svg)
        assert f'viewBox="0 0 {width} ' in svg


@pytest.mark.parametrize("make", [long_prefill_scene, cold_start_scene])
def test_a_scene_takes_this_machine_with_its_model(make: Callable[..., Scene], calibration: Calibration) -> None:
    scene = make(gpu="this", prompt_tokens=1_000)
    scene.build()
    gpu, model = scene.widgets["gpu"], scene.widgets["model"]
    assert gpu.value == "this machine (calibrated 2026-01-02)" and (model.value, model.disabled) == (
        "Qwen2.5-0.5B",
        True,
    )
    assert "Simulated for Qwen2.5-0.5B on a small box (calibrated), not measured" in scene.figure.caption
    gpu.value = "A100-80 SXM"
    assert not model.disabled and "Qwen2.5-0.5B on one A100-80 SXM" in scene.figure.caption
    model.value = "Llama-3.1-8B"
    gpu.value = "this machine (calibrated 2026-01-02)"
    assert (model.value, model.disabled) == ("Qwen2.5-0.5B", True) and "on a small box" in scene.figure.caption
    replace(calibration, environment={"threads": 0}).save()
    with pytest.raises(InvalidRequestError, match="a small box for a KV cache is not known; choose a GPU"):
        make(gpu="this")


def test_a_prompt_that_would_push_the_others_out_is_refused(calibration: Calibration) -> None:
    """They would be preempted, which is another pitfall."""
    replace(calibration, environment={"threads": 2, "max_model_len": 65_536}).save()
    machine = machine_of(Machines("this", None), "this machine (calibrated 2026-01-02)", "Qwen2.5-0.5B")
    room = machine.num_blocks * 16
    with pytest.raises(
        InvalidRequestError, match=rf"beside 32 other answers: .* has room for {room:,} in all; .*fewer"
    ):
        long_prefill_scene(gpu="this", prompt_tokens=room - 3_000, num_others=32)


@pytest.mark.parametrize("make", [long_prefill_scene, cold_start_scene])
def test_a_scene_begins_with_a_prompt_that_the_machine_and_the_model_take(
    make: Callable[..., Scene], calibration: Calibration
) -> None:
    assert make().values["prompt_tokens"] == 10_000
    assert make("this").values["prompt_tokens"] == 2_000
    scene = make("a100-80", "tinyllama-1.1b")  # made for 2,048
    assert scene.values["prompt_tokens"] == 2_000 + 40
    limit = "tokens and an answer of 8: the limit of SmolLM2-135M is 8,192 in all .*choose a shorter .* another model"
    make("a100-80", "smollm2-135m", prompt_tokens=8_184)
    with pytest.raises(InvalidRequestError, match=f"a prompt of 8,185 {limit}"):
        make("a100-80", "smollm2-135m", prompt_tokens=8_185)


@pytest.mark.parametrize(("token_budget", "num_others"), [(1, 1), (1, 8), (8, 8)])
def test_a_chunk_that_the_decodes_fill_is_refused_as_that(token_budget: int, num_others: int) -> None:
    what = f"a chunk of {token_budget} tokens? a step: it must be above {num_others}, .*; choose a larger chunk"
    with pytest.raises(InvalidRequestError, match=what):
        long_prefill_scene("h100", token_budget=token_budget, num_others=num_others)


@pytest.mark.parametrize(
    ("make", "argument", "values", "wanted"),
    [
        (long_prefill_scene, "prompt_tokens", (-5, 0, 2.5, True, "10"), "an integer of at least 1"),
        (long_prefill_scene, "token_budget", (0, 512.0, WHOLE + 1), "an integer of at least 1 and at most 1000000000"),
        (long_prefill_scene, "num_others", (0, -1, 100_000), "an integer of at least 1 and at most 127"),
        (long_prefill_scene, "itl_s", (math.nan, 0, math.inf, "0.1"), "a number above 0"),
        (cold_start_scene, "prompt_tokens", (-5, 2.5), "an integer of at least 1"),
        (cold_start_scene, "cached_share", (-1, 1.0, math.nan), "a share from 0 to 0.99"),
        (cold_start_scene, "num_others", (-1, 100_000), "an integer of at least 0 and at most 127"),
        (cold_start_scene, "ttft_s", (math.nan, 0), "a number above 0"),
    ],
)
def test_a_scene_refuses_an_odd_argument_by_name(
    make: Callable[..., Scene], argument: str, values: tuple[Any, ...], wanted: str
) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError, match=re.escape(f"{argument}={value!r}: must be {wanted}")):
            make(**{argument: value})


def test_a_prompt_that_fills_the_pool_is_refused_at_once() -> None:
    shape = replace(model_shape("llama-3.1-8b"), name="of no known limit", max_position_embeddings=None)
    with pytest.raises(InvalidRequestError, match="a prompt of 1,000,000,000 tokens: the KV pool of .* has room for"):
        cold_start_scene(model=shape, prompt_tokens=10**9)


def test_a_gap_of_seconds_is_said_in_seconds_to_all() -> None:
    rows = [TokenRow("a", [0.0, 1.234], 2.0), TokenRow("b", [0.0, 0.05], 2.0)]
    figure = token_gaps(rows, 0, 0.1, title="t", x_name="x", event="e", caption="c", table=(["a"], []))
    drawn = {box.text for box in viz_checks.texts(figure.svg)}
    for row, gap in zip(rows, ("1.23 s", "50 ms"), strict=True):
        assert gap in drawn and f"{row.name}: longest gap {gap}, first token" in figure.desc


@pytest.mark.parametrize(
    "seconds, said, limit",
    [
        (0.0123, "12.3 ms", "12.3 ms"),
        (0.9994, "999 ms", "999.4 ms"),
        (0.9996, "1 s", "999.6 ms"),
        (2.0, "2 s", "2 s"),
        (19_700.4, "19,700 s", "19700.4 s"),
    ],
)
def test_seconds_in_the_unit_that_suits(seconds: float, said: str, limit: str) -> None:
    assert (said_s(seconds), round_ms(seconds)) == (said, limit)


def test_rows_without_tokens_are_refused() -> None:
    with pytest.raises(FigureError, match="nothing to draw"):
        token_gaps(
            [TokenRow("a", [1.0], 2.0)], 0, 0.1, title="t", x_name="x", event="e", caption="c", table=(["a"], [])
        )


# ---- pitfall 3 -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cold() -> Scene:
    made = cold_start_scene()
    made.build()
    return made


def test_the_wait_for_the_first_token_is_the_prefill(cold: Scene, cost: Roofline) -> None:
    run = simulate(
        Workload("w", [Job(0.0, range(10_000), 8)]), cost, 26_000,
        batching=ContinuousBatching(max_num_batched_tokens=2048),
    )  # fmt: skip
    waits = {row[0]: row[1] for row in cold.figure.table[1]}
    assert waits[10_000] == pytest.approx(run.summary.ttft_mean_s, rel=1e-9)
    viz_checks.check(cold.figure.svg)
    assert f"waits {said_s(waits[10_000])}" in cold.figure.title
    assert waits[100_000] > 20 * waits[10_000] / 2  # faster than in proportion: attention
    said = re.search(r"200 ms is enough for about ([\d,]+) tokens$", cold.figure.title)
    enough = int(said[1].replace(",", ""))
    batching = ContinuousBatching(max_num_batched_tokens=2048)
    for tokens, is_enough in ((enough, True), (round(1.02 * enough), False)):
        run = simulate(Workload("w", [Job(0.0, range(tokens), 8)]), cost, 26_000, batching=batching)
        assert (run.summary.ttft_mean_s <= 0.2) == is_enough


@pytest.mark.parametrize(
    ("prompt_tokens", "ttft_s", "said"),
    [(250, 0.001, "1 ms is not enough for a single token"), (250, 1e3, "1000 s is enough for 100,000 tokens and more")],
)
def test_a_limit_that_no_length_meets_or_all_meet(prompt_tokens: int, ttft_s: float, said: str) -> None:
    assert cold_start_scene(prompt_tokens=prompt_tokens, ttft_s=ttft_s).figure.title.endswith(said)


def test_lengths_end_where_the_model_does() -> None:
    scene = cold_start_scene(model="smollm2-135m", ttft_s=1e3)
    assert [row[0] for row in scene.figure.table[1]] == [250, 500, 1_000, 2_000, 5_000, 8_184]
    assert scene.figure.title.endswith("1000 s is enough for the longest that the model takes, 8,184 tokens")


@pytest.mark.parametrize(("num_others", "named"), [(1, "1 other answer"), (32, "32 other answers")])
def test_what_the_others_cost_is_said_as_the_run_has_it(cold: Scene, num_others: int, named: str) -> None:
    """They decode when the prompt comes: it waits for the step in progress, not for their prompts."""
    cold.widgets["prompt_tokens"].value = 250
    alone = {row[0]: row[1] for row in cold.figure.table[1]}[250]
    cold.widgets["num_others"].value = num_others
    here = {row[0]: row[2] for row in cold.figure.table[1]}[250]
    assert alone < here < 2 * alone
    others = dict(cold.told)["The others"]
    assert f"without them it would wait {said_s(alone)}. Of the {said_s(here)}," in others
    assert f"gives a token to {named} too." in cold.figure.caption and f">{named}<" in cold.figure.svg


def test_a_cached_prefix_shortens_it_and_others_do_not_lengthen_it_much(cold: Scene) -> None:
    alone = {row[0]: row[2] for row in cold.figure.table[1]}[10_000]
    cold.widgets["num_others"].value = 8
    among = {row[0]: row[2] for row in cold.figure.table[1]}[10_000]
    assert alone < among < 1.2 * alone
    cold.widgets["num_others"].value = 0
    cold.widgets["cached_share"].value = 0.9
    cached = {row[0]: row[2] for row in cold.figure.table[1]}[10_000]
    assert cached < 0.2 * alone
    assert said_s(cached) in cold.sentence.value and "90 % cached" in cold.picture.value
    viz_checks.check(cold.figure.svg)


def test_a_prompt_larger_than_the_pool_is_refused_with_its_room(cold: Scene) -> None:
    cold.widgets["prompt_tokens"].value = 100_000
    cold.widgets["gpu"].value = "L4"
    assert re.search(r"100,000 tokens: the KV pool .* has room for [\d,]+ in all; choose a shorter", cold.error.value)


def test_all_show_a_static_copy_that_the_widget_hides(
    explorer: ParetoExplorer, cold: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cbserve.explorers import showing

    for has_kernel in (True, False):
        for thing in (explorer, cold):
            shown: list = []
            monkeypatch.setattr(showing, "has_kernel", lambda has_kernel=has_kernel: has_kernel)
            monkeypatch.setattr("IPython.display.display", lambda *a, shown=shown, **k: shown.append((a, k)))
            thing._ipython_display_()
            assert len(shown) == 1 + has_kernel
            static = shown[-1][0][0].data
            assert thing.static_class in static and "data:image/svg+xml;base64" in static and "<table>" in static
