"""The physical side of the KV cache: a pool of equal blocks with a free list, reference counts, leases and an index of
what full blocks hold.

The free list gives and takes in O(1) (Kwon et al. 2023, PagedAttention, section 4.2). A block whose content is known by
its hash stays findable after it is freed, until it is handed out again: least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from cbserve.core.errors import ConservationError, InvalidRequestError, NoFreeBlocksError
from cbserve.core.given import integer

MOST_BLOCKS = 50_000_000  # the pool keeps a list of them: some 2 GB then
MOST_BLOCK_SIZE = 65_536  # tokens; a simulation keeps a list for each place in a block


class FreeList:
    """Free block ids in the order in which they will be handed out. Every operation is O(1) a block.

    Two parts: a stack of ids that hold nothing of value, handed out first, the latest first; and behind it ids that are
    kept for what they hold, handed out in the order in which they came. Only a kept id can be taken out of the middle.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._stack = list(ids)[::-1]
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stack) + len(self._kept)

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self._stack)
        yield from self._kept

    def pop(self, count: int = 1) -> list[int]:
        """Take the first `count` ids. Raises NoFreeBlocksError, and changes nothing, when there are fewer."""
        stack, kept = self._stack, self._kept
        missing = count - len(stack)
        if missing > len(kept):
            raise NoFreeBlocksError(f"{count} blocks wanted, {len(self)} free: free a block first")
        at = max(0, -missing)
        ids = stack[at:]
        del stack[at:]
        ids.reverse()
        for _ in range(missing):
            ids.append(kept.popitem(last=False)[0])
        return ids

    def prepend(self, block_ids: SequenceOf[int]) -> None:
        """Give back ids, one after the other; the last of them will be handed out next."""
        self._stack += block_ids

    def append(self, block_id: int) -> None:
        """Give back an id that holds something; it will be handed out last, and can be removed."""
        if block_id in self._kept:
            raise ConservationError(f"block {block_id} was freed twice")
        self._kept[block_id] = None

    def remove(self, block_id: int) -> None:
        """Take a kept id out of the middle. Raises NoFreeBlocksError when it is none."""
        if block_id not in self._kept:
            raise NoFreeBlocksError(f"block {block_id} is not kept free")
        del self._kept[block_id]


class Lease:
    """Blocks held by something that is no sequence: a padding row, a swap in flight, a KV transfer not yet pulled."""

    __slots__ = ("block_ids", "holder", "released")

    def __init__(self, block_ids: SequenceOf[int], holder: str) -> None:
        self.block_ids = tuple(block_ids)
        self.holder = holder
        self.released = False


class BlockPool:
    """`num_blocks` equal blocks of `block_size` tokens; each is free, or used with a reference count.

    Raises:
        InvalidRequestError: a size is no integer of at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        num_blocks, block_size = integer("num_blocks", num_blocks, 1), integer("block_size", block_size, 1)
        if num_blocks > MOST_BLOCKS:
            raise InvalidRequestError(f"num_blocks={num_blocks}: must be at most {MOST_BLOCKS:,}; enlarge the blocks")
        if block_size > MOST_BLOCK_SIZE:
            raise InvalidRequestError(f"block_size={block_size}: must be at most {MOST_BLOCK_SIZE:,}; take more blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.leases: set[Lease] = set()
        self._evicted: list[int] = []  # blocks that lost their content to others since `take_evicted` was called last
        self._free = FreeList(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}  # what full blocks hold, free ones included
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks, each with reference count 1.

        Raises:
            NoFreeBlocksError: fewer are free; nothing was taken.
            InvalidRequestError: `count` is no integer of at least 0.
        """
        if not hasattr(count, "__index__") or count < 0:
            raise InvalidRequestError(f"count={count!r}: must be an integer of at least 0")
        try:
            blocks = self._free.pop(count)
        except NoFreeBlocksError:
            raise NoFreeBlocksError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free") from None
        ref_counts, hash_of = self.ref_counts, self._hash_of
        for block in blocks:
            ref_counts[block] = 1
        if hash_of:
            for block in blocks:
                if block in hash_of:  # evicted: its old content must not be found any more
                    del self._block_of[hash_of.pop(block)]
                    self._evicted.append(block)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for blocks in use, or for free blocks whose content is still findable.

        Raises:
            ConservationError: a block holds nothing to share, or the pool has no such block.
        """
        for block in block_ids:
            if not self._has(block):
                raise self._no_such(block)
            if not self.ref_counts[block]:
                if block not in self._hash_of:
                    raise ConservationError(f"block {block} is free and cannot be shared")
                self._free.remove(block)
            self.ref_counts[block] += 1

    def publish(self, block: int, content_hash: bytes) -> None:
        """Make a full, written block findable. Another block with the same content stays the one that is found."""
        if content_hash not in self._block_of and block not in self._hash_of:
            self._block_of[content_hash] = block
            self._hash_of[block] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """The block that holds this content, in use or free; None if there is none."""
        return self._block_of.get(content_hash)

    def findable(self) -> list[int]:
        """Blocks whose content can be found, in use or free."""
        return list(self._hash_of)

    def take_evicted(self) -> list[int]:
        """Blocks that lost their content to others since this was called last."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def free(self, block_ids: Iterable[int]) -> None:
        """One holder fewer. A block without a holder is free: handed out next, or last if its content is findable.

        Raises:
            ConservationError: a block has no holder (freed twice), or the pool has no such block.
        """
        ref_counts, hash_of, keep = self.ref_counts, self._hash_of, self._free.append
        empty: list[int] = []
        try:
            for block in block_ids:
                try:  # costs nothing when all is well, and this is the hottest loop of the pool
                    count = ref_counts[block]
                except (IndexError, TypeError):
                    raise self._no_such(block) from None
                if block < 0:  # a list would count it from its end
                    raise self._no_such(block)
                if not count:
                    raise ConservationError(f"block {block} was freed twice")
                ref_counts[block] = count - 1
                if count == 1:
                    if block in hash_of:
                        keep(block)
                    else:
                        empty.append(block)
        finally:
            self._free.prepend(empty)

    def _has(self, block: int) -> bool:
        return hasattr(block, "__index__") and 0 <= block < self.num_blocks

    def _no_such(self, block: int) -> ConservationError:
        return ConservationError(f"block {block!r} is not of this pool, whose blocks are 0 to {self.num_blocks - 1}")

    def lease(self, block_ids: SequenceOf[int], holder: str) -> Lease:
        """Hold blocks in use until `release`, whatever happens to their sequence."""
        lease = Lease(block_ids, holder)
        self.share(lease.block_ids)
        self.leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease. Doing it twice is an error."""
        if lease.released:
            raise ConservationError(f"the lease of {lease.holder} was released twice")
        lease.released = True
        self.leases.remove(lease)
        self.free(reversed(lease.block_ids))

    def check(self, tables: Iterable[SequenceOf[int]]) -> None:
        """Conservation: free + used == total, and the holders that exist are the holders that were counted.

        Args:
            tables: every block table that is in use; leases are known here.

        Raises:
            ConservationError: names the first block that is wrong.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                if not self._has(block):
                    raise self._no_such(block)
                held[block] += 1
        for lease in self.leases:
            for block in lease.block_ids:
                held[block] += 1
        free = set(self._free)
        for block, (count, holders) in enumerate(zip(self.ref_counts, held, strict=True)):
            if count != holders:
                raise ConservationError(f"block {block}: {count} references counted, {holders} held")
            if (block in free) == (count > 0):
                raise ConservationError(
                    f"block {block}: {count} references, but {'free' if block in free else 'not free'}"
                )
