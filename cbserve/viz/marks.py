"""The small signs of a timeline, and the key that names those that occur."""

from __future__ import annotations

from cbserve.viz import style
from cbserve.viz.figure import Canvas

KEY = {
    "prefill": "prefill: computes the prompt",
    "recompute": "computes again what the preemption lost",
    "decode": "decode: one token a step",
    "padding": "padding: computed and thrown away",
    "held": "holds its slot, computes nothing",
    "crowd": "many short requests",
    "out_of_blocks": "preempted: out of blocks",
    "displaced": "displaced by a more urgent request",
    "resumed": "resumed",
}


def badge(canvas: Canvas, kind: str, x: float, y: float, hover: str = "") -> None:
    """A small round sign: a cross for preempted, an arrow up for displaced, a turning arrow for resumed."""
    sign = {
        "displaced": f"M{x:.1f} {y + 3.5:.1f}v-7m-3 3l3 -3l3 3",
        "resumed": f"M{x + 3:.1f} {y - 1.5:.1f}a3.4 3.4 0 1 0 .3 2.8m.2 -5.3v2.6h-2.6",
    }.get(kind, f"M{x - 2.6:.1f} {y - 2.6:.1f}l5.2 5.2m0 -5.2l-5.2 5.2")
    canvas.add("circle", "badge", hover, cx=x, cy=y, r=7)
    canvas.add("path", "sign", d=sign, style="pointer-events:none")


def chevrons(canvas: Canvas, x: float, y: float, tall: float, twice: bool) -> None:
    """The sign of a prefill, centred: one chevron; two for one that computes again what was lost."""
    starts = (x - tall - 0.5, x + 0.5) if twice else (x - tall / 2,)
    d = "".join(f"M{start:.1f} {y - tall:.1f}l{tall:.1f} {tall:.1f}l-{tall:.1f} {tall:.1f}" for start in starts)
    canvas.add("path", "v", d=d, style="pointer-events:none")


def sample(canvas: Canvas, kind: str, x: float, y: float) -> None:
    """The mark of `kind` beside its name in the key, at the text's baseline `y`."""
    if kind in ("out_of_blocks", "displaced", "resumed"):
        badge(canvas, kind, x + 9, y - 4)
        return
    tall = 4 if kind == "held" else 12
    if kind in ("padding", "crowd"):
        canvas.rect(x, y - 10, 18, 12, "w" if kind == "padding" else "m", rx=2)
    else:  # in several colours: it has that of its request
        for part in range(3):
            look = {"stroke": style.colour(part), "stroke_width": tall}
            canvas.add("path", "", d=f"M{x + 6 * part:.1f} {y - 4:.1f}h6", **look)
    if kind in ("prefill", "recompute"):
        canvas.rect(x, y - 10, 18, 12, "pre", rx=2)
        chevrons(canvas, x + 9, y - 4, 3.5, kind == "recompute")


def key_entries(seen: set[str]) -> list[tuple[str, str]]:
    """(kind, text) of the marks that occur."""
    return [(kind, text) for kind, text in KEY.items() if kind in seen]
