"""Greedy generation with plain attention over whole K and V tensors: the model without any engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cbserve.models.llama import LlamaModel


class DenseCache:
    """K and V of some sequences whose tokens are packed into one forward pass, kept as one tensor a sequence."""

    def __init__(self, model: LlamaModel, num_sequences: int) -> None:
        config = model.config
        empty = torch.empty(0, config.num_kv_heads, config.head_dim)
        self.k = [[empty] * num_sequences for _ in range(config.num_layers)]
        self.v = [[empty] * num_sequences for _ in range(config.num_layers)]
        self.lengths: list[int] = []  # tokens of each sequence in this pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        outputs = []
        for index, (qs, ks, vs) in enumerate(zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)):
            keys = self.k[layer][index] = torch.cat([self.k[layer][index], ks])
            values = self.v[layer][index] = torch.cat([self.v[layer][index], vs])
            new, total = len(qs), len(keys)
            causal = torch.ones(new, total, dtype=torch.bool).tril(total - new) if new > 1 else None
            heads = [x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values)]
            outputs.append(F.scaled_dot_product_attention(qs.transpose(0, 1), *heads, attn_mask=causal).transpose(0, 1))
        return torch.cat(outputs)


def greedy(model: LlamaModel, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Greedy tokens after each prompt, EOS ignored, all prompts packed; and the logits [vocab] of every step."""
    cache = DenseCache(model, len(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(max_tokens):
        new = [sequence[-1:] if step else prompt for prompt, sequence in zip(prompts, tokens, strict=True)]
        starts = [len(prompt) + step - 1 if step else 0 for prompt in prompts]
        cache.lengths = [len(ids) for ids in new]
        positions = [start + i for start, ids in zip(starts, new, strict=True) for i in range(len(ids))]
        out = model.forward(
            torch.tensor([id for ids in new for id in ids]),
            torch.tensor(positions),
            cache.attend,
            torch.tensor(cache.lengths).cumsum(0) - 1,
        )
        for sequence, kept, row in zip(tokens, logits, out, strict=True):
            sequence.append(int(row.argmax()))
            kept.append(row)
    return tokens, logits
