"""The frontier explorer and the scenes by mouse and keyboard, on a notebook that is written here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage, Server

from cbserve.explorers import Setting
from cbserve.explorers.pitfall_scenes import cold_start, long_prefill
from cbserve.explorers.setting import POLICIES
from cbserve.explorers.sweep import Sweep
from cbserve.viz.style import said_s
from cbserve.workloads.synthetic import azure_twin

pytestmark = [pytest.mark.browser, pytest.mark.slow]
RATES = (1.0, 4.0, 9.0)
FIRST, SECOND = Setting(), Setting("prefill first", 64, 2048)
CELLS = [
    "from cbserve import Setting, cold_start_scene, long_prefill_scene, pareto_explorer",
    f"pareto_explorer(num_requests=50, rates={RATES}, settings=[Setting(), Setting('prefill first', 64, 2048)])",
    "long_prefill_scene()",
    "cold_start_scene()",
]


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    """The same runs, made in this process."""
    return Sweep("a100-80", "llama-3.1-8b", azure_twin("conv", 50, seed=1), POLICIES)


@pytest.fixture(scope="module", params=["light", "dark"])
def notebook(browser: Any, server: Server, clone: Path, request: pytest.FixtureRequest) -> Iterator[LabPage]:
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # without one, Jupyter asks
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), clone / "frontier.ipynb")
    with server.pages(browser) as opened:
        page = opened("frontier.ipynb", theme=request.param)
        page.run_all()
        page.cell(3).locator(".jupyter-widgets svg[role=img]").wait_for()
        yield page


def test_it_fits_the_page_and_shows_no_fault(notebook: LabPage, request: pytest.FixtureRequest) -> None:
    theme = request.node.callspec.params["notebook"]
    for width in (1300, 700):
        notebook.page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => panel.scrollTo(0, 0)")
        notebook.shoot(f"frontier-{theme}-{width}", width, 3600)
        assert notebook.overflow() == []
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


def test_the_batch_cap_changes_picture_table_and_words(notebook: LabPage, sweep: Sweep) -> None:
    cell = notebook.cell(1)
    cell.get_by_label("data as tables").check()
    before = Setting(max_num_seqs=64)
    for key, cap in (("ArrowLeft", 32), ("ArrowLeft", 16), ("ArrowRight", 32), ("ArrowRight", 64)):
        press(cell, "batch cap", key)
        setting = Setting(max_num_seqs=cap)
        points = [sweep.point(setting, rate) for rate in RATES]
        said(cell).filter(has_text=f"{setting.name} at 4 requests/s").wait_for()
        assert f"{points[1].summary.tokens_per_s:,.0f} tokens/s" in said(cell).inner_text()
        # The chosen rate comes at once; the table is complete when the other rates have been simulated
        rows = cell.locator(".jupyter-widgets table").last.locator("tbody tr", has_text=f"{setting.name}")
        rows.nth(len(RATES) - 1).wait_for()
        shown = rows.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.textContent))")
        assert [row[:2] for row in shown] == [[setting.name, f"{rate:g}"] for rate in RATES]
        for row, point in zip(shown, points, strict=True):
            assert float(row[2].replace(",", "")) == pytest.approx(point.summary.tokens_per_s, rel=1e-3)
            assert float(row[4]) == pytest.approx(point.summary.ttft_p99_s, rel=1e-3)
        desc = cell.locator(".jupyter-widgets svg[role=img] > desc").first.text_content()
        assert desc.startswith(f"{setting.name}, ") and (before == setting or before.name not in desc)
        before = setting


def test_a_point_is_chosen_by_mouse_and_its_timeline_follows(notebook: LabPage, sweep: Sweep) -> None:
    cell = notebook.cell(1)
    for setting, rate in ((SECOND, 9.0), (FIRST, 1.0), (FIRST, 4.0)):
        button = cell.get_by_title(f"{setting.name} at {rate:g} requests/s", exact=True)
        mark = button.bounding_box()
        cell.page.mouse.click(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
        said(cell).filter(has_text=f"{setting.name} at {rate:g} requests/s").wait_for()
        assert f"{sweep.point(setting, rate).summary.tokens_per_s:,.0f} tokens/s" in said(cell).inner_text()
        title = cell.locator(".jupyter-widgets svg[role=img] > title").last
        steps = sweep.trace(setting, rate, 120).steps
        longest = said_s(max(step.end_s - step.start_s for step in steps))
        for _ in range(40):
            if f"{setting.name} at {rate:g} requests/s" in (title.text_content() or ""):
                break
            cell.page.wait_for_timeout(250)
        assert title.text_content() == (
            f"{setting.name} at {rate:g} requests/s: the longest of the first 120 steps takes {longest}"
        )


def test_the_buttons_lie_on_the_points(notebook: LabPage) -> None:
    cell = notebook.cell(1)
    for width in (1400, 700):
        notebook.resize(width)
        apart = cell.evaluate(
            """cell => [...cell.querySelectorAll('[class*=cbserve-pt-]')].filter(b => b.offsetParent).map(button => {
                 const name = button.title.replace(' requests/s', '').split(' at ')
                 const mark = [...button.parentElement.querySelectorAll('svg > path > title')].find(
                   t => t.textContent.startsWith(name[0] + ', ' + name[1] + ' requests/s')).parentElement
                 const [a, b] = [button.getBoundingClientRect(), mark.getBoundingClientRect()]
                 return Math.hypot(a.x + a.width / 2 - b.x - b.width / 2, a.y + a.height / 2 - b.y - b.height / 2)
               })"""
        )
        assert len(apart) == 2 * len(RATES) and max(apart) < 4
    notebook.resize(1400)


def test_a_smaller_chunk_shortens_the_gaps(notebook: LabPage) -> None:
    cell = notebook.cell(2)
    cell.get_by_label("data as a table").check()
    for key, budget in (("ArrowRight", 1024), ("ArrowRight", 2048), ("ArrowLeft", 1024), ("ArrowLeft", 512)):
        press(cell, "chunk", key)
        *_, (figure, told) = long_prefill("A100-80 SXM", "Llama-3.1-8B", 10_000, budget, 8, 0.1)
        said(cell).filter(has_text=told[0][1]).wait_for()
        assert cell.locator(".jupyter-widgets svg[role=img] > title").text_content() == figure.title
        assert cell.locator(".jupyter-widgets table tbody tr").count() == len(figure.table[1])


def test_a_longer_prompt_waits_longer(notebook: LabPage) -> None:
    cell = notebook.cell(3)
    for key, tokens in (("ArrowRight", 20_000), ("ArrowRight", 50_000), ("ArrowLeft", 20_000)):
        press(cell, "prompt tokens", key)
        *_, (figure, told) = cold_start("A100-80 SXM", "Llama-3.1-8B", tokens, 0.0, 0, 0.2)
        said(cell).filter(has_text=told[0][1]).wait_for()
        assert cell.locator(".jupyter-widgets svg[role=img] > title").text_content() == figure.title
