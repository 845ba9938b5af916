"""Hand a learner's block pool to a script and to the real engine, and write down every call in plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cbserve.clock import VirtualClock
from cbserve.core.batching import ContinuousBatching
from cbserve.core.blocks import BlockPool, FreeList
from cbserve.core.errors import ConservationError, NoFreeBlocksError
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler
from cbserve.core.stopping import StopChecker
from cbserve.core.trace import StepEvent
from cbserve.course.exercise import BrokenRuleError
from cbserve.course.exercise import call as ask
from cbserve.course.exercises.pool_audit import Call, call_told, first_fault
from cbserve.course.values import described
from cbserve.engine import Engine
from cbserve.errors import CBServeError
from cbserve.executors.scripted import EOS, ScriptedExecutor
from cbserve.recorder import quiet
from cbserve.serving import request_name

#: One step of a script: ("allocate", "A", 3), ("share", "A", "B"), ("free", "A"); where an error is wanted:
#: ("allocate too many", 9), ("free again", "A"), ("share free", "A"). A table is known by its holder's letter.
Op = tuple[Any, ...]


class CountedPool(BlockPool):
    """What an engine needs of a pool, except `allocate`, `share` and `free`, which a subclass writes.

    `free_blocks` is the list of free block ids, `ref_counts[block]` the number of tables that hold a block. Freed
    content is forgotten, so there is no prefix cache on this pool.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self.free_blocks = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self.free_blocks)

    def allocate(self, count: int = 1) -> list[int]:
        raise _yours("allocate")

    def share(self, block_ids: Iterable[int]) -> None:
        raise _yours("share")

    def free(self, block_ids: Iterable[int]) -> None:
        raise _yours("free")

    def publish(self, block: int, content_hash: bytes) -> None:
        """This pool remembers nothing of what it held."""

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        self._free = FreeList(self.free_blocks)
        super().check(tables)


def _yours(method: str) -> BrokenRuleError:
    return BrokenRuleError(f"CountedPool has no `{method}`, for `super()` neither: the exercise is that method")


