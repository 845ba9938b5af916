"""Links between notebooks and from the README lead to files that are there, or to what `make lab` copies into work/."""

import re
from pathlib import Path

import pytest

from cbserve.course.builder import targets

ROOT = Path(__file__).parents[2]
PAGES = [(target.source, target.path.parent) for target in targets(ROOT)] + [(ROOT / "README.md", ROOT)]


@pytest.mark.parametrize(("text", "folder"), PAGES, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(text: Path, folder: Path) -> None:
    made = {target.path for target in targets(ROOT)}
    copied = {ROOT / "work" / path.name for path in made if path.parent.name == "labs"}
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)\s]+)\)", text.read_text(encoding="utf-8")):
        place = (folder / link).resolve()
        assert place in made | copied or place.exists(), f"{link} leads to {place}"
        assert place.parent != ROOT / "work" or place in copied, f"make lab copies no {place.name}"
