"""The logical side of the KV cache: which block holds which tokens of which sequence (Kwon et al. 2023, section 4.3)."""

from __future__ import annotations

from cbserve.core.blocks import BlockPool, Lease
from cbserve.core.request import Sequence


class KVCacheManager:
    """Block tables over a pool. `tables[seq_id][p // block_size]` is the block of position p.

    A table only grows; when it is freed or an entry is replaced, a new list takes its place, so a plan that was made
    earlier stays true.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """New blocks that `seq` needs so that its table holds `num_tokens` tokens and no other holds what it writes to."""
        table = self.tables.get(seq.seq_id)
        if table is None:
            return self.blocks_for(num_tokens)
        need = max(0, self.blocks_for(num_tokens) - len(table))
        return need if self._shared_tail(seq, table) is None else need + 1

    def allocate(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Grow the table of `seq` to hold `num_tokens` tokens; the next write must not touch a block that others share.

        Returns:
            (source, target) pairs of blocks to copy before the step writes: copy-on-write.

        Raises:
            NoFreeBlocksError: nothing was changed.
        """
        need = self.blocks_needed(seq, num_tokens)
        if not need:
            return []
        blocks = self.pool.allocate(need)
        table = self.tables.get(seq.seq_id, [])
        tail, copies = self._shared_tail(seq, table), []
        if tail is not None:
            source, target = table[tail], blocks.pop(0)
            table = [*table[:tail], target, *table[tail + 1 :]]
            self.pool.free([source])
            copies.append((source, target))
            self.tables[seq.seq_id] = table
        self.tables.setdefault(seq.seq_id, table).extend(blocks)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` the same blocks as `parent`; a shared block is copied when one of them writes into it."""
        table = self.tables[parent.seq_id]
        self.pool.share(table)
        self.tables[child.seq_id] = list(table)

    def free(self, seq: Sequence) -> int:
        """Give back the blocks of `seq`, the last first. Returns how many; 0 if it held none."""
        table = self.tables.pop(seq.seq_id, [])
        self.pool.free(reversed(table))
        return len(table)

    def num_blocks_only_of(self, seq: Sequence) -> int:
        """Blocks that would be free if `seq` gave its table back: those that nobody else holds."""
        return sum(self.pool.ref_counts[block] == 1 for block in self.tables.get(seq.seq_id, ()))

    def lease(self, seq: Sequence, holder: str) -> Lease:
        """Hold the blocks of `seq` beyond its end."""
        return self.pool.lease(self.tables[seq.seq_id], holder)

    def check(self) -> None:
        """Raise ConservationError unless every block is accounted for."""
        self.pool.check(self.tables.values())

    def _shared_tail(self, seq: Sequence, table: list[int]) -> int | None:
        """Index of the block that the next token is written to, if others hold it too."""
        index = seq.num_computed_tokens // self.block_size
        if index < len(table) and self.pool.ref_counts[table[index]] > 1:
            return index
        return None
