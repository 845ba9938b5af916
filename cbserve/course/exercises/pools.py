"""Hand a learner's block pool to a script and to the real engine, write down every call, and audit what was written.

The log of a run is a list of calls in plain values; `first_fault` alone decides whether they were right, so that the
truth need not live in the process that holds the answer.
"""

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
from cbserve.engine import Engine
from cbserve.errors import CBServeError
from cbserve.executors.scripted import EOS, ScriptedExecutor
from cbserve.recorder import quiet
from cbserve.serving import request_name

#: One step of a script: ("allocate", "A", 3), ("share", "A", "B"), ("free", "A"); where an error is wanted:
#: ("allocate too many", 9), ("free again", "A"), ("share free", "A"). A table is known by its holder's letter.
Op = tuple[Any, ...]
Call = dict[str, Any]


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

    def publish(self, block: int, content_hash: bytes) -> None:
        """This pool remembers nothing of what it held."""

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        self._free = FreeList(self.free_blocks)
        super().check(tables)


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
                gave = call["gave"] = mine.allocate(args[1])
                tables[args[0]] = list(gave) if isinstance(gave, list | tuple) else []
            elif op == "share":
                call["blocks"] = tables[args[1]] = list(tables[args[0]])
                mine.share(list(tables[args[0]]))
            elif op == "free":
                call["blocks"] = tables[args[0]]
                mine.free(reversed(tables[args[0]]))  # the engine hands over an iterator too
            elif op == "allocate too many":
                call |= {"count": args[0]}
                call["gave"] = mine.allocate(args[0])
            else:
                call["blocks"] = tables[args[0]][:1]
                (mine.free if op == "free again" else mine.share)(list(call["blocks"]))
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

    setting: `lengths`, `prompts`, `samples` (answers to each prompt, which share its blocks), `num_blocks` of 4 tokens,
    `slots`.
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
                gave = method(argument)
                call["gave"] = list(gave) if isinstance(gave, list | tuple) else gave  # the engine takes some out of it
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
    except CBServeError as error:
        stopped = str(error)
    steps = " ".join(",".join(f"{row.slot}" for row in step.rows) for step in engine.trace.of(StepEvent))
    return _written(log) | {"steps": steps, "stopped": stopped}


def first_fault(num_blocks: int, calls: Sequence[Call]) -> tuple[int, str, list[int]]:
    """(index of the first wrong call, the rule it breaks, the blocks concerned); the rule is "" if all are right."""
    holders = [0] * num_blocks
    for index, call in enumerate(calls):
        fault = _fault(call, holders)
        if fault[0]:
            return index, *fault
    return len(calls), "", []


def _fault(call: Call, holders: list[int]) -> tuple[str, list[int]]:
    """Judge one call and bring `holders`, the true counts, up to date."""
    name, gave, raised = call["call"], call["gave"], call["raised"]
    before = list(holders)
    free = [block for block, count in enumerate(holders) if not count]
    wanted = ""
    if name == "allocate":
        count = call["count"]
        if count > len(free):
            wanted = "NoFreeBlocksError"
        elif raised:
            return f"allocate({count}) raised {raised}, and {len(free)} blocks are free: that is enough", []
        elif not isinstance(gave, list | tuple):
            return "allocate returns a list of block ids", []
        elif len(gave) != count:
            return f"allocate({count}) returned {len(gave)} blocks", list(gave)
        elif taken := [block for block in gave if block not in free]:
            return f"block {taken[0]} was handed out while somebody holds it", taken
        elif len(set(gave)) < count:
            return "the same block was handed out twice in one call", list(gave)
        else:
            for block in gave:
                holders[block] = 1
    else:
        unheld = [block for block in call["blocks"] if not holders[block]]
        wanted = "ConservationError" if unheld else ""
        for block in () if unheld else call["blocks"]:
            holders[block] += 1 if name == "share" else -1
    if wanted and raised != wanted:
        what = {
            "allocate": "allocate with too few free blocks",
            "free": "double free: free of a block that nobody holds",
            "share": "share of a block that nobody holds",
        }[name]
        return f"{what} must raise {wanted}" + (f", and this raised {raised}" if raised else ""), call["blocks"]
    if raised and not wanted:
        return f"{name} raised {raised}, and each of these blocks has a holder", call["blocks"]
    return _unsound(call, before, holders, bool(wanted))


