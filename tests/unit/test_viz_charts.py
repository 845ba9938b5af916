"""Charts and tables: what is drawn is what was given."""

import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import viz_checks

from cbserve.errors import FigureError
from cbserve.viz import Figure, bars, histogram, lines, table
from cbserve.viz.axes import along, free_place, spread
from cbserve.viz.style import COLOURS, INKS, number, percent, tick_names, ticks, wrap

SAMPLE = [random.Random(i).expovariate(1 / 100) for i in range(500)]
PAIRS = {"measured": [21.3, 35.2, 88.1], "predicted": [20.1, 36.0, 91.0]}
BATCHES = ["batch 1", "batch 8", "batch 32"]
CLOSE = {"a": ([1, 2, 4], [10, 20, 30]), "b": ([1, 2, 4], [12, 19, 30.2]), "c": ([1, 2], [9, math.nan])}

CASES: dict[str, Callable[[], Figure]] = {
    "bars": lambda: bars(["static", "continuous"], [60, 37], title="Fewer steps", unit="steps"),
    "pairs": lambda: bars(BATCHES, PAIRS, title="Measured and predicted agree", unit="ms"),
    "columns": lambda: bars(BATCHES, PAIRS, title="Measured and predicted agree", unit="ms", horizontal=False),
    "long labels": lambda: bars(
        ["a label that goes on and on and on and on and on", "b"], [0, 3], title="t" * 30, width=520
    ),
    "lines": lambda: lines(CLOSE, title="Lines", x_name="x", y_name="y", reference=(25, "the bound")),
    "log lines": lambda: lines(CLOSE, title="Lines", x_name="x", y_name="y", log_x=True, log_y=True),
    "one point": lambda: lines({"a": ([1004.6], [7])}, title="One", x_name="x", y_name="y"),
    "close values": lambda: lines(
        {"a": ([1004.1, 1004.9], [2000.5, 2000.9])}, title="Close", x_name="x", y_name="y", from_zero=False
    ),
    "long names": lambda: lines(
        {f"{name}, which is a long name": xy for name, xy in CLOSE.items()},
        title="Lines",
        x_name="x",
        y_name="y",
        width=360,
    ),
    "histogram": lambda: histogram(
        SAMPLE,
        title="Long-tailed",
        x_name="tokens",
        expected=lambda x: 1 - math.exp(-x / 100),
        marks={"mean": 100, "p99": 460},
    ),
    "shares": lambda: histogram(SAMPLE, title="Long-tailed", x_name="tokens", percent=True, expected=SAMPLE[::2]),
    "log histogram": lambda: histogram(SAMPLE, title="Long-tailed", x_name="tokens", log_x=True, expected=SAMPLE[::2]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_chart_is_named_legible_and_within_its_frame(name: str) -> None:
    viz_checks.check(CASES[name]().svg)


def test_bars_are_proportional_and_tabled() -> None:
    figure = bars(["a", "b"], [60, 30], title="t", unit="steps")
    (long, _), (short, _) = viz_checks.bars(figure.svg)
    assert long.right - long.x == pytest.approx(2 * (short.right - short.x), abs=1)
    assert figure.table == (["", "value (steps)"], [["a", 60], ["b", 30]])


def test_a_histogram_counts_every_value_once() -> None:
    for log_x in (False, True):
        header, rows = histogram([1, 1, 2, 3, 10], title="t", x_name="x", num_bins=9, log_x=log_x).table
        assert header[2] == "how many" and sum(row[2] for row in rows) == 5
        header, rows = histogram([1, 1, 2, 3, 10], title="t", x_name="x", num_bins=9, log_x=log_x, percent=True).table
        assert header[2] == "share (%)" and sum(row[2] for row in rows) == pytest.approx(100)
    cdf = histogram(SAMPLE, title="t", x_name="x", expected=lambda x: 1 - math.exp(-x / 100)).table[1]
    assert sum(row[3] for row in cdf) == pytest.approx(len(SAMPLE), rel=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bars(["a"], [1, 2], title="t"),
        lambda: bars(["a"], [-1], title="t"),
        lambda: bars([], [], title="t"),
        lambda: lines({"a": ([1], [1, 2])}, title="t", x_name="x", y_name="y"),
        lambda: lines({"a": ([0, 1], [1, 2])}, title="t", x_name="x", y_name="y", log_x=True),
        lambda: histogram([], title="t", x_name="x"),
        lambda: table(["a", "b"], [[1]]),
    ],
)
def test_what_cannot_be_drawn_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(FigureError):
        make()


def test_labels_are_moved_apart_in_order() -> None:
    places = spread([50, 51, 52, 10], 17, 0, 60)
    assert places[3] < places[0] < places[1] < places[2] <= 60
    assert min(b - a for a, b in zip(sorted(places), sorted(places)[1:], strict=False)) >= 17


def test_ticks_are_round() -> None:
    assert ticks(0, 60, 6) == [0, 10, 20, 30, 40, 50, 60]
    assert ticks(0, 1, 4) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert len(ticks(3, 5003, 8)) <= 12


def looks(svg: str) -> Counter[str]:
    """How often each colour is drawn as a line or a marker."""
    return Counter(
        colour
        for path in viz_checks.drawn(svg, "path")
        for colour in COLOURS
        if colour in (path.get("stroke"), path.get("fill"))
    )


@pytest.mark.parametrize("width", [880, 400])
@pytest.mark.parametrize("names", ["ab", ("a name for the first line", "a name for the second line")])
def test_each_name_has_the_look_of_its_line(names: Sequence[str], width: int) -> None:
    """Two lines that run together cannot be told apart by where their names stand."""
    pair = dict.fromkeys(names, ([1, 2], [3, 4]))
    figure = lines(pair, title="t", x_name="x", y_name="y", width=width)
    viz_checks.check(figure.svg)
    assert looks(figure.svg) == {COLOURS[0]: 2 * 2 + 1, COLOURS[1]: 2 * 2 + 1}  # line, two points; and beside the name


def test_ticks_that_would_read_the_same_get_decimals() -> None:
    assert tick_names([1004.2, 1004.4, 1004.6]) == ["1,004.2", "1,004.4", "1,004.6"]
    assert tick_names([100_000.05, 100_000.1]) == ["100,000.05", "100,000.10"]
    assert tick_names([0, 0.5, 1000]) == ["0", "0.5", "1,000"]


def test_numbers_are_written_as_people_read_them() -> None:
    assert [percent(x) for x in (610 / 1500, 1.0, math.nan)] == ["40.7 %", "100 %", "no value"]
    assert [number(x) for x in (1234.5, 0.012346, 12, 3.0)] == ["1,234", "0.01235", "12", "3"]
    assert wrap("12 requests use 58.9 % of it", 130, 12)[-1].split()[0] != "%"


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_on_bars_and_in_both_themes() -> None:
    for colour, ink in zip(COLOURS, INKS, strict=True):
        assert contrast(colour, ink) >= 4.5
    svg = CASES["bars"]().svg

    for theme in re.findall(r"--bg:(#\w+);--ink:(#\w+);--muted:(#\w+)", svg):
        background, *inks = ("#" + 2 * c[1:] if len(c) == 4 else c for c in theme)
        assert all(contrast(background, ink) >= 4.5 for ink in inks)
    assert len(re.findall(r"--bg:", svg)) == 2  # light and dark


def test_a_table_aligns_numbers_to_the_right() -> None:
    shown = table(["request", "tokens"], [["A", 5], ["B<", 1234]], "Two requests")
    assert str(shown).splitlines() == [
        "Two requests",
        "request  tokens",
        "-------  ------",
        "A             5",
        "B<        1,234",
    ]
    html = shown._repr_html_()
    assert (
        "B&lt;" in html
        and re.search('<td style="text-align:right[^>]*>1,234</td>', html)
        and html.startswith("<figure")
        and ">Two requests</figcaption>" in html
    )


def test_a_text_stands_where_it_covers_least() -> None:
    taken = along([(0, 100), (200, 100)])
    assert free_place("note", [(50, 104), (50, 60), (90, 60)], taken) == (50, 60)


def test_a_logarithmic_axis_names_the_measured_sizes() -> None:
    figure = lines({"a": ([1, 4, 16, 64], [4, 3, 2, 1])}, title="t", x_name="slots", y_name="y", log_x=True)
    assert {"1", "4", "16", "64"} <= set(re.findall(r">(\d+)</text>", figure.svg))


AXES = {"title": "t", "x_name": "x", "y_name": "y"}
ONE = {"a": ([1, 2], [3, 4])}
WRONG: dict[str, Callable[[], object]] = {
    "'b' is no number": lambda: bars(["a"], ["b"], title="t"),
    "None is no number": lambda: bars(["a"], [None], title="t"),
    "labels=5": lambda: bars(5, [1], title="t"),
    "series is 5": lambda: bars(["a"], 5, title="t"),
    "title=5": lambda: bars(["a"], [1], title=5),
    "caption=5": lambda: bars(["a"], [1], title="t", caption=5),
    "width=-5": lambda: bars(["a"], [1], title="t", width=-5),
    "width=nan": lambda: bars(["a"], [1], title="t", width=math.nan),
    "1e-320": lambda: bars(["a"], [1e-320], title="t"),
    "10**400": lambda: bars(["a"], [10**400], title="t"),
    "one finite": lambda: bars(["a"], [math.nan], title="t"),
    "height=0": lambda: lines(ONE, height=0, **AXES),
    "series=5": lambda: lines(5, **AXES),
    "give (x values, y values)": lambda: lines({"a": 5}, **AXES),
    "'x' is no number": lambda: lines({"a": ([1], ["x"])}, **AXES),
    "reference: nan": lambda: lines(ONE, reference=(math.nan, "r"), **AXES),
    "reference: 'r'": lambda: lines(ONE, reference=("r", 1), **AXES),
    "reference=5": lambda: lines(ONE, reference=5, **AXES),
    "-1e+308": lambda: histogram([-1e308, 1e308], title="t", x_name="x"),
    "num_bins=0": lambda: histogram([1, 2], title="t", x_name="x", num_bins=0),
    "num_bins=5000": lambda: histogram([1, 2], title="t", x_name="x", num_bins=5000),
    "mark 'm': nan": lambda: histogram([1, 2], title="t", x_name="x", marks={"m": math.nan}),
    "expected: None": lambda: histogram([1, 2], title="t", x_name="x", expected=lambda x: None),
    "values is 'abc'": lambda: histogram("abc", title="t", x_name="x"),
    "header=5": lambda: table(5, []),
    "row 5": lambda: table(["a"], [5]),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_argument_is_named(said: str) -> None:
    with pytest.raises(FigureError, match=re.escape(said)):
        WRONG[said]()


EXTREME: dict[str, Callable[[], Figure]] = {
    "tiny": lambda: bars(["a", "b"], [1e-14, 3e-149], title="t"),
    "huge": lambda: bars(["a", "b"], [1e149, 1], title="t", horizontal=False),
    "a gap": lambda: bars(["a", "b"], [math.nan, 1], title="t"),
    "a gap in columns": lambda: bars(["a", "b"], [1, math.inf], title="t", horizontal=False),
    "wide": lambda: histogram([-1e150, 1, 1e150], title="t", x_name="x"),
    "wide, log": lambda: histogram([1e-150, 1, 1e150], title="t", x_name="x", log_x=True),
    "close": lambda: histogram([1e17, 1e17 + 16], title="t", x_name="x"),
    "equal": lambda: histogram([1e17] * 3, title="t", x_name="x"),
    "log lines": lambda: lines({"a": ([1, 2], [1e-140, 1e140])}, log_y=True, **AXES),
}


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_numbers_are_drawn_within_the_frame(name: str) -> None:
    svg = EXTREME[name]().svg
    viz_checks.check(svg)
    assert not re.search(r'="-?(nan|inf)', svg)


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\x1b[1m"], ids=ascii)
def test_text_that_xml_cannot_hold_breaks_no_figure(text: str) -> None:
    figure = bars([text], {text: [1]}, title=text, unit=text, caption=text)
    assert viz_checks.root_of(figure.svg) is not None
    for html in (figure._repr_html_(), figure.live_html(), table([text], [[text]], text)._repr_html_()):
        assert "\ufffd" in html and text not in html and html.encode()


@pytest.mark.parametrize("path", [os.devnull, "", 5])
def test_a_figure_is_saved_to_files_only(path: object) -> None:
    with pytest.raises(FigureError, match="give the path"):
        bars(["a"], [1], title="t").save(path)
