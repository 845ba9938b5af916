"""The forward pass: against a reference made elsewhere, against a plain rewrite, and independent of packing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_attention import DenseCache, greedy

from cbserve.models.llama import Linear, LlamaModel
from cbserve.models.tiny import TINY, tiny_weights
from cbserve.models.weights import load_model

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text(encoding="utf-8"))
PROMPTS = ["Hello", "a", "1 2 3 4", "The quick brown fox jumps over the lazy dog"]


@pytest.mark.model
@pytest.mark.slow
def test_all_reference_cases_of_transformers_are_reproduced(smollm2):
    """24 prompts: greedy ids identical, log-probabilities of the first step within 1e-3, ids from our own tokenizer."""
    cases = REFERENCE["cases"]
    assert len(cases) == 24
    prompts = [smollm2.tokenizer.encode(case["text"]) for case in cases]
    assert prompts == [case["prompt_token_ids"] for case in cases]
    tokens, logits = greedy(smollm2.model, prompts, REFERENCE["max_new_tokens"])
    for case, ids, rows in zip(cases, tokens, logits, strict=True):
        expected = case["output_token_ids"]
        assert ids[: len(expected)] == expected, case["prompt"]
        assert len(expected) == REFERENCE["max_new_tokens"] or expected[-1] in smollm2.config.eos_token_ids
        assert smollm2.tokenizer.decode(expected) == case["output_text"]
        first = rows[0].log_softmax(-1)[case["first_top5_ids"]].tolist()
        assert first == pytest.approx(case["first_top5_logprobs"], abs=1e-3)


@pytest.mark.model
def test_chat_prompts_of_the_reference(smollm2):
    chats = [case for case in REFERENCE["cases"] if case["kind"] == "chat"]
    assert chats
    for case in chats:
        messages = [{"role": "user", "content": case["prompt"]}]
        assert smollm2.tokenizer.apply_chat_template(messages) == case["prompt_token_ids"]


def test_forward_equals_a_plain_rewrite_in_the_checkpoints_order():
    """No fusing, no interleaving, cos and sin, float64: rotate_half as in the checkpoint's own convention."""
    weights = {name: tensor.double() for name, tensor in tiny_weights(3).items()}
    ids = torch.tensor([72, 101, 108, 108, 111, 32, 200, 3])
    positions = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12])  # not from 0: positions are an argument, not an index
    d, h, kv = TINY.head_dim, TINY.num_heads, TINY.num_kv_heads

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + TINY.rms_norm_eps).sqrt() * weights[name + ".weight"]

    def rope(x):
        angle = positions[:, None] * TINY.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * cos + half * sin

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(TINY.num_layers):
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm")
        q, k, v = (y @ weights[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = rope(q.view(-1, h, d)), rope(k.view(-1, kv, d)), v.view(-1, kv, d)
        k, v = (t.repeat_interleave(h // kv, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
        scores += torch.full_like(scores[0], -torch.inf).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ weights[p + "self_attn.o_proj.weight"].T
        y = norm(x, p + "post_attention_layernorm")
        gate, up = (y @ weights[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[p + "mlp.down_proj.weight"].T
    expected = norm(x, "model.norm") @ weights["lm_head.weight"].T

    model = LlamaModel(TINY, tiny_weights(3), "cpu", torch.float32)
    cache = DenseCache(model, 1)
    cache.lengths = [len(ids)]
    logits = model.forward(ids, positions, cache.attend, torch.arange(len(ids)))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_sequence_does_not_notice_what_is_packed_beside_it():
    config, model, tokenizer = load_model("tiny")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    together = greedy(model, prompts, 64)
    for prompt, tokens, logits in zip(prompts, *together, strict=True):
        (alone,), (alone_logits,) = greedy(model, [prompt], 64)
        assert alone == tokens
        torch.testing.assert_close(torch.stack(alone_logits), torch.stack(logits), rtol=1e-4, atol=1e-3)


def test_only_the_rows_asked_for_are_returned_and_none_is_allowed():
    config, model, _ = load_model("tiny")
    ids = torch.arange(6)

    def logits(rows):
        cache = DenseCache(model, 1)
        cache.lengths = [6]
        return model.forward(ids, ids, cache.attend, torch.tensor(rows, dtype=torch.int64))

    every = logits(range(6))
    torch.testing.assert_close(logits([4, 1]), every[[4, 1]], rtol=1e-4, atol=1e-4)
    assert logits([]).shape == (0, config.vocab_size)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tiny_is_not_degenerate(prompt):
    """At least 50 distinct tokens of 200, a clear winner at every step: a fault in the KV cache shows in the text."""
    _, model, tokenizer = load_model("tiny")
    (tokens,), (logits,) = greedy(model, [tokenizer.encode(prompt)], 200)
    best = torch.stack(logits).topk(2).values
    assert len(set(tokens)) >= 50
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
    assert tokenizer.decode(tokens).isascii() and len(tokenizer.decode(tokens)) == 200


def test_tiny_depends_on_early_tokens_long_after():
    _, model, tokenizer = load_model("tiny")
    prompts = [
        tokenizer.encode(first + " and then the very same words follow it to the end") for first in ("One", "Two")
    ]
    one, two = greedy(model, prompts, 64)[0]
    assert sum(a != b for a, b in zip(one, two, strict=True)) > 32


def test_a_seed_is_a_model():
    prompt = [[1, 2, 3]]
    first, again, other = (greedy(load_model("tiny", seed=seed).model, prompt, 16)[0] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33])
def test_a_packed_linear_layer_multiplies_and_keeps_one_copy(rows):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(300, 260, generator=generator), torch.randn(rows, 260, generator=generator)
    layer = Linear(weight)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    assert (layer._packed is None) != (layer._weight is None)


def test_without_onednn_the_result_is_the_same(monkeypatch):
    # Wide enough that its matrices are packed where that is possible.
    config = replace(TINY, hidden_size=256, intermediate_size=512, num_layers=1, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / 16 for name, shape in config.tensor_shapes().items()}
    packed = LlamaModel(config, weights, "cpu", torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = LlamaModel(config, weights, "cpu", torch.float32)
    assert plain.layers[0].gate_up._packed is None
    results = [greedy(model, [[5, 6, 7]], 8)[1][0] for model in (packed, plain)]
    torch.testing.assert_close(torch.stack(results[0]), torch.stack(results[1]), rtol=1e-4, atol=1e-4)
