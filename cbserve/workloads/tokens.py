"""Prompts of simulated requests: token ids that are counted up, never stored.

What a simulator needs of a prompt is its length and which other prompts begin alike. A `range` has both at no cost, and
a `Ranges` joins several: a shared system prompt, then a user's own words.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

from cbserve.core.errors import InvalidRequestError

#: Tokens that one request or session may use as its own; two never overlap (`own_tokens`).
OWN_TOKENS = 2**24


class Ranges(Sequence[int]):
    """Several `range`s, one after the other, as one immutable sequence of ints. Memory and `==` cost O(pieces).

    A slice is a `range` or `Ranges` again. Token ids must fit 64 bits with sign, because the prefix cache hashes them
    so. Equal to another `Ranges` or a `range` with the same values, however either is cut into pieces.

    Raises:
        InvalidRequestError: a piece is no range, or leaves 64 bits.
    """

    __slots__ = ("_ends", "pieces")

    def __init__(self, *pieces: range) -> None:
        joined: list[range] = []
        for piece in pieces:
            if not isinstance(piece, range):
                raise InvalidRequestError(f"piece {piece!r}: must be a range")
            if not piece:
                continue
            if not -(2**63) <= min(piece[0], piece[-1]) <= max(piece[0], piece[-1]) < 2**63:
                raise InvalidRequestError(f"piece {piece!r}: token ids must lie in -2**63 .. 2**63 - 1")
            last = joined[-1] if joined else None
            if last is not None and last.step == piece.step and last[-1] + last.step == piece[0]:
                joined[-1] = range(last[0], piece.stop, last.step)
            else:
                joined.append(piece)
        self.pieces = tuple(joined)
        self._ends = list(accumulate(map(len, joined)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> range | Ranges: ...
    def __getitem__(self, index: int | slice) -> int | range | Ranges:
        if isinstance(index, slice):
            return self._slice(range(len(self))[index])
        position = range(len(self))[index]  # negative ones and IndexError as everywhere
        at = bisect_right(self._ends, position)
        return self.pieces[at][position - self._ends[at]]  # counted from the piece's end

    def _slice(self, picked: range) -> range | Ranges:
        """The values at positions `picked`."""
        if not picked:
            return range(0)
        backwards = picked.step < 0
        if backwards:
            picked = picked[::-1]
        parts = []
        for at in range(bisect_right(self._ends, picked[0]), bisect_right(self._ends, picked[-1]) + 1):
            piece = self.pieces[at]
            start = self._ends[at] - len(piece)
            here = picked[bisect_left(picked, start) : bisect_left(picked, self._ends[at])]
            if here:
                parts.append(piece[here[0] - start : here[-1] - start + 1 : here.step])
        return joined(part[::-1] for part in reversed(parts)) if backwards else joined(parts)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.pieces)

    def __contains__(self, value: object) -> bool:
        return any(value in piece for piece in self.pieces)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, range):
            other = Ranges(other)
        if not isinstance(other, Ranges):
            return NotImplemented
        if len(self) != len(other):
            return False
        cuts = sorted({0, *self._ends, *other._ends})
        return all(
            _within(self, start, stop) == _within(other, start, stop)
            for start, stop in zip(cuts, cuts[1:], strict=False)
        )

    __hash__ = None  # type: ignore[assignment]  # equal to a range, whose hash is another

    def __reduce__(self) -> tuple[type[Ranges], tuple[range, ...]]:
        return Ranges, self.pieces

    def __repr__(self) -> str:
        return f"Ranges({', '.join(map(repr, self.pieces))})"


def _within(ranges: Ranges, start: int, stop: int) -> range:
    """Positions start..stop-1, which lie in one piece."""
    at = bisect_right(ranges._ends, start)
    piece = ranges.pieces[at]
    before = ranges._ends[at] - len(piece)
    return piece[start - before : stop - before]


def joined(pieces: Iterator[range] | Sequence[range]) -> range | Ranges:
    """The pieces one after the other: a `range` where one is enough."""
    ranges = Ranges(*pieces)
    if not ranges.pieces:
        return range(0)
    return ranges.pieces[0] if len(ranges.pieces) == 1 else ranges


def own_tokens(owner: int, num_tokens: int) -> range:
    """`num_tokens` token ids that no other owner has; a simulated answer goes on with the next ones.

    Raises:
        InvalidRequestError: `owner` or `num_tokens` is negative or too large for disjoint ids of 64 bits.
    """
    if not 0 <= owner < 2**38 or not 0 <= num_tokens <= OWN_TOKENS:
        raise InvalidRequestError(
            f"owner={owner!r}, num_tokens={num_tokens!r}: must be 0 <= owner < 2**38 and at most {OWN_TOKENS} tokens"
        )
    base = (owner + 1) * OWN_TOKENS  # ids of real vocabularies, EOS among them, stay unused
    return range(base, base + num_tokens)
