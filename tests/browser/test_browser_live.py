"""Chapters run from top to bottom by the menu, and the explorers of chapters 1 and 3 by mouse and keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from lab_page import LabPage, Server

from cbserve import StaticBatching, serve, slot_utilisation, static_utilisation
from cbserve.explorers.page_map_explorer import PageMapExplorer

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]
CHAPTER_1, CHAPTER_2 = "chapters/01_static_waste.ipynb", "chapters/02_continuous_batching.ipynb"
CHAPTER_3 = "chapters/03_paged_attention.ipynb"
LENGTHS = [12, 40, 7, 95, 30]
HEADER = ["request", "slot", "admitted", "first token", "finished", "left", "tokens", "preemptions"]


@pytest.fixture(scope="module")
def chapter_1(browser: Any, server: Server, cached_model: None) -> Iterator[LabPage]:
    with server.pages(browser) as opened:
        notebook = opened(CHAPTER_1)
        notebook.run_all()
        yield notebook


@pytest.fixture(scope="module")
def chapter_2(browser: Any, server: Server, cached_model: None) -> Iterator[LabPage]:
    with server.pages(browser) as opened:
        notebook = opened(CHAPTER_2, theme="dark")
        notebook.run_all()
        yield notebook


@pytest.fixture(scope="module")
def chapter_3(browser: Any, server: Server, cached_model: None) -> Iterator[LabPage]:
    with server.pages(browser) as opened:
        notebook = opened(CHAPTER_3)
        notebook.run_all()
        yield notebook


@pytest.mark.parametrize("name", ["chapter_1", "chapter_2", "chapter_3"])
def test_it_runs_from_top_to_bottom(name: str, request: pytest.FixtureRequest) -> None:
    notebook: LabPage = request.getfixturevalue(name)
    notebook.shoot(f"live-{name}", 1400)
    notebook.resize(1400)
    assert notebook.broken() == []
    assert all(re.fullmatch(r"\[\d+\]:", prompt) for prompt in notebook.prompts()), notebook.prompts()
    assert notebook.missing_figures() + notebook.overflow() == []


# ---- the explorer ---------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What the explorer says, on each of its ways."""

    number: str  # printed large
    title: str  # the share that the picture's title names
    desc: str  # the start of its description, up to the share
    rows: list[list[str]]  # the table


def expected(lengths: list[int], slots: int, done: int | None = None) -> Seen:
    """From the lengths alone: a batch starts when the one before has ended, and lasts as long as its longest answer."""
    rows: list[list[int | None]] = []
    start = 0
    for first in range(0, len(lengths), slots):
        batch = lengths[first : first + slots]
        left = start + max(batch) - 1
        rows += [[i, start, start, start + t - 1, left, t, 0] for i, t in enumerate(batch)]
        start = left + 1
    if done is None or done >= start:
        used = static_utilisation(lengths, slots)
        assert used == pytest.approx(slot_utilisation(serve(lengths, StaticBatching(slots))))
    else:
        rows = [[*_until(row, done)] for row in rows if row[1] < done]
        used = sum(row[5] for row in rows) / (slots * done)
    steps = start if done is None else min(done, start)
    share = f"{100 * used:.1f}".removesuffix(".0") + " %"
    what = (
        f"static batching: {_plural(slots, 'slot')}, {_plural(steps, 'step')}, {share} of the slot-steps gave a token"
    )
    named = [[chr(ord("A") + i), *("-" if v is None else str(v) for v in row)] for i, row in enumerate(rows)]
    return Seen(share, share, what, named)


def _until(row: list[int], done: int) -> Iterator[int | None]:
    slot, admitted, first, finished, left, tokens, preemptions = row
    yield from (slot, admitted, first, finished if finished < done else None, left if left < done else None)
    yield from (min(tokens, done - admitted), preemptions)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")


