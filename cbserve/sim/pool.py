"""Where the points of a sweep run: worker processes here, or the workers of a Ray cluster. One seam for both.

A runner is called with a function and items and yields (item, outcome) as each ends, in any order. The outcome is what
the function returned, or a `Lost`: the worker died, or the function raised what it should not have.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar, cast

from cbserve.errors import CBServeError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Lost:
    """No outcome, and why."""

    reason: str


class Runner(Protocol):
    def __call__(self, function: Callable[[Item], Any], items: Sequence[Item]) -> Iterator[tuple[Item, Any]]: ...


@dataclass(frozen=True)
class Processes:
    """`jobs` worker processes. One that dies takes its item along and is replaced; the others go on."""

    jobs: int

    def __call__(self, function: Callable[[Item], Any], items: Sequence[Item]) -> Iterator[tuple[Item, Any]]:
        context = multiprocessing.get_context("spawn")  # the same on every system, and no threads are forked
        to_do = list(reversed(items))
        busy: dict[Connection, tuple[Any, Item]] = {}
        idle: list[tuple[Connection, Any]] = []
        try:
            while to_do or busy:
                while to_do and len(busy) < self.jobs:
                    if not idle:
                        here, there = context.Pipe()
                        process = context.Process(target=_work, args=(there, function), daemon=True)
                        process.start()
                        there.close()  # the worker's end: only its death closes the pipe now
                        idle.append((here, process))
                    pipe, process = idle.pop()
                    busy[pipe] = process, to_do.pop()
                    _send(pipe, busy[pipe][1])
                for pipe in cast(list[Connection], wait(list(busy))):
                    process, item = busy.pop(pipe)
                    try:
                        outcome = pipe.recv()
                        idle.append((pipe, process))
                    except (EOFError, OSError):
                        process.join()
                        pipe.close()
                        outcome = Lost(f"its worker died (exit code {process.exitcode})")
                    yield item, outcome
        finally:
            for pipe, process in [*idle, *((pipe, process) for pipe, (process, _) in busy.items())]:
                process.terminate()
                process.join()
                pipe.close()


def _send(pipe: Connection, item: object) -> None:
    with suppress(OSError):  # it died while it was idle: `recv` will say so
        pipe.send(item)


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """A worker: item in, outcome out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    while True:
        try:
            item = pipe.recv()
            pipe.send(_outcome(function, item))
        except (EOFError, BrokenPipeError):  # the parent is gone
            return


def _outcome(function: Callable[[Item], Any], item: Item) -> Any:
    try:
        return function(item)
    except CBServeError as error:
        return Lost(str(error))
    except Exception:
        return Lost(traceback.format_exc(limit=-3).strip())


@dataclass(frozen=True)
class Cluster:
    """An existing Ray cluster, which must have this version of cbserve; files must have the same paths there."""

    address: str

    def __call__(self, function: Callable[[Item], Any], items: Sequence[Item]) -> Iterator[tuple[Item, Any]]:
        ray = load_ray()
        try:
            _knock(self.address)
            ray.init(address=self.address)
        except Exception as error:  # of many kinds, by version
            raise CBServeError(
                f"cluster={self.address!r} cannot be reached ({error}); is `ray start` running?"
            ) from error
        try:
            remote = ray.remote(max_retries=0)(_outcome)
            pending = {remote.remote(function, item): item for item in items}
            while pending:
                (done, *_), _ = ray.wait(list(pending), num_returns=1)
                item = pending.pop(done)
                try:
                    outcome = ray.get(done)
                except Exception as error:  # a RayError: worker, node or object lost
                    outcome = Lost(f"its worker died ({error})")
                yield item, outcome
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError when nobody listens at a `host:port`: Ray itself would wait for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def load_ray() -> Any:
    """Raises CBServeError: the extra is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        raise CBServeError('--cluster needs Ray: pip install "cbserve[cluster]"') from None
