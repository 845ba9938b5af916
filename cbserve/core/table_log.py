"""From plans to `pages` events: what is new in the block tables, and nothing else."""

from __future__ import annotations

from itertools import islice

from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import StepPlan
from cbserve.core.trace import PagesEvent


class TableLog:
    """Remembers how many entries of each table one trace has been told. Tables are append-only, so that lengths and the
    copies of a plan tell what is new.

    Args:
        kv: whose prefix cache may hold blocks of earlier runs: the first event tells them.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._lengths: dict[int, int] = {}  # by seq_id
        self._knows_cache = not kv.enable_prefix_caching

    def changes(self, plan: StepPlan, time_s: float, step: int) -> PagesEvent | None:
        """What `plan` changes; None: nothing."""
        lengths = self._lengths
        released: list[int] = []
        swapped: list[tuple[int, tuple[int, ...]]] = []
        if plan.decisions and (preemptions := plan.preemptions):
            released = [p.seq_id for p in preemptions if lengths.pop(p.seq_id, None) is not None]
            pairs = iter(plan.swap_outs)
            for p in preemptions:
                if p.num_swapped_blocks:
                    swapped.append((p.seq_id, tuple(host for _, host in islice(pairs, p.num_swapped_blocks))))
        copied = {target for _, target in plan.copies} if plan.copies else ()
        grown: list[tuple[int, int, tuple[int, ...]]] = []
        for row in plan.rows:
            table, count = row.block_table, lengths.get(row.seq_id, 0)
            if copied:
                grown += [(row.seq_id, i, (table[i],)) for i in range(count) if table[i] in copied]
            if len(table) != count:
                grown.append((row.seq_id, count, tuple(table[count:])))
                lengths[row.seq_id] = len(table)
        findable = () if self._knows_cache else tuple(self._kv.pool.findable())
        self._knows_cache = True
        if not (grown or released or swapped or plan.evicted or findable):
            return None
        return PagesEvent(time_s, step, tuple(released), tuple(grown), tuple(swapped), tuple(plan.evicted), findable)

    def fork(self, parent_id: int, child_id: int) -> None:
        """A `forked` event tells the child's table."""
        self._lengths[child_id] = self._lengths.get(parent_id, 0)

    def leave(self, seq_id: int) -> None:
        """A `left` event tells that the table is gone."""
        self._lengths.pop(seq_id, None)
