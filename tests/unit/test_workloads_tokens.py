"""Prompts made of ranges behave as the tuple of their values, and cost nothing."""

from __future__ import annotations

import pickle
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads.tokens import OWN_TOKENS, Ranges, joined, own_tokens

pieces = st.lists(
    st.builds(
        lambda start, count, step: range(start, start + count * step, step),
        st.integers(-40, 40), st.integers(0, 8), st.sampled_from([1, 1, 1, 2, -1, -3]),
    ),
    max_size=6,
)  # fmt: skip
bounds = st.none() | st.integers(-60, 60)


def flat(parts: list[range]) -> tuple[int, ...]:
    return tuple(x for part in parts for x in part)


@given(pieces)
def test_reads_as_the_tuple_of_its_values(parts: list[range]) -> None:
    ranges, values = Ranges(*parts), flat(parts)
    assert len(ranges) == len(values)
    assert tuple(ranges) == values
    assert tuple(reversed(ranges)) == values[::-1]
    assert [ranges[i] for i in range(-len(values), len(values))] == [*values, *values]
    assert all((x in ranges) == (x in values) for x in range(-70, 110))
    for position in (len(values), -len(values) - 1):
        with pytest.raises(IndexError):
            ranges[position]


@given(pieces, bounds, bounds, st.none() | st.integers(-5, 5).filter(bool))
def test_slices_as_the_tuple_does_and_stays_lazy(
    parts: list[range], start: int | None, stop: int | None, step: int | None
) -> None:
    part = Ranges(*parts)[start:stop:step]
    assert isinstance(part, range | Ranges)
    assert tuple(part) == flat(parts)[start:stop:step]


@given(pieces, pieces)
def test_equality_is_that_of_the_values(left: list[range], right: list[range]) -> None:
    assert (Ranges(*left) == Ranges(*right)) == (flat(left) == flat(right))


@given(pieces, st.data())
def test_how_it_is_cut_does_not_matter(parts: list[range], data: st.DataObject) -> None:
    cut = [half for part in parts for at in [data.draw(st.integers(0, len(part)))] for half in (part[:at], part[at:])]
    assert Ranges(*cut) == Ranges(*parts)
    assert Ranges(*(range(x, x + 1) for x in flat(parts))) == Ranges(*parts)


@given(pieces)
def test_pickles(parts: list[range]) -> None:
    copy = pickle.loads(pickle.dumps(Ranges(*parts)))
    assert copy == Ranges(*parts) and tuple(copy) == flat(parts)


def test_equals_a_range_and_nothing_else() -> None:
    assert Ranges(range(0, 5), range(5, 9)) == range(9)
    assert range(9) == Ranges(range(9))
    assert Ranges(range(3)) != [0, 1, 2]
    with pytest.raises(TypeError):
        hash(Ranges(range(3)))


def test_a_long_prompt_costs_no_more_than_a_short_one() -> None:
    def size(ranges: Ranges) -> int:
        return len(pickle.dumps(ranges)) + sys.getsizeof(ranges) + sys.getsizeof(ranges.pieces)

    long, short = (Ranges(range(n), range(7, 7 + n)) for n in (10**9, 3))
    assert size(long) - size(short) < 64
    assert long[10**9 - 2 : 10**9 + 2] == Ranges(range(10**9 - 2, 10**9), range(7, 9))
    assert len(Ranges(*(range(i, i + 1) for i in range(1000))).pieces) == 1


def test_ids_fit_the_hash_of_the_prefix_cache() -> None:
    assert array("q", Ranges(range(2**63 - 2, 2**63), range(-(2**63), 2 - 2**63)))[1] == 2**63 - 1
    for piece in (range(2**63 - 1, 2**63 + 1), range(-(2**63) - 1, 0)):
        with pytest.raises(InvalidRequestError, match="2\\*\\*63"):
            Ranges(piece)


@pytest.mark.parametrize("piece", [[1, 2], (3,), None, "ab"])
def test_a_piece_that_is_no_range_is_refused(piece: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be a range"):
        Ranges(piece)  # type: ignore[arg-type]


def test_joined_is_a_range_where_one_is_enough() -> None:
    assert isinstance(joined([range(0, 512), range(512, 600)]), range)
    assert joined([]) == range(0)
    assert isinstance(joined([range(3), range(7, 9)]), Ranges)


def test_owners_never_share_a_token() -> None:
    first, second = own_tokens(0, OWN_TOKENS), own_tokens(1, OWN_TOKENS)
    assert first[-1] < second[0] and first[0] > 200_000
    assert array("q", own_tokens(2**38 - 1, 3))
    for owner, num_tokens in ((-1, 1), (2**38, 1), (0, OWN_TOKENS + 1), (0, -1)):
        with pytest.raises(InvalidRequestError, match="owner="):
            own_tokens(owner, num_tokens)
