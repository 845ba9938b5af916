"""Where a notebook can be opened, from one setting: `[project.urls] Repository` in pyproject.toml.

Badges and the Colab install name the tag `v<version>`, so that a notebook runs with the package it was written for.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import quote

from cbserve.errors import CBServeError

_COLAB = """\
# On Colab this installs the course, about half a minute. Anywhere else it does nothing.
import importlib.metadata
import subprocess
import sys

if "google.colab" in sys.modules:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]  # Colab's own torch and numpy stay
    subprocess.run([*pip, "cbserve @ git+{url}@{tag}"], check=True)
    here = {{(found.metadata["Name"] or "").lower() for found in importlib.metadata.distributions()}}
    if missing := {{{names}}} - here:
        subprocess.run([*pip, *sorted(missing)], check=True)"""


def badges(root: Path, notebook: str) -> str:
    """Markdown of the three badges for `notebook`, a path relative to the repository such as chapters/x.ipynb."""
    url, tag, _ = _project(root)
    owner_name = "/".join(url.rsplit("/", 2)[1:])
    rows = [
        (
            "Open in Colab",
            "https://colab.research.google.com/assets/colab-badge.svg",
            f"https://colab.research.google.com/github/{owner_name}/blob/{tag}/{notebook}",
        ),
        (
            "Open in Binder",
            "https://mybinder.org/badge_logo.svg",
            f"https://mybinder.org/v2/gh/{owner_name}/{tag}?urlpath={quote(f'lab/tree/{notebook}', safe='')}",
        ),
        ("View on GitHub", "https://img.shields.io/badge/view-on%20GitHub-24292f", f"{url}/blob/{tag}/{notebook}"),
    ]
    return " ".join(f"[![{alt}]({image})]({link})" for alt, image, link in rows)


def colab_cell(root: Path) -> str:
    """Code that installs the package from its tag, then only what Colab's image lacks; guarded and silent elsewhere."""
    url, tag, dependencies = _project(root)
    return _COLAB.format(url=url, tag=tag, names=", ".join(f'"{name}"' for name in dependencies))


def _project(root: Path) -> tuple[str, str, list[str]]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    url = project.get("urls", {}).get("Repository", "").rstrip("/").removesuffix(".git")
    if not re.fullmatch(r"https://github\.com/[^/]+/[^/]+", url):
        raise CBServeError(
            f"badges and the Colab cell need the repository's address, and pyproject.toml has {url!r}; "
            'set [project.urls] Repository = "https://github.com/<owner>/<name>"'
        )
    names = [re.split(r"[^A-Za-z0-9._-]", dependency, maxsplit=1)[0].lower() for dependency in project["dependencies"]]
    return url, f"v{project['version']}", sorted(names)
