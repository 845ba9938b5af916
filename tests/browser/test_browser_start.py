"""`make lab`, as far as a browser sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lab_page import jupyter_environment, start

pytestmark = pytest.mark.browser


@pytest.mark.model
def test_make_lab_opens_the_first_notebook_trusted_beside_the_learners_labs(
    browser: Any, clone: Path, cached_model: None, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "cbserve", "lab", "--no-browser"]
    with (
        start(command, jupyter_environment(tmp_path, clone), clone, tmp_path / "server.log") as server,
        server.pages(browser) as opened,
    ):
        notebook = opened("", place="")
        assert notebook.page.url.split("?")[0].endswith("/lab/tree/chapters/00_start_here.ipynb")
        assert notebook.page.locator(".jp-Notebook h1").first.inner_text().startswith("Start here")
        assert notebook.is_trusted()
    labs = {path.name for path in (clone / "labs").glob("*.ipynb")}
    assert labs and {path.name for path in (clone / "work").glob("*.ipynb")} == labs
