"""Curves whose marks say what they are."""

import re

import pytest
import viz_checks

from cbserve.errors import FigureError
from cbserve.viz.curves import Curve, Mark, curves
from cbserve.viz.figure import Figure

UP = Curve("up", [Mark(k, k + 1.0, f"run {k}") for k in range(9)])
DOWN = Curve("down, with a band", [Mark(k, 9.0 - k) for k in range(9)], tops=[12.0 - k for k in range(9)])
GREY = [Mark(k, 0.5, f"grey {k}") for k in range(9)]


def draw(*drawn: Curve, **more: object) -> Figure:
    words = {"title": "Up and down", "x_name": "x", "y_name": "y", "caption": "Here.", "table": (["x"], [[1]])}
    return curves(drawn, **words | more)


@pytest.mark.parametrize("width", [880, 400])
@pytest.mark.parametrize("log_y", [True, False])
def test_it_is_legible_and_names_all_that_it_shows(width: int, log_y: bool) -> None:
    line = ("a long name of a line over all of them", [(0, 0.5), (8, 30.0)])
    figure = draw(
        UP, DOWN, cloud=("others", GREY), under=line, reference=(20.0, "the bound"), log_y=log_y, width=width
    )  # fmt: skip
    viz_checks.check(figure.svg)
    names = [text.text for text in viz_checks.texts(figure.svg)]
    assert {"up", "down, with a band", "others", line[0], "the bound"} <= set(names)
    told = re.findall(r"<title>((?:run|grey) \d)</title>", figure.svg)
    assert sorted(told) == [f"{name} {k}" for name in ("grey", "run") for k in range(9)]
    assert len(re.findall("fill-opacity=.0.4", figure.svg)) == 1  # the band
    assert figure.table == (["x"], [[1]]) and "up: y 1 at x 0, 9 at 8." in figure.desc


def test_points_alone_and_one_point_can_be_drawn() -> None:
    viz_checks.check(draw(cloud=("others", GREY)).svg)
    viz_checks.check(draw(Curve("one", UP.marks[:1])).svg)


@pytest.mark.parametrize(("drawn", "log_y"), [([], False), ([Curve("none", [Mark(1.0, 0.0)])], True)])
def test_what_cannot_be_drawn_is_refused(drawn: list[Curve], log_y: bool) -> None:
    with pytest.raises(FigureError):
        draw(*drawn, log_y=log_y)
