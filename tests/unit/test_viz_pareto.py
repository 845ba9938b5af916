"""The frontier explorer and the pitfalls' scenes have the numbers of `simulate`, and controls change them."""

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest
import viz_checks

from cbserve import ContinuousBatching, Job, Roofline, Workload, azure_twin, kv_capacity, sequence_metrics, simulate
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import FigureError
from cbserve.explorers import ParetoExplorer, Scene, Setting, cold_start_scene, long_prefill_scene, pareto_explorer
from cbserve.explorers.pareto_view import GOODPUT, ITL, TOKENS, TTFT
from cbserve.explorers.pitfall_scenes import WHOLE
from cbserve.explorers.scene import Control
from cbserve.explorers.setting import POLICIES, PREFILL_FIRST, STATIC
from cbserve.explorers.showing import Background, alert
from cbserve.explorers.sweep import Sweep
from cbserve.viz.figure import Figure
from cbserve.viz.frontier import Curve, Mark, frontier
from cbserve.viz.style import round_ms, said_s
from cbserve.viz.token_gaps import TokenRow, token_gaps

pytest.importorskip("ipywidgets")
NUM, RATES = 50, (1.0, 4.0, 9.0)
SMALL = (Setting(), Setting(PREFILL_FIRST, 64, 2048))


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


@pytest.fixture
def explorer() -> ParetoExplorer:
    made = pareto_explorer(num_requests=NUM, rates=RATES, settings=SMALL)
    made.build()
    return made


def simulated(cost: Roofline, setting: Setting, rate: float):
    """The run that a point stands for, made without the explorer."""
    workload = azure_twin("conv", NUM, seed=1).scaled(rate)
    longest = max(job.num_output_tokens for job in workload.jobs)
    return simulate(
        workload, cost, kv_capacity("llama-3.1-8b", "a100-80").num_blocks, batching=setting.make(),
        policy=POLICIES[setting.policy](), max_tokens=longest,
    )  # fmt: skip


def table_of(explorer: ParetoExplorer) -> dict[tuple[str, float], dict[str, object]]:
    header, rows = explorer.draw().table
    return {(row[0], row[1]): dict(zip(header, row, strict=True)) for row in rows}


# ---- points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [Setting(), Setting(PREFILL_FIRST, 8, 1024), Setting(STATIC, 16), Setting(policy="shortest prompt first")],
    ids=lambda s: s.name,
)
def test_a_point_is_a_run_of_the_scheduler(cost: Roofline, setting: Setting) -> None:
    sweep = Sweep("a100-80", "llama-3.1-8b", azure_twin("conv", NUM, seed=1), POLICIES)
    point, run = sweep.point(setting, 4.0), simulated(cost, setting, 4.0)
    assert point.summary == run.summary
    assert sweep.point(setting, 4.0) is point
    records = sequence_metrics(run.trace)
    # Little's law: the requests in flight are their time in the system over the whole time
    assert point.in_flight == pytest.approx(sum(r.e2e_s for r in records) / run.fold.makespan_s, rel=1e-9)
    assert point.answer_rate == pytest.approx(NUM / run.fold.makespan_s)


def test_the_rates_follow_the_hardware() -> None:
    workload = azure_twin("conv", NUM, seed=1)
    slow, fast = (Sweep(gpu, "llama-3.1-8b", workload, POLICIES) for gpu in ("a100-80", "h100"))
    assert list(slow.rates) == sorted(set(slow.rates)) and len(slow.rates) == 6
    assert 1.5 < fast.rates[-1] / slow.rates[-1] < 4
    # The last one is about what the hardware can do: the engine does not get far beyond it
    most = simulate(
        workload.scaled(1000), slow.cost, slow.num_blocks, batching=ContinuousBatching(max_num_seqs=128)
    )  # fmt: skip
    assert 0.5 * slow.rates[-1] < NUM / most.fold.makespan_s < 1.5 * slow.rates[-1]