class EnginePool(CountedPool):
    """The engine's own three methods on the same two lists: what an answer is measured by."""

    def allocate(self, count: int = 1) -> list[int]:
        if count > len(self.free_blocks):
            raise NoFreeBlocksError(f"{count} blocks wanted, {len(self.free_blocks)} of {self.num_blocks} free")
        blocks = [self.free_blocks.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            if not self.ref_counts[block]:
                raise ConservationError(f"block {block} is free and cannot be shared")
            self.ref_counts[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            if not self.ref_counts[block]:
                raise ConservationError(f"block {block} was freed twice")
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks.append(block)


def run_script(pool: type[CountedPool], num_blocks: int, ops: Sequence[Op]) -> dict[str, str]:
    """The last call in words and the log as JSON, up to the first fault. An error that is no refusal comes out."""
    mine, log = pool(num_blocks, 4), []
    tables: dict[str, list[int]] = {}
    for op, *args in ops:
        call: Call = {"call": op.split()[0], "blocks": [], "gave": None, "raised": ""}
        log.append(call)
        try:
            if op == "allocate":
                call |= {"count": args[1]}
                gave = call["gave"] = _kept(mine.allocate(args[1]))
                tables[args[0]] = gave if isinstance(gave, list) else []
            elif op == "share":
                call["blocks"] = tables[args[1]] = list(tables[args[0]])
                ask(mine.share, (list(tables[args[0]]),))
            elif op == "free":
                call["blocks"] = tables[args[0]]
                mine.free(reversed(tables[args[0]]))  # the engine hands over an iterator too
            elif op == "allocate too many":
                call |= {"count": args[0]}
                call["gave"] = _kept(mine.allocate(args[0]))
            else:
                call["blocks"] = tables[args[0]][:1]
                ask(mine.free if op == "free again" else mine.share, (list(call["blocks"]),))
        except BrokenRuleError:
            raise
        except Exception as error:
            call["raised"] = type(error).__name__
            if not isinstance(error, CBServeError) and op in ("allocate", "share", "free"):
                raise  # a slip of the pen: the check shows the learner's own line
        call |= _state(mine)
        if first_fault(num_blocks, log)[1]:
            break
    return _written(log)


def run_engine(pool: type[CountedPool], setting: dict[str, Any]) -> dict[str, str]:
    """The same for a run of the real engine, with the slots that ran in each step and why it refused to go on.

    setting: `lengths`, `prompts`, `samples` (answers to each prompt, which share its blocks), `slots`, `num_blocks` of
    4 tokens each.
    """
    log: list[Call] = []

    class Recorded(pool):  # type: ignore[misc, valid-type]
        def allocate(self, count: int = 1) -> list[int]:
            gave: list[int] = self._note({"call": "allocate", "blocks": [], "count": count}, super().allocate, count)
            return gave

        def share(self, block_ids: Iterable[int]) -> None:
            blocks = list(block_ids)
            self._note({"call": "share", "blocks": blocks}, super().share, blocks)

        def free(self, block_ids: Iterable[int]) -> None:
            blocks = list(block_ids)
            self._note({"call": "free", "blocks": blocks}, super().free, iter(blocks))

        def _note(self, call: Call, method: Callable[[Any], Any], argument: Any) -> Any:
            call |= {"gave": None, "raised": ""}
            log.append(call)
            try:
                gave = ask(method, (argument,))
                call["gave"] = _kept(gave)
            except CBServeError as error:
                call["raised"] = type(error).__name__
                raise
            finally:
                call |= _state(self)
            return gave

    names = [request_name(i) for i in range(len(setting["lengths"]))]
    batching = ContinuousBatching(max_num_seqs=setting["slots"])
    manager = KVCacheManager(Recorded(setting["num_blocks"], 4))
    script = ScriptedExecutor(dict(zip(names, setting["lengths"], strict=True)))
    engine = Engine(Scheduler(manager, batching, None, StopChecker([EOS])), script, VirtualClock())
    stopped = ""
    try:
        with quiet():
            rows = zip(names, setting["prompts"], setting["lengths"], setting["samples"], strict=True)
            for name, prompt, length, samples in rows:
                params = SamplingParams(max_tokens=length, n=samples)
                engine.add_request(Request(name, range(1, 1 + prompt), params, 0.0))
            for _ in range(500):
                if not engine.has_unfinished or first_fault(setting["num_blocks"], log)[1]:
                    break
                engine.step(partial=False)
            else:
                stopped = "it did not come to an end"
    except BrokenRuleError:
        raise
    except CBServeError as error:
        stopped = str(error)
    steps = " ".join(",".join(f"{row.slot}" for row in step.rows) for step in engine.trace.of(StepEvent))
    return _written(log) | {"steps": steps, "stopped": stopped}


def script_told(num_blocks: int, ops: Sequence[Op]) -> str:
    """The script in one line, as far as it is short."""
    words = []
    for op, *args in ops:
        if op == "share":
            words.append(f"{args[1]} shares the blocks of {args[0]}")
        elif op == "allocate":
            words.append(f"{args[0]} takes {args[1]}")
        elif op == "free":
            words.append(f"{args[0]} frees")
        elif op == "allocate too many":
            words.append(f"somebody wants {args[0]}")
        else:
            words.append(f"{op} of a block that {args[0]} had")
    return f"your pool of {num_blocks} blocks: {', '.join(words)}"


def _kept(gave: Any) -> Any:
    """A list of ids as it is now, since the engine takes some out of it; anything else in words."""
    if not isinstance(gave, list | tuple):
        return None if gave is None else described(gave)
    return [int(block) if hasattr(block, "__index__") else described(block) for block in gave]


def _state(pool: CountedPool) -> Call:
    return {"free_blocks": list(pool.free_blocks), "ref_counts": list(pool.ref_counts)}


def _written(log: list[Call]) -> dict[str, str]:
    last = log[-1]
    gave = f" gave {last['gave']}" if last["call"] == "allocate" and not last["raised"] else ""
    books = f"; free_blocks {last['free_blocks']}, ref_counts {last['ref_counts']}" if "free_blocks" in last else ""
    raised = f" raised {last['raised']}" if last["raised"] else ""
    return {"last call": f"{call_told(last)}{gave}{raised}{books}", "log": json.dumps(log)}
