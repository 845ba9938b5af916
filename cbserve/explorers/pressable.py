"""A picture in several widths whose points can be pressed: a button lies over each, because a picture cannot call
back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cbserve.viz.frontier import Frontier

MAX_POINTS = 40
# Each figure is there in all of these widths; the room that the output has says which one is seen: {width: query}
WIDTHS = {880: "", 600: "@container cbserve (max-width:779px)", 360: "@container cbserve (max-width:539px)"}
_STYLE = """
.@me{container:cbserve/inline-size;width:100%}.@me svg{display:block}
.@me .cbserve-plot{position:relative;overflow:visible}.@me .cbserve-plot>.widget-html{width:100%;margin:0}
.@me .cbserve-plot>button{position:absolute;width:26px;height:26px;min-width:0;margin:-13px 0 0 -13px;padding:0;
border-radius:50%;background:transparent!important;box-shadow:none!important;line-height:26px}
.@me .cbserve-plot>button:focus-visible{outline:2px solid var(--jp-brand-color1,#0072B2)}
"""


class PressablePicture:
    """Widgets: `plot` has picture and buttons, `style` their rules.

    Args:
        box_class: of a box around both; its room decides on the width.
        pressed: called with the number of a point.
    """

    def __init__(self, box_class: str, pressed: Callable[[int], None]) -> None:
        import ipywidgets as w  # type: ignore[import-untyped]

        self._box_class = box_class
        self.picture, self.style = w.HTML(), w.HTML()
        self.buttons = [w.Button(layout=w.Layout(display="none")) for _ in range(MAX_POINTS)]
        for number, button in enumerate(self.buttons):
            button.add_class(f"cbserve-pt-{number}")
            button.on_click(lambda _, number=number: pressed(number))
        self.plot = w.Box([self.picture, *self.buttons])
        self.plot.add_class("cbserve-plot")

    def show(self, figures: Mapping[int, Frontier], points: Sequence[tuple[str, bool]]) -> None:
        """Draw `figures`, one of each width. `points`, in the order of their places: (what the button says, whether it
        lies in front); points may lie on each other. Those beyond `MAX_POINTS` get no button."""
        me, rules = f".{self._box_class}", [_STYLE.replace("@me", self._box_class)]
        for button in self.buttons[len(points) :]:
            button.layout.display = "none"
        for number, (button, (said, is_in_front)) in enumerate(zip(self.buttons, points, strict=False)):
            button.layout.display, button.tooltip = None, said
            if is_in_front:
                rules.append(f"{me} .cbserve-pt-{number}{{z-index:2}}")
        for width, figure in figures.items():  # each point at its share of the picture's width and height
            places = [place for line in figure.places for place in line][:MAX_POINTS]
            at = "".join(
                f"{me} .cbserve-pt-{number}{{left:{x / figure.size[0]:.3%};top:{y / figure.size[1]:.3%}}}"
                for number, (x, y) in enumerate(places)
            )
            rules.append(in_width(self._box_class, width, f"{me} .cbserve-plot{{width:min(100%,{width}px)}}{at}"))
        self.style.value = f"<style>{''.join(rules)}</style>"
        self.picture.value = in_widths({width: figure.live_svg() for width, figure in figures.items()})


def in_width(box_class: str, width: int, more: str = "") -> str:
    """Rules for a box with room for `width`: that one of `in_widths` is seen, and `more`."""
    seen = (f".{box_class} .cbserve-w{w}{{display:{'block' if w == width else 'none'}}}" for w in WIDTHS)
    rules = f"{''.join(seen)}{more}"
    return f"{WIDTHS[width]}{{{rules}}}" if WIDTHS[width] else rules


def in_widths(drawn: Mapping[int, str]) -> str:
    """The same in each width, of which the rules of `in_width` show one."""
    return "".join(f'<div class="cbserve-w{width}">{html}</div>' for width, html in drawn.items())
