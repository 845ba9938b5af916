"""Which names of a table somebody may have meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean a100-40 or a100-80?)" for "a100": names of which one begins with the other, else those that are
    spelled alike. Hyphens, dots and blanks do not count. Empty where nothing comes near."""
    plain = {re.sub(r"[-_. ]", "", short.lower()): short for short in known}
    asked = re.sub(r"[-_. ]", "", name.lower())
    near = [short for key, short in plain.items() if asked and (key.startswith(asked) or asked.startswith(key))]
    near = near or [plain[key] for key in get_close_matches(asked, plain, n=3, cutoff=0.7)]
    *first, last = near or [""]
    return f" (did you mean {', '.join(first)}{' or ' * bool(first)}{last}?)" if near else ""
