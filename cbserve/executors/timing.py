"""A row whose time is measured, while nobody looks at its token."""

from __future__ import annotations

from collections.abc import Sequence

from cbserve.core.plan import Row
from cbserve.core.request import SamplingParams

_GREEDY = SamplingParams(temperature=0)


def timing_row(start: int, num_tokens: int, block_table: Sequence[int], num_samples: int = 1) -> Row:
    """Compute `num_tokens` after `start` cached ones, whatever those are; one token is a decode, more are a prefill.

    Rows of a plan may share blocks, since only time matters.
    """
    return Row(
        seq_id=-1, request_id="timing", slot=0, start=start, token_ids=[7] * num_tokens, block_table=block_table,
        params=_GREEDY, num_prompt_tokens=start + num_tokens, num_samples=num_samples, is_prefill=num_tokens > 1,
    )  # fmt: skip
