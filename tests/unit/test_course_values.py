"""Which values an exercise accepts, and when two of them agree."""

import math

import numpy as np
import pytest

from cbserve.course.exercise import is_written
from cbserve.course.values import NotPlainError, close, plain, rounded, shape_fault, shown


class Yes(float):
    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        ({"a": np.array([[1]])}, {"a": [[1]]}),
        (range(3), [0, 1, 2]),
        ((1, np.float64(2)), (1, 2.0)),
        (None, None),
    ],
)
def test_numpy_and_ranges_become_plain_values(value, result) -> None:
    got = plain(value)
    assert got == result and type(got) is type(result)


@pytest.mark.parametrize(
    "value", [Yes(1), object(), {1}, iter([1]), [Yes(1)], {"a": Yes(1)}, b"x", 1j, np.array([Yes(1)], dtype=object)]
)
def test_other_objects_are_refused(value) -> None:
    with pytest.raises(NotPlainError):
        plain(value)


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotPlainError, match="nested"):
        plain(loop)


@pytest.mark.parametrize(
    ("value", "expected", "agree"),
    [
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (610 / 1500, 0.407, False),
        (0.0, 1e-12, True),
        (True, 1, False),
        (1, True, False),
        ("1", 1, False),
        (math.nan, 1.0, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        ((1, 2), [1, 2], True),
        ([2, 1], [1, 2], False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        (None, None, True),
        (None, 0, False),
        (0, None, False),
        (..., 0, False),
        ("a", "a", True),
        ("a", "b", False),
    ],
)
def test_when_two_values_agree(value, expected, agree) -> None:
    assert close(value, expected) is agree
    assert not (agree and shape_fault(value, expected))


@pytest.mark.parametrize(
    ("value", "expected", "is_rounded"),
    [
        (0.41, 610 / 1500, True),
        (0.4067, 610 / 1500, True),
        (0.4066, 610 / 1500, False),
        (0.4, 610 / 1500, False),
        (1.0, 0.9997, False),
        (20.48, 20.48, False),
        ([0.41, 1.0], [610 / 1500, 0.9997], True),
        ([0.41, 0.9997], [610 / 1500, 0.99967], False),  # to two decimals, and to four
        ([0.41, 0.5], [610 / 1500, 0.9], False),
        ({"a": 0.67, "b": True}, {"a": 2 / 3, "b": True}, True),
        ({"a": 0.67, "b": True}, {"a": 2 / 3, "b": False}, False),
        (0.67, 2, False),
        ("0.67", 2 / 3, False),
        ([0.67], 2 / 3, False),
        (math.nan, 2 / 3, False),
    ],
)
def test_what_is_wrong_only_in_being_rounded(value, expected, is_rounded) -> None:
    assert rounded(value, expected) is is_rounded


def test_values_are_shown_on_one_line_without_addresses() -> None:
    assert shown(2 / 3) == "0.666667" and shown(1e-9) == "1e-09"
    assert len(shown(list(range(1000)))) <= 100
    assert "0x" not in shown([object()])


class Base:
    def admit(self, step):
        return [1]


class Same(Base):
    """Nothing of its own."""


class Static(Base):
    @staticmethod
    def key(seq):
        return seq.arrival_s


class StaticStub(Base):
    @staticmethod
    def key(seq): ...

    @property
    def name(self):
        return None


class Own(Base):
    def admit(self, step):
        yield from step


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        (Same, False),
        (Own, True),
        (Static, True),
        (StaticStub, False),
        (0, True),
        ("", True),
        ([None, 1], True),
        (lambda x: x, True),
        (lambda x: 0, True),
        (lambda x: None, False),
    ],
)
def test_a_stub_is_known_by_its_compiled_form(answer, written) -> None:
    assert is_written(answer) is written
