"""The page map shows what the state says: pages, tables, arrows, numbers, words; and its explorer answers."""

import math
import re

import pytest
import viz_checks
from engine_harness import make_engine

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.pages import page_state, page_states
from cbserve.core.request import Request, SamplingParams
from cbserve.core.trace import Trace
from cbserve.explorers import PageMapExplorer, page_map_explorer
from cbserve.explorers.page_story import tell_pages
from cbserve.serving import serve
from cbserve.viz import Figure, page_map
from cbserve.viz.page_words import empty_share, sequence_names
from cbserve.viz.style import percent


def run(requests: list[Request], **options: object) -> Trace:
    engine = make_engine({}, **options)
    engine.run(requests)
    return engine.trace


def prompt(family: int, common: int, own: int = 0) -> list[int]:
    return [1000 * family + i for i in range(common)] + [50_000 + 100 * own + i for i in range(own)]


def shared() -> Trace:
    """D leaves pages in the cache; B and C find A's prompt; E has two samples, one of which copies on write."""
    long = SamplingParams(max_tokens=30)
    return run(
        [
            Request("D", prompt(5, 40), SamplingParams(max_tokens=3), 0.0),
            Request("A", prompt(1, 48, 25), long, 0.0),
            Request("B", prompt(1, 48, 30), long, 4.0),
            Request("C", prompt(1, 32, 20), long, 5.0),
            Request("E", prompt(2, 20), SamplingParams(max_tokens=9, n=2), 6.0),
        ],
        num_blocks=32,
        prefix_caching=True,
    )


def swapped() -> Trace:
    requests = [Request(name, prompt(i, 14 + 3 * i), SamplingParams(max_tokens=20)) for i, name in enumerate("ABCDE")]
    return run(requests, num_blocks=20, block_size=4, num_host_blocks=30, preemption="swap")


def static() -> Trace:
    return serve([4, 9, 22, 6, 12, 3, 16], StaticBatching(4), prompt_tokens=20, block_size=8, num_blocks=40)


def many(num_blocks: int, requests: int, length: int = 90) -> Trace:
    lengths = [20 + (37 * i) % length for i in range(requests)]
    batching = ContinuousBatching(max_num_seqs=requests)
    return serve(lengths, batching, num_blocks=num_blocks, prompt_tokens=[10 + (53 * i) % 190 for i in range(requests)])


