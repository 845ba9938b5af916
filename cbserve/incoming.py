"""Requests that have not arrived yet: added for a later time, or still to be read from a source."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from cbserve.core.errors import InvalidRequestError
from cbserve.core.request import Request


class Incoming:
    """In order of arrival; of two at the same time, the one that was added first.

    A source is read when the request before has arrived or was taken back, so that a million need not be in memory.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._ids: set[str] = set()
        self._source: Iterator[Request] = iter(())
        self._ahead: Request | None = None  # the one that was read from the source and is still here
        self._num_added = 0

    def __len__(self) -> int:
        """How many are known; 0: none will come."""
        return len(self._heap)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    @property
    def next_s(self) -> float:
        """When the next arrives; infinity: never."""
        try:
            return self._heap[0][0]
        except IndexError:  # no look before: another thread may take the last one back in between
            return math.inf

    def add(self, request: Request) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (request.arrival_s or 0.0, self._num_added, request))
        self._ids.add(request.request_id)

    def follow(self, source: Iterable[Request]) -> None:
        """Read on from `source`, whose requests come in order of arrival.

        Raises:
            InvalidRequestError: another source is not at its end; or, now or when it is read, a request arrives before
                the one that it follows.
        """
        if self._ahead is not None:
            raise InvalidRequestError("another replay is under way; finish it, close it or abort all first")
        self._source = _in_order(source)
        self._read_ahead()

    def due(self, now_s: float) -> Iterator[Request]:
        """Take out, one after the other, what has arrived."""
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            self._ids.remove(request.request_id)
            yield request
            self._read_after(request)

    def remove(self, request_id: str) -> Request | None:
        """Take one back before it arrives; None if it is not here."""
        for entry in self._heap:
            if entry[2].request_id == request_id:
                self._heap.remove(entry)
                self._ids.remove(request_id)
                heapq.heapify(self._heap)
                self._read_after(entry[2])
                return entry[2]
        return None

    def clear(self) -> list[Request]:
        """Take all back, and read no further."""
        known = [request for _, _, request in sorted(self._heap)]
        self._heap.clear()
        self._ids.clear()
        self._source, self._ahead = iter(()), None
        return known

    def _read_after(self, gone: Request) -> None:
        if gone is self._ahead:
            self._read_ahead()

    def _read_ahead(self) -> None:
        self._ahead = None  # also where reading raises
        self._ahead = next(self._source, None)
        if self._ahead is not None:
            self.add(self._ahead)


def require_request(request: object) -> None:
    """Raise InvalidRequestError unless it is a Request."""
    if not isinstance(request, Request):
        raise InvalidRequestError(f"{request!r} is no Request; make one: Request(request_id, prompt_token_ids)")


def _in_order(requests: Iterable[Request]) -> Iterator[Request]:
    latest = 0.0
    for request in requests:
        require_request(request)
        arrival_s = request.arrival_s or 0.0
        if arrival_s < latest:
            raise InvalidRequestError(
                f"request {request.request_id!r} arrives at {arrival_s} s, after one at {latest} s; sort them"
            )
        latest = arrival_s
        yield request
