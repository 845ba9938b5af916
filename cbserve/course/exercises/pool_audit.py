"""Audit the calls of a block pool that were written down, and draw the first wrong one.

A call is plain values; `first_fault` alone decides whether calls were right, so that the truth need not live in the
process that holds the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbserve.course.values import described
from cbserve.viz import style
from cbserve.viz.figure import Canvas

#: "call" (allocate, share or free), "count" or "blocks", what it "gave" (a text stands for what is no block id, or no
#: list) or "raised", then "free_blocks", "ref_counts".
Call = dict[str, Any]


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
        elif not isinstance(gave, list):
            return f"allocate returns a list of block ids, and this is {gave or described(gave)}", []
        elif odd := [block for block in gave if isinstance(block, str)]:
            return f"allocate returns a list of block ids, and one of them is {odd[0]}", []
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
    canvas.text(16, top, f"The pool after call {index + 1}, {call_told(call)}.", "a")
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


def call_told(call: Call) -> str:
    if call["call"] == "allocate":
        return f"allocate({call['count']})"
    return f"{call['call']}({call['blocks']})"
