"""The explorer answers: each control changes picture, words and table to the right values."""

import re

import pytest
from engine_harness import make_engine

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.metrics import slot_utilisation
from cbserve.core.policies import Priority
from cbserve.core.request import Request, SamplingParams
from cbserve.core.trace import Preempted
from cbserve.explorers import TimelineExplorer, timeline_explorer
from cbserve.explorers.lengths import LengthError, parse_lengths
from cbserve.explorers.story import tell
from cbserve.serving import serve
from cbserve.viz.style import percent

pytest.importorskip("ipywidgets")


@pytest.fixture
def explorer() -> TimelineExplorer:
    made = timeline_explorer([4, 9, 22, 6, 12], 3)
    made.build()
    return made


def used(lengths: list[int], slots: int) -> tuple[str, str]:
    static, continuous = StaticBatching(slots), ContinuousBatching(max_num_seqs=slots)
    return tuple(percent(slot_utilisation(serve(lengths, batching))) for batching in (static, continuous))


def test_it_starts_with_the_whole_run(explorer: TimelineExplorer) -> None:
    for share in used([4, 9, 22, 6, 12], 3):
        assert share in explorer.picture.value and share in explorer.figure.desc
    assert explorer.step.value == explorer.step.max == 34


def test_own_lengths(explorer: TimelineExplorer) -> None:
    explorer.text.value = "10, 100 500"
    static, continuous = used([10, 100, 500], 3)
    assert static == "40.7 %" and static in explorer.picture.value and continuous in explorer.picture.value
    assert explorer.count.value == 3 and explorer.step.max == 500


def test_slots_and_requests(explorer: TimelineExplorer) -> None:
    explorer.slots.value = 2
    explorer.count.value = 7
    for share in used([4, 9, 22, 6, 12, 4, 9], 2):
        assert share in explorer.picture.value


def test_batching_choice(explorer: TimelineExplorer) -> None:
    explorer.choice.value = "continuous"
    static, continuous = used([4, 9, 22, 6, 12], 3)
    assert continuous in explorer.picture.value and static not in explorer.picture.value
    assert len(explorer.story(1)) == 1


def test_the_table_follows_the_controls(explorer: TimelineExplorer) -> None:
    assert not explorer.table.value
    explorer.data.value = True
    assert explorer.table.value.count("<tr>") == 1 + 2 * 5
    explorer.text.value = "7, 8"
    explorer.choice.value = "continuous"
    assert explorer.table.value.count("<tr>") == 1 + 2 and ">8</td>" in explorer.table.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10, ten", "ten"),
        ("", "No length"),
        ("0", "0"),
        ("-3", "-3"),
        ("1.5", "1.5"),
        ("99999", "99999"),
        ("1 " * 50, "50"),
    ],
)
def test_a_bad_length_is_named_and_the_figure_stays(explorer: TimelineExplorer, text: str, value: str) -> None:
    with pytest.raises(LengthError, match=re.escape(value)):
        parse_lengths(text)
    picture = explorer.picture.value
    explorer.text.value = text
    assert value in explorer.error.value and explorer.picture.value == picture
    explorer.text.value = "5, 6"
    assert not explorer.error.value and explorer.picture.value != picture


def test_too_much_to_draw_is_refused_and_the_state_stays(explorer: TimelineExplorer) -> None:
    explorer.text.value = "1000, 1000, 1000, 1000, 1000"
    assert "5,000 tokens" in explorer.error.value
    explorer.slots.value = 2
    explorer.count.value = 5
    for share in used([4, 9, 22, 6, 12], 2):
        assert share in explorer.picture.value


def test_stepping_tells_what_was_decided(explorer: TimelineExplorer) -> None:
    explorer.step.value = 0
    assert explorer.back.disabled and "Nothing has run yet" in explorer.sentence.value
    explorer.forward.click()
    assert explorer.step.value == 1 and "A, B and C take slots 0, 1 and 2" in explorer.sentence.value
    explorer.decision.click()
    assert explorer.step.value == 4 and "A is complete" in explorer.sentence.value
    assert "Its slot stays taken until the batch ends" in explorer.sentence.value  # static
    assert "Slot 0 is free" in explorer.sentence.value  # continuous
    explorer.forward.click()
    assert "D takes slot 0" in explorer.sentence.value and "admits nobody until it ends" in explorer.sentence.value
    explorer.back.click()
    assert explorer.step.value == 4
    assert "used so far" in explorer.picture.value
    explorer._go(10**6)
    assert explorer.step.value == 34 and explorer.forward.disabled


def test_preemption_and_its_reason_are_told() -> None:
    explorer = timeline_explorer([20, 30, 12, 25], 4, show="continuous", num_blocks=9, block_size=8, prompt_tokens=20)
    explorer.build()
    told = " ".join(text for done in range(explorer.num_steps + 1) for text in explorer.story(done))
    assert "is preempted from slot" in told and "resumes in slot" in told and "0 free" in told
    explorer.blocks.value = 30
    told = " ".join(text for done in range(explorer.num_steps + 1) for text in explorer.story(done))
    assert "is preempted" not in told


@pytest.mark.parametrize(
    "how, way",
    [("recompute", "16 tokens will be computed again"), ("swap", "16 tokens will be copied back from the host")],
)
def test_what_becomes_of_a_victims_tokens_is_told(how: str, way: str) -> None:
    trace = serve([20] * 3, num_blocks=12, block_size=4, preemption=how)
    victim = next(trace.of(Preempted))
    assert way in tell(trace, victim.step, dict.fromkeys("ABC", "it"))


def test_displacement_is_told() -> None:
    explorer = timeline_explorer(
        [20, 30, 12, 3],
        3,
        show="continuous",
        policy=lambda: Priority(displace=True),
        priorities=[5, 5, 5, 0],
        arrivals_s=[0, 0, 0, 6],
    )
    assert any(
        "is displaced from slot" in text and "more urgent" in text for text in (explorer.story(d)[0] for d in range(9))
    )


def test_a_request_that_never_fits_is_told() -> None:
    engine = make_engine(num_blocks=1)
    engine.run([Request("A", range(8), SamplingParams(max_tokens=50))])
    assert "A is refused" in tell(engine.trace, -1, {"A": "A"})


@pytest.mark.parametrize("has_kernel", [True, False])
def test_the_static_copy_is_always_there_and_the_widget_hides_it(
    explorer: TimelineExplorer, monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("IPython.display.display", lambda shown_now, **options: shown.append(shown_now))
    monkeypatch.setattr("cbserve.explorers.showing.has_kernel", lambda: has_kernel)
    explorer._ipython_display_()
    static = shown[-1].data
    assert f'class="{explorer.static_class}"' in static and "<img alt=" in static and "<details>" in static
    assert len(shown) == 1 + has_kernel
    if has_kernel:
        assert list(shown[0]) == ["application/vnd.jupyter.widget-view+json"]
        assert any(
            f".{explorer.static_class}{{display:none}}" in getattr(w, "value", "")
            for w in explorer.box.children
            if isinstance(getattr(w, "value", ""), str)
        )


def test_show_is_checked() -> None:
    with pytest.raises(ValueError, match="neither"):
        timeline_explorer(show="neither")


def test_before_the_first_step_nothing_has_run(explorer: TimelineExplorer) -> None:
    explorer.step.value = 0
    assert "Nothing has run: 5 requests" in explorer.picture.value and "no step yet" in explorer.picture.value
    assert "Nothing has run yet" in explorer.sentence.value
