"""The logical side of the KV cache: which block holds which tokens of which sequence (Kwon et al. 2023, section 4.3).

Three ways to fill a table besides computing: a fork shares its parent's blocks and copies on write, a known prefix is
found in the index, and what was swapped out to the host comes back.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from hashlib import sha256

from cbserve.core.blocks import BlockPool, Lease
from cbserve.core.errors import InvalidRequestError
from cbserve.core.request import Sequence

Pairs = list[tuple[int, int]]


class KVCacheManager:
    """Block tables over a pool. `tables[seq_id][p // block_size]` is the block of position p.

    A table only grows; when it is freed or an entry is replaced, a new list takes its place, so a plan that was made
    earlier stays true.

    Args:
        pool: the blocks on the device.
        enable_prefix_caching: find full blocks of known prefixes instead of computing them.
        host_pool: blocks in host memory for sequences that are swapped out; None: there is no swapping.
    """

    def __init__(
        self, pool: BlockPool, enable_prefix_caching: bool = False, host_pool: BlockPool | None = None
    ) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host_pool = host_pool
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}  # host blocks of sequences that are swapped out
        self.coming_in: dict[int, list[int]] = {}  # host blocks that this step reads: nobody may write to them before

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Free blocks that `seq` needs so that its table holds `num_tokens` tokens and no other holds what it writes
        to."""
        table = self.tables.get(seq.seq_id)
        if table is None:  # blocks of its prefix that others use cost nothing; cached free ones do
            return self.blocks_for(num_tokens) - sum(self.pool.ref_counts[b] > 0 for b in self.find_prefix(seq))
        need = max(0, self.blocks_for(num_tokens) - len(table))
        return need if self._shared_tail(seq, table) is None else need + 1

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens of `seq` whose K and V need not be computed: in its table, swapped out, or found in the index."""
        return seq.num_computed_tokens or len(self.find_prefix(seq)) * self.block_size

    # ---- growing ------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> tuple[Pairs, int]:
        """Give `seq` a table with what is known of it; `num_computed_tokens` then says how much that is.

        Returns:
            (host block, block) pairs to copy before this step computes, and how many tokens the index gave.
        """
        prefix = self.find_prefix(seq)
        if seq.seq_id in self.swapped:
            host = self.coming_in[seq.seq_id] = self.swapped.pop(seq.seq_id)
            table = self.tables[seq.seq_id] = self.pool.allocate(len(host))
            return list(zip(host, table, strict=True)), 0
        self.pool.share(prefix)
        if prefix:
            self.tables[seq.seq_id] = prefix
            seq.num_computed_tokens = len(prefix) * self.block_size
        return [], seq.num_computed_tokens

    def allocate(self, seq: Sequence, num_tokens: int) -> Pairs:
        """Grow the table of `seq` to hold `num_tokens` tokens; the next write must not touch a block that others share.

        Returns:
            (source, target) pairs of blocks to copy before the step writes: copy-on-write.

        Raises:
            NoFreeBlocksError: nothing was changed.
        """
        table = self.tables.get(seq.seq_id, [])
        tail = self._shared_tail(seq, table)
        need = max(0, self.blocks_for(num_tokens) - len(table)) + (tail is not None)
        if not need:
            return []
        blocks, copies = self.pool.allocate(need), []
        if tail is not None:
            source, target = table[tail], blocks.pop(0)
            table = [*table[:tail], target, *table[tail + 1 :]]
            self.pool.free([source])
            copies.append((source, target))
            self.tables[seq.seq_id] = table
        self.tables.setdefault(seq.seq_id, table).extend(blocks)
        return copies

    def extend(self, seqs: SequenceOf[Sequence]) -> None:
        """One block more for each, in order; their tables are full, so that the next token goes into a block of its
        own. One that stands there twice gets two.

        Raises:
            NoFreeBlocksError: nothing was changed.
        """
        if seqs:
            for seq, block in zip(seqs, self.pool.allocate(len(seqs)), strict=True):
                self.tables[seq.seq_id].append(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` the same blocks as `parent`; a shared block is copied when one of them writes into it."""
        table = self.tables[parent.seq_id]
        self.pool.share(table)
        self.tables[child.seq_id] = list(table)
        child.block_hashes = list(parent.block_hashes)
        child.num_published_blocks = parent.num_published_blocks

    def step_done(self, seq: Sequence) -> SequenceOf[int]:
        """The step has written K and V of `seq`: its full blocks become findable, its host copy is not needed any more.

        Returns:
            Blocks that are findable now and were not before.
        """
        if self.host_pool is not None:
            self.host_pool.free(self.coming_in.pop(seq.seq_id, ()))
        if not self.enable_prefix_caching:
            return ()
        published: list[int] = []
        full = seq.num_computed_tokens // self.block_size
        if full > seq.num_published_blocks:
            hashes, table = self._hashes(seq, full), self.tables[seq.seq_id]
            for index in range(seq.num_published_blocks, full):
                if self.pool.find(hashes[index]) is None:
                    self.pool.publish(table[index], hashes[index])
                    published.append(table[index])
            seq.num_published_blocks = full
        return published

    # ---- giving back --------------------------------------------------------------------------------------------

    def free(self, seq: Sequence) -> int:
        """Give back the device blocks of `seq`, the last first. Returns how many; 0 if it held none."""
        table = self.tables.pop(seq.seq_id, [])
        self.pool.free(reversed(table))
        seq.num_published_blocks = 0
        return len(table)

    def forget(self, seq: Sequence) -> int:
        """Give back everything that `seq` holds, on the device and on the host. Returns how many device blocks."""
        count = self.free(seq)
        if self.host_pool is not None:
            for tables in (self.swapped, self.coming_in):
                self.host_pool.free(tables.pop(seq.seq_id, ()))
        return count

    def swap_out(self, seq: Sequence, copies: Pairs) -> Pairs | None:
        """Keep the computed tokens of `seq` in host blocks; its device blocks are still its own.

        Args:
            copies: copy-on-write pairs that this step planned for `seq` and that will not be carried out now: the
                source still holds the content, the target was never written.

        Returns:
            (block, host block) pairs to copy before anything else in this step; None if there is no room, or nothing
            to keep.
        """
        if seq.seq_id in self.coming_in:  # it came in by this very plan: the host copy is whole, the device copy is not
            self.swapped[seq.seq_id] = self.coming_in.pop(seq.seq_id)
            return []
        count = self.blocks_for(seq.num_computed_tokens)
        if self.host_pool is None or not 0 < count <= self.host_pool.num_free:
            return None
        unwritten = {target: source for source, target in copies}
        host = self.swapped[seq.seq_id] = self.host_pool.allocate(count)
        table = self.tables[seq.seq_id][:count]
        return [(unwritten.get(block, block), h) for block, h in zip(table, host, strict=True)]

    def num_blocks_only_of(self, seqs: SequenceOf[Sequence]) -> int:
        """Blocks that would be free if all of `seqs` gave their tables back: those that nobody else holds."""
        holders = Counter(block for seq in seqs for block in self.tables.get(seq.seq_id, ()))
        return sum(self.pool.ref_counts[block] == count for block, count in holders.items())

    def lease(self, seq: Sequence, holder: str) -> Lease:
        """Hold the blocks of `seq` beyond its end."""
        return self.pool.lease(self.tables[seq.seq_id], holder)

    # ---- known prefixes -----------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks of the longest known prefix of a waiting `seq`. At least one token is left to compute, so that there
        are logits to sample from. What is swapped out comes back by itself and looks for no prefix."""
        if not self.enable_prefix_caching or seq.num_computed_tokens:
            return []
        found: list[int] = []
        for content_hash in self._hashes(seq, (seq.num_tokens - 1) // self.block_size):
            block = self.pool.find(content_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        """Hashes of the first `count` full blocks: SHA-256 of the block before and of the tokens, salted at the root.

        Equal hashes mean equal prefixes; SHA-256 has no known collisions, so tokens need not be compared.
        """
        hashes, size = seq.block_hashes, self.block_size
        while len(hashes) < count:
            parent = hashes[-1] if hashes else sha256(seq.request.cache_salt.encode()).digest()
            tokens = seq.tokens(len(hashes) * size, (len(hashes) + 1) * size)
            try:
                content = array("q", tokens)
            except (TypeError, OverflowError) as error:
                raise InvalidRequestError(
                    f"request {seq.request.request_id!r}: its prompt is no sequence of token ids of 64 bits ({error})"
                ) from None
            hashes.append(sha256(parent + content.tobytes()).digest())
        return hashes[:count]

    # ---- invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ConservationError unless every block is accounted for, on the device and on the host."""
        self.pool.check(self.tables.values())
        if self.host_pool is not None:
            self.host_pool.check([*self.swapped.values(), *self.coming_in.values()])

    def _shared_tail(self, seq: Sequence, table: list[int]) -> int | None:
        """Index of the block that the next token is written to, if others hold it too."""
        index = seq.num_computed_tokens // self.block_size
        if index < len(table) and self.pool.ref_counts[table[index]] > 1:
            return index
        return None