class Explorer:
    """The explorer as its reader sees it, in the cell that made it."""

    def __init__(self, cell: Any) -> None:
        self.cell, self.page = cell, cell.page
        self.lengths = cell.locator(".widget-text input")
        self.error = cell.locator("[role=alert]")

    def slider(self, name: str) -> Any:
        """A slider by what stands beside it; its handle has the role and the value."""
        return self.cell.locator(".widget-slider", has_text=re.compile(rf"^\s*{name}"))

    def value(self, name: str) -> int:
        return int(self.slider(name).locator(".widget-readout").inner_text())

    def seen(self) -> Seen:
        svg = self.cell.locator(".jupyter-widgets svg[role=img]")
        title, desc = (svg.locator(f"> {tag}").text_content() for tag in ("title", "desc"))
        share = re.search(r"[\d.]+ %", title)
        table = self.cell.locator(".jupyter-widgets table")
        table.locator("th").first.wait_for()  # the kernel sends it when it is asked for
        assert table.locator("th").all_inner_texts() == HEADER
        rows = table.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        about = re.match(r".*? gave a token", desc)
        return Seen(svg.locator("text.n").text_content(), share and share[0], about and about[0], rows)

    def shows(self, wanted: Seen) -> bool:
        """Whether picture, words and table come to say `wanted`; prints what they say instead."""
        for _ in range(60):
            if (found := self.seen()) == wanted:
                return True
            self.page.wait_for_timeout(250)
        print(f"wanted {wanted}\nfound  {found}")
        return False

    def give(self, lengths: str) -> None:
        self.lengths.fill(lengths)
        self.lengths.press("Enter")

    def press(self, button: str) -> None:
        self.cell.get_by_role("button", name=button, exact=True).click()


@pytest.fixture
def explorer(chapter_1: LabPage) -> Explorer:
    """A new one: its cell is run again. Four slots, LENGTHS, its table open."""
    number = next(
        n for n, cell in enumerate(chapter_1.notebook["cells"])
        if cell["cell_type"] == "code" and "timeline_explorer(my_lengths" in "".join(cell["source"])
    )  # fmt: skip
    cell = chapter_1.cell(number)
    cell.locator(".cm-content").click()
    cell.locator(".jupyter-widgets svg").evaluate("svg => svg.classList.add('old')")
    cell.page.keyboard.press("Control+Enter")
    cell.locator(".jupyter-widgets svg:not(.old)").wait_for()
    chapter_1.settle()
    made = Explorer(cell)
    made.give(", ".join(map(str, LENGTHS)))
    cell.get_by_label("data as a table").check()
    assert made.shows(expected(LENGTHS, 4))
    return made


def test_the_slider_by_mouse(explorer: Explorer) -> None:
    slider = explorer.slider("slots")
    slider.scroll_into_view_if_needed()
    for slots in (2, 7, 1):
        handle, track = (slider.locator(part).bounding_box() for part in (".noUi-handle", ".noUi-base"))
        y = handle["y"] + handle["height"] / 2
        explorer.page.mouse.move(handle["x"] + handle["width"] / 2, y)
        explorer.page.mouse.down()
        explorer.page.mouse.move(track["x"] + track["width"] * (slots - 1) / (12 - 1), y, steps=5)
        explorer.page.mouse.up()
        assert explorer.value("slots") == slots
        assert explorer.shows(expected(LENGTHS, slots))


def test_the_slider_by_keyboard(explorer: Explorer) -> None:
    explorer.slider("slots").locator(".noUi-handle").focus()
    for key, slots in (("ArrowRight", 5), ("ArrowLeft", 4), ("ArrowLeft", 3)):
        explorer.page.keyboard.press(key)
        assert explorer.value("slots") == slots
        assert explorer.shows(expected(LENGTHS, slots))


def test_own_lengths(explorer: Explorer) -> None:
    for text, lengths in (("10 100 500", [10, 100, 500]), ("5; 5, 5 5,5", [5] * 5)):
        explorer.give(text)
        assert explorer.shows(expected(lengths, 4))
        assert explorer.value("requests") == len(lengths)