def test_shortest_prompt_first() -> None:
    jobs = [Job(0.01 * i, range(1000 * i, 1000 * i + n), 5) for i, n in enumerate((500, 400, 30, 200))]
    sweep = Sweep("a100-80", "llama-3.1-8b", Workload("four", jobs), POLICIES)
    trace = sweep.trace(Setting(max_num_seqs=1, policy="shortest prompt first"), 1000.0, 100)
    firsts = sorted(sequence_metrics(trace), key=lambda r: r.token_times_s[0])
    assert [r.num_prompt_tokens for r in firsts] == [500, 30, 200, 400]


# ---- the explorer ----------------------------------------------------------------------------------------------------


def test_picture_table_and_words_have_the_numbers_of_the_runs(explorer: ParetoExplorer, cost: Roofline) -> None:
    viz_checks.check(explorer.figure.svg)
    rows = table_of(explorer)
    assert len(rows) == len(SMALL) * len(RATES)
    carried = dict.fromkeys(SMALL, 0.0)
    for (name, rate), row in rows.items():
        setting = next(s for s in SMALL if s.name == name)
        run = simulated(cost, setting, rate)
        kept = run.summary.ttft_p99_s <= 1 and run.summary.itl_p99_s <= 0.1
        assert row["tokens/s"] == run.summary.tokens_per_s
        assert row["goodput/s"] == run.goodput(ttft=1.0, itl=0.1)
        assert (row["TTFT p99 (s)"], row["ITL p99 (s)"]) == (run.summary.ttft_p99_s, run.summary.itl_p99_s)
        assert row["keeps both"] == ("yes" if kept else "no")
        if kept:
            carried[setting] = max(carried[setting], rate)
    assert carried[SMALL[0]] > carried[SMALL[1]]  # chunks keep the gaps short
    for setting, rate in carried.items():
        said = f"{rate:g} requests/s" if rate else "none of the rates"
        assert f"{setting.name} carries {said}" in explorer.figure.title
    assert f"F/BW {cost.critical_batch():.0f}" in explorer.figure.svg
    assert "simulated" in explorer.figure.caption.lower()
    point = explorer.point()
    words = " ".join(what for _, what in explorer.story())
    assert f"{point.answer_rate:.3g} answers/s × {point.summary.e2e_mean_s:.3g} s" in words
    assert f"{point.in_flight:.3g} requests in flight" in words


def test_a_slider_changes_curve_table_and_words(explorer: ParetoExplorer, cost: Roofline) -> None:
    picture = explorer.picture.value
    explorer.data.value = True
    explorer.cap.value = 4
    run = simulated(cost, Setting(max_num_seqs=4), RATES[1])
    assert explorer.picture.value != picture
    assert f"{run.summary.tokens_per_s:,.0f} tokens/s" in explorer.sentence.value
    assert f"{run.summary.tokens_per_s:.1f} tokens/s" in explorer.table.value
    assert explorer.points.value == (Setting(max_num_seqs=4), RATES[1])
    assert {name for name, _ in table_of(explorer)} == {"chunk 512, batch 4", SMALL[1].name}
    assert "chunk 512, batch 4" in explorer.steps_picture.value


@pytest.mark.parametrize("x", [TTFT, ITL])
@pytest.mark.parametrize("y", [TOKENS, GOODPUT])
def test_every_view_is_well_drawn(explorer: ParetoExplorer, x: str, y: str) -> None:
    explorer.across.value, explorer.up.value = x, y
    figure = explorer.draw()
    viz_checks.check(figure.svg)
    assert f"{x} in seconds" in figure.svg
    assert ("goodput" in figure.svg) == (y == GOODPUT)


def test_limits_decide_what_is_kept(explorer: ParetoExplorer) -> None:
    kept = [row["keeps both"] for row in table_of(explorer).values()]
    explorer.ttft.value = 0.1
    assert [row["keeps both"] for row in table_of(explorer).values()] == ["no"] * len(kept) != kept
    assert "carries none of the rates" in explorer.draw().title and ">none<" in explorer.picture.value
    assert "beyond 100 ms" in explorer.sentence.value


