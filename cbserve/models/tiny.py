"""`tiny`: a random four-layer model built in code, for tests and cells that should answer at once."""

from __future__ import annotations

import torch
from torch import Tensor

from cbserve.models.config import ModelConfig

TINY = ModelConfig(
    name="tiny",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=320,
    max_position=4096,
    bos_token_id=256,
    eos_token_ids=(257,),
)


def tiny_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights, wide enough that what is generated depends on everything before it.

    Small weights would let a token's own embedding decide, and greedy text would be one token for ever, which hides
    every fault of a KV cache. Here each branch adds about as much as the residual stream carries, and attention picks
    its tokens. Greedy text is printable ASCII: the rows of all other tokens, end of text included, have logits of zero.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in TINY.tensor_shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.float32)
            continue
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.5
        fan_in = 1 if "embed" in name else shape[1]
        # Whatever torch's default dtype is: in another one the generator gives other numbers.
        weights[name] = torch.randn(shape, generator=generator, dtype=torch.float32) * (gain / fan_in**0.5)
    printable = torch.zeros(TINY.vocab_size, dtype=torch.bool)
    printable[0x20:0x7F] = True
    weights["lm_head.weight"] *= 6.0 * printable.unsqueeze(1)
    return weights
