"""The course's own tools: checks, hints, claim cards, the ledger, the doctor. All but the doctor load at first use."""

from importlib import import_module

# At once, since the module `doctor` would else stand here under the name of its function. Standard library only.
from cbserve.course.doctor import doctor

#: Public name -> the module that defines it.
PUBLIC = {
    "check": "cbserve.course.checking",
    "hint": "cbserve.course.checking",
    "solved": "cbserve.course.checking",
    "progress": "cbserve.course.checking",
    "card": "cbserve.course.checking",
    "claim": "cbserve.course.claims",
    "ledger": "cbserve.course.claims",
}

__all__ = ["doctor", *PUBLIC]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value