def test_a_point_is_chosen_with_mouse_or_list(explorer: ParetoExplorer) -> None:
    seen = [button for button in explorer.buttons if button.layout.display != "none"]
    assert len(seen) == len(SMALL) * len(RATES)
    number = next(i for i, b in enumerate(explorer.buttons) if b.tooltip == f"{SMALL[1].name} at 9 requests/s")
    explorer.buttons[number].click()
    assert explorer.points.value == (SMALL[1], 9.0) and f"{SMALL[1].name} at 9 requests/s" in explorer.sentence.value
    assert f"{SMALL[1].name} at 9 requests/s" in explorer.steps_picture.value
    explorer.points.value = (SMALL[0], 1.0)
    assert f"{SMALL[0].name} at 1 requests/s" in explorer.sentence.value
    # Each button lies over its point
    figure = explorer.draw()
    width, height = figure.size
    x, y = figure.places[1][2]
    assert f"cbserve-pt-{number}{{left:{100 * x / width:.3f}%;top:{100 * y / height:.3f}%" in explorer.style.value


def test_curves_are_kept_and_forgotten(explorer: ParetoExplorer) -> None:
    explorer.keep.click()
    explorer.budget.value = 2048
    names = {name for name, _ in table_of(explorer)}
    assert names == {"chunk 2048, batch 64", SMALL[0].name, SMALL[1].name}
    explorer.forget.click()
    assert {name for name, _ in table_of(explorer)} == {"chunk 2048, batch 64"}


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_the_picture_stays(explorer: ParetoExplorer) -> None:
    picture = explorer.picture.value
    explorer.gpus.value = "T4"
    assert "does not fit" in explorer.error.value and "GB" in explorer.error.value
    assert explorer.picture.value == picture and explorer.gpu == "A100-80 SXM"
    explorer.gpus.value = "H100 SXM"
    assert not explorer.error.value and "H100 SXM" in explorer.caption.value


def test_static_batching_and_another_policy(explorer: ParetoExplorer) -> None:
    explorer.kind.value = STATIC
    assert explorer.budget.disabled and "static, batch 64" in explorer.sentence.value
    explorer.kind.value = "mixed"
    explorer.policy.value = "shortest prompt first"
    assert not explorer.budget.disabled and "shortest prompt first" in explorer.sentence.value
    viz_checks.check(explorer.draw().svg)


def test_in_a_live_kernel_the_chosen_point_comes_first_and_the_curve_behind_it(explorer: ParetoExplorer) -> None:
    async def move() -> tuple[int, int]:
        explorer.cap.value = 2
        at_once = len([key for key in table_of(explorer) if key[0] == "chunk 512, batch 2"])
        explorer.cap.value = 16  # overtakes the rest of batch 2
        for _ in range(300):
            await asyncio.sleep(0.01)
            if "batch 16" in explorer.steps_picture.value:
                break
        return at_once, len([key for key in table_of(explorer) if key[0] == "chunk 512, batch 16"])

    assert asyncio.run(move()) == (1, len(RATES))
    assert explorer.sweep.known(Setting(max_num_seqs=2), RATES[-1]) is None


def test_a_scene_that_still_answers_keeps_no_warning_from_the_learner(long_prompt: Scene) -> None:
    def answers(prompt_tokens: int) -> Iterator[tuple[Figure, list[tuple[str, str]]]]:
        for _ in range(50):
            yield long_prompt.figure, [("tokens", str(prompt_tokens))]

    scene = Scene(answers, {"prompt_tokens": Control("prompt tokens", [("1", 1), ("2", 2)])}, {"prompt_tokens": 1})
    scene.build()

    async def move() -> bool:
        scene.widgets["prompt_tokens"].value = 2
        await asyncio.sleep(0.1)  # a cell of the learner runs between two answers
        logger = logging.getLogger("cbserve")
        return logger.isEnabledFor(logging.WARNING) and not logger.disabled

    assert asyncio.run(move())


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