@pytest.mark.parametrize(("text", "said"), [("10, ten", "'ten' is no length"), ("10, 0", "'0'"), ("", "No length")])
def test_a_bad_length_is_named_and_the_picture_stays(explorer: Explorer, text: str, said: str) -> None:
    explorer.give(text)
    explorer.error.wait_for()
    assert said in explorer.error.inner_text()
    assert explorer.shows(expected(LENGTHS, 4))
    explorer.give("8, 2")
    assert explorer.shows(expected([8, 2], 4))
    assert explorer.error.count() == 0


def test_steps_one_by_one_and_to_the_next_decision(explorer: Explorer) -> None:
    end = 95 + 30  # the first batch of four, then the fifth request alone
    assert explorer.value("steps done") == end
    explorer.press("Back")
    assert explorer.shows(expected(LENGTHS, 4, end - 1)) and explorer.value("steps done") == end - 1
    explorer.press("Step")
    assert explorer.shows(expected(LENGTHS, 4))
    for decided in (1, 7, 12, 40, 95, 96, end):  # a batch starts, or an answer ends
        explorer.press("Next decision")
        assert explorer.shows(expected(LENGTHS, 4, decided)) and explorer.value("steps done") == decided


# ---- the page map ---------------------------------------------------------------------------------------------------


class PageMap:
    """The explorer of chapter 3 in the browser, beside one here that was given the same trace."""

    def __init__(self, cell: Any) -> None:
        self.cell, self.page = cell, cell.page
        trace = serve([9, 14, 6], prompt_tokens=[7, 5, 10], num_blocks=9, block_size=4)
        self.wanted = PageMapExplorer(trace, None, None, 880)

    def at(self, step: int, lit: str | None = None) -> bool:
        """Whether slider, words, picture and table come to be those of `step`, with the pages of `lit` lit."""
        mine = self.wanted
        mine.highlight = mine.requests[lit] if lit else None
        words = [f"{mine.when(step)}: {mine.story(step)}"] + [f"Pages of {lit}: {mine.chosen(step)}"] * (
            lit is not None
        )
        figure = mine._draw(step)
        for _ in range(60):
            found = self.cell.locator("[role=status] p").all_text_contents()
            title = self.cell.locator(".jupyter-widgets svg[role=img] > title").text_content()
            cells = self.cell.locator(".jupyter-widgets table td").all_text_contents()
            readout = int(self.cell.locator(".widget-readout").inner_text())
            same_table = not cells or cells == re.findall(r"<td[^>]*>(.*?)</td>", figure.table_html())
            if (found, title, readout) == (words, figure.title, step) and same_table:
                return True
            self.page.wait_for_timeout(250)
        print(f"wanted {step}, {words}, {figure.title}\nfound  {readout}, {found}, {title}, table {same_table}")
        return False

    def press(self, button: str) -> None:
        self.cell.get_by_role("button", name=button, exact=True).click()


def test_the_page_map_by_mouse_and_keyboard(chapter_3: LabPage) -> None:
    number = next(
        n for n, cell in enumerate(chapter_3.notebook["cells"])
        if cell["cell_type"] == "code" and "page_map_explorer(tight)" in "".join(cell["source"])
    )  # fmt: skip
    seen = PageMap(chapter_3.cell(number))
    start, last = seen.wanted.start, seen.wanted.last
    assert seen.at(start)
    seen.cell.get_by_label("data as a table").check()
    seen.press("Step")
    assert seen.at(start + 1)
    seen.press("Back")
    seen.press("Back")
    assert seen.at(start - 1)
    seen.press("C")
    assert seen.at(start - 1, "C")
    seen.cell.locator(".noUi-handle").focus()
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowUp", 2), ("End", last), ("ArrowLeft", last - 1)):
        seen.page.keyboard.press(key)
        assert seen.at(step, "C")
    seen.press("Next change")
    assert seen.at(last, "C")
