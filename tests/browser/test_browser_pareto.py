"""The frontier explorer and the scenes by mouse and keyboard, on a notebook that is written here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage, Server

from cbserve.explorers import Setting
from cbserve.explorers.curves import FIRST_LOOK
from cbserve.explorers.machines import Machines
from cbserve.explorers.pitfall_scenes import cold_start, long_prefill
from cbserve.explorers.point import Point
from cbserve.explorers.setting import POLICIES
from cbserve.explorers.sweep import Sweep
from cbserve.workloads.synthetic import azure_twin

pytestmark = [pytest.mark.browser, pytest.mark.slow]
RATES, NUM = (1.0, 4.0, 9.0), 2 * FIRST_LOOK  # a first look, and whole runs behind it
FIRST, SECOND = Setting(), Setting("prefill first", 64, 2048)
MACHINES = Machines("a100-80", None)
CELLS = [
    "from cbserve import Setting, cold_start_scene, long_prefill_scene, pareto_explorer",
    f"pareto_explorer(num_requests={NUM}, rates={RATES}, settings=[Setting(), Setting('prefill first', 64, 2048)])",
    "long_prefill_scene()",
    "cold_start_scene()",
]


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    """The same runs, made in this process."""
    return Sweep("a100-80", "llama-3.1-8b", azure_twin("conv", NUM), POLICIES)


@pytest.fixture(scope="module", params=["light", "dark"])
def notebook(browser: Any, server: Server, clone: Path, request: pytest.FixtureRequest) -> Iterator[LabPage]:
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # without one, Jupyter asks
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), clone / "frontier.ipynb")
    with server.pages(browser) as opened:
        page = opened("frontier.ipynb", theme=request.param)
        page.run_all()
        page.cell(3).locator(".jupyter-widgets svg[role=img]").first.wait_for()
        yield page


def test_it_fits_the_page_and_shows_no_fault(notebook: LabPage, request: pytest.FixtureRequest) -> None:
    theme = request.node.callspec.params["notebook"]
    for width in (1300, 700):
        notebook.page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => panel.scrollTo(0, 0)")
        notebook.shoot(f"frontier-{theme}-{width}", width, 3600)
        assert notebook.overflow() == []
    notebook.page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => panel.scrollTo(0, 0)")
    notebook.shoot(f"frontier-{theme}-420", 420, 3600)
    # The timeline scrolls within its frame; all else is drawn for the room that there is, its smallest text in 12 px
    assert [fault for fault in notebook.overflow() if "scrolls" in fault] == []
    for number, count in ((1, 2), (2, 1), (3, 1)):
        shares = notebook.cell(number).evaluate(
            """cell => [...cell.querySelectorAll('.jupyter-widgets svg[role=img]')].map(
                 svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width).filter(share => share > 0)"""
        )
        assert len(shares) == count and min(shares) > 0.8, shares
    tracks = notebook.page.locator(".widget-slider .slider-container:visible").evaluate_all(
        "tracks => tracks.map(track => track.getBoundingClientRect().width)"
    )
    assert min(tracks[-8:]) > 150, tracks  # of the scenes: wide enough to be moved
    notebook.resize(1400)
    assert notebook.broken() == []
    for number in (1, 2, 3):
        assert notebook.cell(number).locator("img:visible").count() == 0  # the live picture hides the static one


def handle(cell: Any, name: str) -> Any:
    return cell.locator(".widget-slider", has_text=re.compile(rf"^\s*{re.escape(name)}")).locator(".noUi-handle")


def press(cell: Any, name: str, key: str) -> None:
    handle(cell, name).focus()
    cell.page.keyboard.press(key)


def said(cell: Any) -> Any:
    return cell.locator("[role=status]")


def picture_says(cell: Any, wanted: Callable[[str], bool]) -> str:
    """The title of the frontier, as soon as it is as wanted."""
    title = cell.locator(".jupyter-widgets svg[role=img] > title").first
    for _ in range(120):
        if wanted(title.text_content() or ""):
            break
        cell.page.wait_for_timeout(250)
    return str(title.text_content())


def whole(sweep: Sweep, setting: Setting, rate: float) -> Point:
    return sweep.point(setting, rate, NUM)


def test_the_batch_cap_changes_picture_table_and_words(notebook: LabPage, sweep: Sweep) -> None:
    cell = notebook.cell(1)
    cell.get_by_label("data as tables").check()
    before = Setting(max_num_seqs=64)
    for key, cap in (("ArrowLeft", 32), ("ArrowLeft", 16), ("ArrowRight", 32), ("ArrowRight", 64)):
        press(cell, "batch cap", key)
        setting = Setting(max_num_seqs=cap)
        said(cell).filter(has_text=f"{setting.name} at 4 requests/s").wait_for()
        # A first look comes at once; the picture says so until whole runs have replaced it
        title = picture_says(cell, lambda text, name=setting.name: name in text and "First look" not in text)
        assert "First look" not in title and "first look" not in said(cell).inner_text()
        points = [whole(sweep, setting, rate) for rate in RATES]
        assert f"{points[1].tokens_per_s:,.0f} tokens/s" in said(cell).inner_text()
        rows = cell.locator(".jupyter-widgets table").last.locator("tbody tr", has_text=f"{setting.name}")
        shown = rows.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.textContent))")
        assert [row[:2] for row in shown] == [[setting.name, f"{rate:g}"] for rate in RATES]
        for row, point in zip(shown, points, strict=True):
            assert float(row[2].replace(",", "")) == pytest.approx(point.tokens_per_s, rel=1e-3)
            assert float(row[5]) == pytest.approx(point.summary.ttft_p99_s, rel=1e-3)
        desc = cell.locator(".jupyter-widgets svg[role=img] > desc").first.text_content()
        assert desc.startswith(f"{setting.name}, ") and (before == setting or before.name not in desc)
        before = setting


def steps_say(cell: Any, wanted: str) -> str:
    title = cell.locator(".jupyter-widgets svg[role=img] > title").last
    for _ in range(40):
        if wanted in (title.text_content() or ""):
            break
        cell.page.wait_for_timeout(250)
    return str(title.text_content())


def test_a_point_is_chosen_by_mouse_and_its_timeline_follows(notebook: LabPage, sweep: Sweep) -> None:
    cell = notebook.cell(1)
    for setting, rate in ((SECOND, 9.0), (FIRST, 1.0), (FIRST, 4.0)):
        name = f"{setting.name} at {rate:g} requests/s"
        button = cell.get_by_title(name, exact=True)
        button.scroll_into_view_if_needed()
        mark = button.bounding_box()
        cell.page.mouse.click(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
        said(cell).filter(has_text=name).wait_for()
        assert f"{whole(sweep, setting, rate).tokens_per_s:,.0f} tokens/s" in said(cell).inner_text()
        strip = cell.locator(".jupyter-widgets svg[role=img]").first.get_by_text("Requests in flight with")
        assert setting.name in strip.first.text_content()
        for _ in sweep.find_moments(setting, rate, NUM):
            pass
        for moment in sweep.known_moments(setting, rate, NUM):
            cell.locator(".widget-dropdown", has_text="steps").locator("select").select_option(label=moment.name)
            assert steps_say(cell, f"{name}, {moment.name}:").startswith(f"{name}, {moment.name}: the longest of 120")


def test_the_buttons_lie_on_the_points(notebook: LabPage) -> None:
    cell = notebook.cell(1)
    for width in (1400, 700, 420):
        notebook.resize(width)
        apart = cell.evaluate(
            """cell => [...cell.querySelectorAll('[class*=cbserve-pt-]')].filter(b => b.offsetParent).map(button => {
                 const name = button.title.replace(' requests/s', '').split(' at ')
                 const mark = [...button.parentElement.querySelectorAll('svg > path > title')].find(
                   t => t.closest('svg').getBoundingClientRect().width > 0 &&
                        t.textContent.startsWith(name[0] + ', ' + name[1] + ' requests/s')).parentElement
                 const [a, b] = [button.getBoundingClientRect(), mark.getBoundingClientRect()]
                 return Math.hypot(a.x + a.width / 2 - b.x - b.width / 2, a.y + a.height / 2 - b.y - b.height / 2)
               })"""
        )
        assert len(apart) == 2 * len(RATES) and max(apart) < 4
    notebook.resize(1400)


def test_what_does_not_fit_greys_what_was_there(notebook: LabPage) -> None:
    cell = notebook.cell(1)
    machine = cell.locator(".widget-dropdown", has_text="GPU").locator("select")
    machine.select_option(label="T4")
    alert = cell.locator("[role=alert]")
    alert.filter(has_text="does not fit on one T4").wait_for()
    assert "monospace" in alert.locator("pre").evaluate("pre => getComputedStyle(pre).fontFamily")
    assert re.search(r"\n  memory {15}[\d.]+ GB", alert.locator("pre").inner_text())
    opacity = "e => parseFloat(getComputedStyle(e.closest('.cbserve-stale')).opacity)"
    assert cell.locator(".cbserve-plot").evaluate(opacity) < 0.5 and said(cell).evaluate(opacity) < 0.5
    machine.select_option(label="A100-80 SXM")
    alert.wait_for(state="detached")
    assert cell.locator(".cbserve-stale").count() == 0


def test_a_smaller_chunk_shortens_the_gaps(notebook: LabPage) -> None:
    cell = notebook.cell(2)
    cell.get_by_label("data as a table").check()
    for key, budget in (("ArrowRight", 1024), ("ArrowRight", 2048), ("ArrowLeft", 1024), ("ArrowLeft", 512)):
        press(cell, "chunk", key)
        *_, (draw, told) = long_prefill(MACHINES, "A100-80 SXM", "Llama-3.1-8B", 10_000, budget, 8, 0.1)
        said(cell).filter(has_text=told[0][1]).wait_for()
        assert cell.locator(".jupyter-widgets svg[role=img] > title").first.text_content() == draw(880).title
        assert cell.locator(".jupyter-widgets table tbody tr").count() == len(draw(880).table[1])


def test_a_longer_prompt_waits_longer(notebook: LabPage) -> None:
    cell = notebook.cell(3)
    for key, tokens in (("ArrowRight", 20_000), ("ArrowRight", 50_000), ("ArrowLeft", 20_000)):
        press(cell, "prompt tokens", key)
        *_, (draw, told) = cold_start(MACHINES, "A100-80 SXM", "Llama-3.1-8B", tokens, 0.0, 0, 0.2)
        said(cell).filter(has_text=told[0][1]).wait_for()
        assert cell.locator(".jupyter-widgets svg[role=img] > title").first.text_content() == draw(880).title