def test_an_alert_keeps_the_columns_of_its_later_lines() -> None:
    assert not alert("")
    assert "<pre" not in alert("one <line>") and "one &lt;line&gt;" in alert("one <line>")
    assert re.search(r"white-space:pre|<pre", alert("first\n  a    1\n  bcd  2"))
    assert "  a    1\n  bcd  2" in alert("first\n  a    1\n  bcd  2")


def test_background_work_without_a_loop_is_done_at_once() -> None:
    done: list[int] = []
    Background().start(done.append(i) for i in range(3))
    assert done == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"settings": ()}, FigureError),
        ({"settings": (Setting(policy="nobody"),)}, FigureError),
        ({"rates": ()}, FigureError),
        ({"rates": (4.0, 1.0)}, FigureError),
        ({"workload": "chat"}, FigureError),
        ({"gpu": "t4"}, InvalidRequestError),
        ({"model": "gpt-9"}, Exception),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options)) if error is FigureError else "t4|T4|gpt-9"):
        pareto_explorer(**options)
    with pytest.raises(InvalidRequestError, match="batching='magic'"):
        Setting("magic")


def test_a_workload_of_ones_own_comes_first_in_the_menu() -> None:
    own = azure_twin("code", 50, seed=7)
    made = pareto_explorer(workload=Workload("mine", own.jobs), num_requests=50, rates=(2.0,), settings=SMALL[:1])
    made.build()
    assert made.works.options[0] == "mine" and "50 requests of mine" in made.figure.caption


def test_a_frontier_of_points_in_one_place_is_well_drawn() -> None:
    marks = [Mark(0.5, 100.0, f"{i}/s", f"point {i}", True) for i in range(3)]
    figure = frontier(
        [Curve("one", marks[:1]), Curve("two", marks[1:2]), Curve("none", [])], title="All in one place", x_name="x",
        y_name="y", caption="c", table=(["a"], [[1]]), limit=(3.0, "limit 3"), chosen=(0, 0),
    )  # fmt: skip
    viz_checks.check(figure.svg)
    assert [len(line) for line in figure.places] == [1, 1, 0]
    with pytest.raises(FigureError, match="nothing to draw"):
        frontier([Curve("none", [])], title="t", x_name="x", y_name="y", caption="c", table=(["a"], []))


# ---- pitfall 2 -------------------------------------------------------------------------------------------------------


def naive_gaps(cost: Roofline, budget: int, others: int = 8, prompt: int = 10_000) -> tuple[float, float]:
    """(longest gap of the first of the others, TTFT of the long prompt) from the metrics of every token."""
    jobs = [Job(0.0, range(10**6 * i, 10**6 * i + 100), 200) for i in range(1, others + 1)]
    jobs.append(Job(0.2, range(prompt), 8))
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


def test_a_scene_refuses_what_does_not_fit_and_keeps_its_picture(long_prompt: Scene) -> None:
    picture = long_prompt.picture.value
    long_prompt.widgets["gpu"].value = "T4"
    assert "does not fit" in long_prompt.error.value and long_prompt.picture.value == picture
    long_prompt.widgets["gpu"].value = "H100 SXM"
    assert not long_prompt.error.value and "H100 SXM" in long_prompt.picture.value


@pytest.mark.parametrize("num_others", [1, 32])
@pytest.mark.parametrize("prompt_tokens", [1_000, 100_000])
def test_the_scene_is_well_drawn_at_its_ends(num_others: int, prompt_tokens: int) -> None:
    viz_checks.check(long_prefill_scene(num_others=num_others, prompt_tokens=prompt_tokens).figure.svg)


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
    longest = max(n for n, wait in waits.items() if wait <= 0.2)
    assert f"200 ms is enough for {longest:,}" in cold.figure.title


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
    assert re.search(r"100,000 tokens: the KV pool .* has room for [\d,]+", cold.error.value)


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