CASES = {
    "shared": lambda: page_map(shared(), 9),
    "lit": lambda: page_map(shared(), 9, highlight="B"),
    "copied on write": lambda: page_map(shared(), 7, highlight="E"),
    "narrow": lambda: page_map(shared(), 9, highlight="B", width=480),
    "wide": lambda: page_map(shared(), 9, highlight="B", width=1200),
    "swapped": lambda: page_map(swapped(), 1, highlight="D"),
    "swapped, narrow": lambda: page_map(swapped(), 1, width=480),
    "static": lambda: page_map(static(), highlight="A"),
    "before anything": lambda: page_map(Trace({"num_blocks": 8, "block_size": 4})),
    "the end": lambda: page_map(shared(), len(shared().steps)),
    "8 pages": lambda: page_map(serve([9, 14, 5, 8], num_blocks=8, block_size=4), highlight="B"),
    "one page": lambda: page_map(serve([3], num_blocks=1)),
    "64 pages": lambda: page_map(many(64, 6), highlight="C"),
    "128 pages": lambda: page_map(many(128, 12), highlight="C"),
    "512 pages, 32 requests": lambda: page_map(many(512, 32), highlight="C"),
    "512 pages, narrow": lambda: page_map(many(512, 32), highlight="C", width=480),
    "2,000 pages": lambda: page_map(many(2000, 50)),
    "one long table": lambda: page_map(serve([500, 10], block_size=4), highlight="A"),
    "long names": lambda: page_map(shared(), 9, names={"A": "chat with a customer"}, highlight="A"),
}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {name: make() for name, make in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_named_legible_and_within_its_frame(name: str, figures: dict[str, Figure]) -> None:
    viz_checks.check(figures[name].svg)
    assert len(figures[name].svg) < 450_000


def test_ids_of_two_figures_never_meet(figures: dict[str, Figure]) -> None:
    ids = [set(re.findall(r'\sid="([^"]+)"', figure.svg)) for figure in figures.values()]
    assert sum(map(len, ids)) == len(set().union(*ids))


def hovers(figure: Figure) -> dict[int, str]:
    """Page -> its hover text, from the pool."""
    found = [re.fullmatch(r"page (\d+): (.*)", hover) for _, hover in viz_checks.bars(figure.svg)]
    return {int(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("make", [shared, swapped, static])
def test_every_page_of_every_step_is_drawn_once_with_its_holders(make: object) -> None:
    trace = make()
    for state in list(page_states(trace))[::5]:
        figure, names = page_map(trace, state.step), sequence_names(state)
        told = hovers(figure)
        assert sorted(told) == list(range(state.num_blocks))
        for page in state.pages():
            text = told[page.block]
            if page.state == "used":
                assert f"{page.num_tokens} of {state.block_size} places filled" in text
                assert all(f"{names[seq_id]} (entry {index})" in text for seq_id, index in page.holders)
            elif page.state == "cached":
                assert "still finds its content" in text
            else:
                assert text.startswith("free") and "finds" not in text


@pytest.mark.parametrize("make", [shared, swapped, static])
def test_the_table_is_the_state(make: object) -> None:
    trace = make()
    state = page_state(trace)
    header, rows = page_map(trace).table
    names = sequence_names(state)
    told = {row[0]: dict(zip(header, row, strict=True)) for row in rows if row[0] != "-"}
    assert list(told) == [names[seq_id] for seq_id in [*state.tables, *state.swapped]]
    for seq_id, table in state.tables.items():
        row = told[names[seq_id]]
        assert row["block table"] == ", ".join(map(str, table)) and row["pages"] == len(table)
        assert row["tokens"] + row["empty places"] == len(table) * state.block_size
    free = sum(row[3] for row in rows if row[0] == "-")
    assert free == sum(page.state != "used" for page in state.pages())


def test_title_and_large_numbers_are_computed() -> None:
    trace = shared()
    for step in (1, 5, 9, 20):
        state = page_state(trace, step)
        pages, figure = state.pages(), page_map(trace, step)
        used = sum(page.state == "used" for page in pages)
        empty = percent(empty_share(pages, state.block_size))
        assert f"{empty} of the used room is empty" in figure.title
        large = {box.text for box in viz_checks.texts(figure.svg)}
        assert {f"{used} of 32", empty} <= large
    assert page_map(trace, 9).title.startswith("A, B and C share 3 pages, E.0 and E.1 share 1 page")
    assert page_map(trace, len(trace.steps)).title == "All 32 pages are free; the content of 15 can still be found"
    assert "kept by rows that are done" in page_map(static()).title


def test_empty_room_is_what_arithmetic_says() -> None:
    """Three requests of 8 + 3 tokens in blocks of 16: 11 of 16 places each when the last step computes its token."""
    state = page_state(serve([4, 4, 4]), 3)
    assert empty_share(state.pages(), 16) == pytest.approx(1 - 11 / 16)


def test_lit_pages_are_outlined_and_pointed_at() -> None:
    trace = shared()
    plain, lit = page_map(trace, 9).svg, page_map(trace, 9, highlight="B").svg
    table = page_state(trace, 9).tables[2]
    assert lit.count("stroke-width:3;stroke-linejoin") == len(table) + 1  # its pages and its table
    assert "stroke-width:3;stroke-linejoin" not in plain
    heads = re.findall(r'class="badge" d="((?:M[\d.]+ [\d.]+h8l-4 6.5z)+)"', lit)
    assert [head.count("z") for head in heads] == [len(table)]
    assert ">pages of B<" in lit and ">pages of" not in plain


def corners(figure: Figure) -> set[int]:
    """The pages with a full corner: it ends at the page's right edge."""
    ends = re.findall(r'class="badge" d="M([\d.]+) ([\d.]+)h([\d.]+)v\3z"', figure.svg)
    return {
        int(hover.split()[1].rstrip(":"))
        for box, hover in viz_checks.bars(figure.svg)
        if hover.startswith("page ")
        and any(abs(float(x) + float(w) - box.right) < 2 and abs(float(y) - box.y) < 2 for x, y, w in ends)
    }


def test_a_full_corner_marks_the_pages_that_nobody_held_before() -> None:
    """A fork shares what is held, and so does a prefix found in a running request; a copy or a cached page is taken."""
    forked = serve([7], num_samples=3, prompt_tokens=22, block_size=4, num_blocks=12)
    assert [corners(page_map(forked, step)) for step in (0, 1, 2)] == [set(range(6)), {6, 7}, set()]
    system = list(range(12))
    together = {"prompts": [system + [n] * 5 for n in (20, 30, 40)], "block_size": 4, "num_blocks": 16}
    at_once = serve([8, 8, 8], arrivals_s=[0, 1, 2], enable_prefix_caching=True, **together)
    assert corners(page_map(at_once, 1)) == {5, 6}  # A holds the prefix
    later = serve([8, 8, 8], arrivals_s=[0, 20, 40], enable_prefix_caching=True, **together)
    assert corners(page_map(later, 8)) == {0, 1, 2, 6, 7}  # A has left it in the cache


def test_a_request_is_lit_by_id_or_letter_with_all_its_samples() -> None:
    requests = [Request("first-request", prompt(1, 20), SamplingParams(max_tokens=9, n=2))]
    trace = run(requests)
    one, other = page_map(trace, 3, highlight="first-request"), page_map(trace, 3, highlight="A")
    assert one.svg == other.svg and ">pages of A.0 and A.1<" in one.svg
    assert ">pages of A.1<" in page_map(trace, 3, highlight="A.1").svg


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"step": 900}, "step=900"),
        ({"step": -1}, "step=-1"),
        ({"highlight": "nobody"}, "nobody"),
        ({"width": 100}, "width=100"),
        ({"width": math.nan}, "width=nan"),
        ({"step": "a"}, "step='a'"),
        ({"names": 5}, "names=5"),
        ({"title": 5}, "title=5"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        page_map(shared(), **options)


def test_a_pool_that_cannot_be_drawn_and_a_step_of_a_state_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=5,000"):
        page_map(serve([3], num_blocks=5000))
    with pytest.raises(ValueError, match="step=3"):
        page_map(page_state(shared(), 3), 3)


# ---- the explorer -----------------------------------------------------------------------------------------------


@pytest.fixture
def explorer() -> PageMapExplorer:
    pytest.importorskip("ipywidgets")
    made = page_map_explorer(shared(), 0)
    made.build()
    return made


def test_stepping_tells_what_changed_and_why(explorer: PageMapExplorer) -> None:
    assert explorer.back.disabled and "40 tokens need 3 pages of 16" in explorer.sentence.value
    explorer.forward.click()
    assert explorer.step.value == 1 and "No page changes hands" in explorer.sentence.value
    explorer.change.click()
    assert explorer.step.value == 3 and "D gives back pages 0, 1 and 2" in explorer.sentence.value
    explorer.change.click()
    assert "B finds its first 48 tokens in pages 3, 4 and 5" in explorer.sentence.value
    explorer.step.value = 7
    assert "a copy of page 12" in explorer.sentence.value and "copied on write" in explorer.sentence.value
    explorer.back.click()
    assert explorer.step.value == 6
    explorer._go(10**6)
    assert explorer.forward.disabled and "After the last step" in explorer.sentence.value
    explorer.change.click()
    assert explorer.step.value == 0


def test_a_choice_lights_pages_and_tells_where_they_are(explorer: PageMapExplorer) -> None:
    explorer.step.value = 9
    assert "stroke-width:3;stroke-linejoin" not in explorer.picture.value
    explorer.choice.value = "B"
    assert "stroke-width:3;stroke-linejoin" in explorer.picture.value
    assert "83 tokens in pages 3, 4, 5, 2, 8 and 13" in explorer.sentence.value
    explorer.step.value = 0
    assert "none in this step" in explorer.sentence.value
    explorer.choice.value = ""
    assert "none in this step" not in explorer.sentence.value


def test_the_table_follows(explorer: PageMapExplorer) -> None:
    assert not explorer.table.value
    explorer.data.value = True
    assert "3, 4, 5, 6, 7" in explorer.table.value
    explorer.step.value = 30
    assert "3, 4, 5, 6, 7" not in explorer.table.value


def test_many_requests_are_chosen_from_a_list() -> None:
    w = pytest.importorskip("ipywidgets")
    few, lots = page_map_explorer(serve([3] * 5)), page_map_explorer(serve([3] * 20), highlight="T")
    few.build()
    lots.build()
    assert isinstance(few.choice, w.ToggleButtons) and isinstance(lots.choice, w.Dropdown)
    assert lots.choice.value == "T" and "Pages of T" in lots.sentence.value


@pytest.mark.parametrize("make", [shared, swapped, static])
def test_every_change_is_told(make: object) -> None:
    words = {
        "allocated": "takes page", "hit": "finds its first", "shared": "begins with page", "copied": "copied on write",
        "swapped_out": "goes to the host", "swapped_in": "comes back from the host", "evicted": "is lost",
    }  # fmt: skip
    for state in page_states(make()):
        said = tell_pages(state, sequence_names(state))
        for kind in {change.kind for change in state.changes}:
            assert kind == "freed" or words[kind] in said
        assert ("No page changes hands" in said or "Nobody holds" in said) == (not state.changes)


def test_a_lost_page_and_a_crowd_are_told() -> None:
    requests = [Request(name, prompt(i, 30), SamplingParams(max_tokens=2)) for i, name in enumerate("ABC")]
    trace = run(requests, num_blocks=4, block_size=8, prefix_caching=True)
    told = " ".join(tell_pages(state, sequence_names(state)) for state in page_states(trace))
    assert "last held by A, is lost: no other page was free" in told
    trace = serve([3] * 9)
    told = tell_pages(page_state(trace, 0), sequence_names(page_state(trace, 0)))
    assert "C takes page 2" in told and "In all 9 pages were taken." in told and "H takes" not in told


@pytest.mark.parametrize("has_kernel", [True, False])
def test_the_static_copy_is_always_there(
    explorer: PageMapExplorer, monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("IPython.display.display", lambda shown_now, **options: shown.append(shown_now))
    monkeypatch.setattr("cbserve.explorers.showing.has_kernel", lambda: has_kernel)
    explorer._ipython_display_()
    static = shown[-1].data
    assert f'class="{explorer.static_class}"' in static and "<img alt=" in static and "<details>" in static
    assert len(shown) == 1 + has_kernel
    hide = f".{explorer.static_class}{{display:none}}"
    assert any(hide in str(getattr(child, "value", "")) for child in explorer.box.children)


def test_an_unknown_request_is_named() -> None:
    with pytest.raises(ValueError, match="nobody"):
        page_map_explorer(shared(), highlight="nobody")
