"""From the rows of a step to packed arrays: the tokens of all sequences one after the other, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbserve.core.plan import Row
from cbserve.errors import CBServeError


class PlanError(CBServeError):
    """A step asks for something that the executor does not have."""


@dataclass(frozen=True)
class PackedStep:
    """R rows with N tokens in all; the tensors are int64 and live on the executor's device.

    Row r owns the tokens query_start[r] .. query_start[r + 1] - 1; exactly the blocks block_tables[r] hold its context.
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N], each token's place in its own sequence
    slots: Tensor  # [N], where its K and V go: block id * block_size + offset
    query_start: list[int]  # [R + 1]
    context_lens: list[int]  # [R], this step's tokens included
    block_tables: list[Sequence[int]]  # R lists

    @property
    def query_lens(self) -> list[int]:
        return [stop - start for start, stop in zip(self.query_start[:-1], self.query_start[1:], strict=True)]


@dataclass(frozen=True)
class RowBounds:
    """What the rows of a step must keep to."""

    vocab_size: int
    max_position: int
    num_blocks: int
    block_size: int


def pack(rows: Sequence[Row], bounds: RowBounds, device: torch.device) -> PackedStep:
    """Pack `rows`, in their order. Raises PlanError for a token, position or block that does not exist."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start, block_tables = [0], []
    size = bounds.block_size
    for row in rows:
        table = row.block_table[: -(-row.end // size)]
        _check(row, table, bounds)
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, row.end))
        slots.extend([table[p // size] * size + p % size for p in range(row.start, row.end)])
        query_start.append(len(token_ids))
        block_tables.append(table)
    return PackedStep(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        query_start=query_start,
        context_lens=[row.end for row in rows],
        block_tables=block_tables,
    )


def padded_tables(block_tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 [R, longest table], short ones filled with 0."""
    longest = max(map(len, block_tables))
    rows = [[*table, *[0] * (longest - len(table))] for table in block_tables]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _check(row: Row, table: Sequence[int], bounds: RowBounds) -> None:
    """An index outside a tensor is a crash on CUDA, and another sequence's K and V if the block is a wrong one."""

    def fail(what: str) -> PlanError:
        return PlanError(f"row of request {row.request_id!r}, positions {row.start} to {row.end - 1}: {what}")

    if not row.token_ids:
        raise fail("no tokens; a row computes at least one")
    if min(row.token_ids) < 0 or max(row.token_ids) >= bounds.vocab_size:
        wrong = next(token for token in row.token_ids if not 0 <= token < bounds.vocab_size)
        raise fail(f"token id {wrong} is outside the vocabulary of {bounds.vocab_size}; use the model's tokenizer")
    if row.start < 0 or row.end > bounds.max_position:
        raise fail(f"the model has positions 0 to {bounds.max_position - 1}; lower max_model_len or shorten the prompt")
    if len(table) * bounds.block_size < row.end:
        raise fail(
            f"the block table has {len(table)} blocks of {bounds.block_size} tokens, {row.end} tokens need "
            f"{-(-row.end // bounds.block_size)}; allocate before the row is scheduled"
        )
    if min(table) < 0 or max(table) >= bounds.num_blocks:
        wrong = next(block for block in table if not 0 <= block < bounds.num_blocks)
        raise fail(f"block {wrong} is outside the pool of {bounds.num_blocks}; give executor and pool one num_blocks")