def _unsound(call: Call, before: list[int], holders: list[int], refused: bool) -> tuple[str, list[int]]:
    """What is wrong with the books after a call, named by what it does to the engine."""
    name, free, counts = call["call"], call["free_blocks"], call["ref_counts"]
    blocks = range(len(holders))
    if len(counts) != len(holders) or any(block not in blocks for block in free):
        return "ref_counts has one number for each block, and free_blocks holds block ids", []
    twice = [block for block in blocks if free.count(block) > 1]
    still = [block for block in blocks if holders[block] and block in free]
    lost = [block for block in blocks if not holders[block] and block not in free]
    wrong = [block for block in blocks if counts[block] != holders[block]]
    if refused and (twice or still or lost or wrong):
        return f"{name} that raises must change nothing: the same blocks free, the same counts", twice + still + lost
    if twice:
        return f"double free: block {twice[0]} is in the free list twice, and two requests would get it", twice
    if still and name == "free":
        count = holders[still[0]]
        people = "somebody still holds it" if count == 1 else f"{count} still hold it"
        return f"free of a shared block: block {still[0]} is in the free list while {people}", still
    if still:
        return f"block {still[0]} was handed out and is still in the free list", still
    if lost:
        rule = f"leak: nobody holds block {lost[0]}, and it is not in the free list"
        if name == "free" and counts == before:
            rule += "; this call changed nothing: an iterator shows its blocks to one loop, not to a second"
        return rule, lost
    if wrong:
        block = wrong[0]
        rule = {
            "allocate": "a block that is handed out has one holder",
            "share": "share adds one holder to each block",
            "free": "free takes one holder from each block",
        }[name]
        return f"{rule}: ref_counts[{block}] went from {before[block]} to {counts[block]}", wrong
    return "", []


def pool_picture(num_blocks: int, calls: Sequence[Call]) -> str:
    """SVG of the pool after the first wrong call: every block, its holders, and the blocks that are wrong."""
    from cbserve.viz import style
    from cbserve.viz.figure import Canvas

    index, rule, marked = first_fault(num_blocks, calls)
    if not rule or index >= len(calls):
        return ""
    call, holders = calls[index], [0] * num_blocks
    for earlier in calls[: index + 1]:
        _fault(earlier, holders)
    free = call["free_blocks"]
    canvas, columns, size = Canvas(720), 9, 76
    title = rule if rule.startswith("allocate(") else rule[0].upper() + rule[1:]
    title_lines = style.wrap(title, 680, 17, bold=True)
    for row, line in enumerate(title_lines):
        canvas.text(16, 30 + 22 * row, line, "t")
    top = 30 + 22 * len(title_lines)
    canvas.text(16, top, f"The pool after call {index + 1}, {_told(call)}.", "a")
    top += 18
    for block in range(num_blocks):
        x, y = 16 + size * (block % columns), top + size * (block // columns)
        held = f"held by {holders[block]}" if holders[block] else "no holder"
        listed = "free" if block in free else ""
        listed += f" x{free.count(block)}" if free.count(block) > 1 else ""
        hover = f"block {block}: {held}, {f'in the free list ({listed})' if listed else 'not in the free list'}"
        canvas.rect(x, y, size - 6, size - 6, "track", hover, rx=5)
        if holders[block]:
            canvas.rect(x, y, size - 6, 20, "", fill=style.colour(0), rx=5)
        middle, on_colour = x + (size - 6) / 2, "fill:#fff;font-weight:700" if holders[block] else ""
        canvas.text(middle, y + 14, f"{block}", "b", "middle", style=on_colour)
        canvas.text(middle, y + 33, held.replace("held by ", "held x"), "a", "middle")
        if listed:
            canvas.text(middle, y + 48, listed, "a", "middle")
        if block in marked:
            edge = style.COLOURS[5]
            canvas.rect(x - 1, y - 1, size - 4, size - 4, "", fill="none", stroke=edge, stroke_width=3.5, rx=6)
    rows = -(-num_blocks // columns)
    desc = f"{num_blocks} blocks; wrong: {', '.join(map(str, sorted(set(marked)))) or 'none by itself'}."
    return canvas.svg(top + size * rows + 12, rule, desc)


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


def _told(call: Call) -> str:
    if call["call"] == "allocate":
        return f"allocate({call['count']})"
    return f"{call['call']}({call['blocks']})"


def _state(pool: CountedPool) -> Call:
    return {"free_blocks": list(pool.free_blocks), "ref_counts": list(pool.ref_counts)}


def _written(log: list[Call]) -> dict[str, str]:
    last = log[-1]
    gave = f" gave {last['gave']}" if last["call"] == "allocate" and not last["raised"] else ""
    books = f"; free_blocks {last['free_blocks']}, ref_counts {last['ref_counts']}" if "free_blocks" in last else ""
    raised = f" raised {last['raised']}" if last["raised"] else ""
    return {"last call": f"{_told(last)}{gave}{raised}{books}", "log": json.dumps(log)}
