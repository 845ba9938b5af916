"""The roofline: steps worked out by hand, published measurements, and the closed form against step by step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import Row, StepPlan
from cbserve.core.request import SamplingParams
from cbserve.hardware.gpus import GPUS
from cbserve.hardware.models import MODELS
from cbserve.hardware.roofline import Roofline

PARAMS = SamplingParams()
LLAMA = MODELS["Llama-3.1-8B"]


def row(start, count=1, num_samples=1, is_padding=False):
    return Row(
        seq_id=0, request_id="r", slot=0, start=start, token_ids=range(count), block_table=range(1), params=PARAMS,
        num_prompt_tokens=1, num_samples=num_samples, is_prefill=count > 1, is_padding=is_padding,
    )  # fmt: skip


def decodes(*contexts, copies=()):
    return StepPlan(0, [row(context - 1) for context in contexts], copies=list(copies))


def a100(**overrides):
    return Roofline.on("a100-80", LLAMA, **overrides)


# Llama-3-8B: 32 layers of hidden size 4096, 32 heads and 8 KV heads of 128, ffn 14336, vocabulary 128256.
Q_AND_O = 2 * 4096 * 4096  # 33,554,432
K_AND_V = 2 * 4096 * 1024  # 8,388,608
MLP = 3 * 4096 * 14336  # 176,160,768
LAYERS = 32 * (33_554_432 + 8_388_608 + 176_160_768)  # 6,979,321,856
HEAD = 128256 * 4096  # 525,336,576
KV_BYTES = 2 * 32 * 8 * 128 * 2  # 131,072 a token


def test_the_weights_by_hand():
    assert (Q_AND_O, K_AND_V, MLP) == (33_554_432, 8_388_608, 176_160_768)
    assert LAYERS == 6_979_321_856
    assert LAYERS + HEAD == 7_504_658_432 == LLAMA.matmul_params


def test_one_prefill_step_by_hand():
    """512 tokens, nothing cached, and the first token of the answer is sampled."""
    cost = a100().of(StepPlan(0, [row(0, 512)]))
    in_layers = 2 * 6_979_321_856 * 512  # 7,146,825,580,544
    pairs = 512 * 513 // 2  # 131,328 of a query and a key
    attention = 4 * 32 * 32 * 128 * 131_328  # 68,853,694,464
    logits = 2 * 525_336_576  # 1,050,673,152, of the last token alone
    assert (in_layers, pairs, attention, logits) == (7_146_825_580_544, 131_328, 68_853_694_464, 1_050_673_152)
    assert cost.flops == 7_146_825_580_544 + 68_853_694_464 + 1_050_673_152 == 7_216_729_948_160

    weights = 2 * 7_504_658_432  # 15,009,316,864
    read = 512 * KV_BYTES  # 67,108,864
    written = 512 * KV_BYTES  # 67,108,864
    assert (weights, read, written) == (15_009_316_864, 67_108_864, 67_108_864)
    assert cost.bytes == 15_009_316_864 + 67_108_864 + 67_108_864 == 15_143_534_592

    compute_s = 7_216_729_948_160 / (312e12 * 0.72)  # 32.1 ms
    memory_s = 15_143_534_592 / (2039e9 * 0.65)  # 11.4 ms
    assert (cost.compute_s, cost.memory_s) == pytest.approx((compute_s, memory_s), rel=1e-12)
    assert cost.seconds == pytest.approx(compute_s + 0.0005, rel=1e-12)
    assert cost.seconds == pytest.approx(0.0326, abs=5e-5)


def test_one_decode_step_by_hand():
    """Two sequences whose contexts are 1,000 and 24 tokens after the step."""
    cost = a100().of(decodes(1000, 24))
    in_layers = 2 * 6_979_321_856 * 2  # 27,917,287,424
    attention = 4 * 32 * 32 * 128 * (1000 + 24)  # 536,870,912
    logits = 2 * 525_336_576 * 2  # 2,101,346,304
    assert (in_layers, attention, logits) == (27_917_287_424, 536_870_912, 2_101_346_304)
    assert cost.flops == 27_917_287_424 + 536_870_912 + 2_101_346_304 == 30_555_504_640

    weights = 2 * 7_504_658_432  # 15,009,316,864
    read = (1000 + 24) * KV_BYTES  # 134,217,728
    written = 2 * KV_BYTES  # 262,144
    assert (weights, read, written) == (15_009_316_864, 134_217_728, 262_144)
    assert cost.bytes == 15_009_316_864 + 134_217_728 + 262_144 == 15_143_796_736

    memory_s = 15_143_796_736 / (2039e9 * 0.65)  # 11.4 ms
    assert cost.seconds == pytest.approx(memory_s + 0.0005, rel=1e-12)
    assert cost.seconds == pytest.approx(0.0119, abs=5e-5)


@pytest.mark.parametrize("plan", [StepPlan(0, [row(0, 512)]), decodes(1000, 24)], ids=["prefill", "decode"])
def test_the_call_gives_the_seconds(plan):
    cost = a100(overlap=0.3)
    parts = cost.of(plan)
    slow, fast = max(parts.compute_s, parts.memory_s), min(parts.compute_s, parts.memory_s)
    assert cost(plan) == parts.seconds == pytest.approx(slow + 0.7 * fast + 0.0005, rel=1e-12)
    assert parts.link_bytes == 0


@pytest.mark.parametrize(
    ("tokens", "milliseconds"), [(1024, 64.7), (2048, 125), (4096, 259), (8192, 557), (10_000, 708), (16_384, 1315)]
)
def test_prefill_times_as_measured(tokens, milliseconds):
    """NVIDIA aiconfigurator 0.12, measured kernels on an A100-80 SXM, vLLM 0.14."""
    assert 1e3 * a100()(StepPlan(0, [row(0, tokens)])) == pytest.approx(milliseconds, rel=0.07)


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 11.9), (8, 12.6), (32, 15.6), (64, 17.8), (128, 24.8)]
)  # at 256 (43.7 ms) the memory reaches 0.55 of its peak, and the model is 14 % too fast
def test_decode_times_as_measured(batch, milliseconds):
    """The same tables, contexts of 1,024 tokens."""
    assert 1e3 * a100()(decodes(*[1024] * batch)) == pytest.approx(milliseconds, rel=0.06)


def test_a_mixed_step_reads_the_weights_once():
    cost = a100()
    chunk, decode = StepPlan(0, [row(512, 256, num_samples=0)]), decodes(300)
    parts = [cost.of(plan) for plan in (chunk, decode)]
    both = cost.of(StepPlan(0, chunk.rows + decode.rows))
    assert both.flops == parts[0].flops + parts[1].flops
    assert both.bytes == parts[0].bytes + parts[1].bytes - 2 * LLAMA.matmul_params
    assert both.seconds < parts[0].seconds + parts[1].seconds - cost.overhead_s


def test_chunks_compute_what_the_whole_prompt_does_and_read_more():
    cost = a100()
    whole = cost.of(StepPlan(0, [row(0, 1024)]))
    chunks = [cost.of(StepPlan(0, [row(start, 256, num_samples=int(start == 768))])) for start in range(0, 1024, 256)]
    assert sum(chunk.flops for chunk in chunks) == whole.flops
    again = (256 + 512 + 768) * KV_BYTES + 3 * 2 * LLAMA.matmul_params
    assert sum(chunk.bytes for chunk in chunks) == whole.bytes + again


def test_n_samples_of_a_prompt_take_one_row_of_logits_and_no_sample_takes_none():
    flops = [a100().of(StepPlan(0, [row(0, 64, num_samples=n)])).flops for n in (0, 1, 4)]
    assert flops[1] == flops[2] == flops[0] + 2 * HEAD


def test_a_padding_row_costs_what_a_decode_does():
    cost = a100()
    assert cost.of(StepPlan(0, [row(99, num_samples=0, is_padding=True)])) == cost.of(decodes(100))


def test_grouped_queries_save_bytes_and_not_flops():
    multi_head = replace(LLAMA, num_kv_heads=32)
    few, many = (
        Roofline(model, flops=1e14, memory_bytes_s=1e12).of(decodes(*[5000] * 8)) for model in (LLAMA, multi_head)
    )
    kv = 8 * 5001
    weights = 2 * 32 * 2 * 4096 * 24 * 128  # of K and V for 24 heads more
    assert many.bytes - few.bytes == 3 * KV_BYTES * kv + weights
    assert many.flops - few.flops == 8 * weights


def test_dtypes_scale_bytes():
    plan = decodes(1000)
    two, one = a100().of(plan), a100(dtype_bytes=1).of(plan)
    mixed = a100(kv_dtype_bytes=1).of(plan)
    assert (one.bytes, one.flops) == (two.bytes / 2, two.flops)
    assert two.bytes - mixed.bytes == 1001 * KV_BYTES / 2


def test_copies_go_through_memory_twice_and_swaps_over_the_link_in_turn():
    cost = a100()
    plain, block = cost.of(decodes(100)), 16 * KV_BYTES
    copied = cost.of(decodes(100, copies=[(1, 2), (3, 4)]))
    assert copied.bytes == plain.bytes + 2 * 2 * block
    swapping = decodes(100)
    swapping.swap_outs, swapping.swap_ins = [(0, 0), (1, 1)], [(2, 2)]
    assert cost.of(swapping).link_bytes == 3 * block
    assert cost(swapping) == cost.of(swapping).seconds == pytest.approx(plain.seconds + 3 * block / 32e9, rel=1e-12)
    with pytest.raises(InvalidRequestError, match="host_link_bytes_s=None"):
        replace(cost, host_link_bytes_s=None)(swapping)


def test_a_step_without_rows_reads_no_weights():
    plan = StepPlan(0, swap_ins=[(0, 0)])
    assert a100().of(plan).bytes == 0
    assert a100()(plan) == pytest.approx(0.0005 + 16 * KV_BYTES / 32e9, rel=1e-12)


def test_critical_batch():
    plain = a100(eff_compute=1, eff_memory=1)
    assert plain.critical_batch() == pytest.approx(153, abs=0.1)  # F / BW
    assert a100().critical_batch() == pytest.approx(153.02 * 0.72 / 0.65, rel=1e-4)
    assert a100(eff_compute=1, eff_memory=1, dtype_bytes=1).critical_batch() == pytest.approx(76.5, abs=0.1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"flops": 0}, "flops=0"),
        ({"memory_bytes_s": -1.0}, "memory_bytes_s=-1.0"),
        ({"eff_compute": 0}, "eff_compute=0"),
        ({"eff_memory": 1.2}, "eff_memory=1.2"),
        ({"overlap": 1.1}, "overlap=1.1"),
        ({"overhead_s": -1}, "overhead_s=-1"),
        ({"overhead_s": float("nan")}, "overhead_s=nan"),
        ({"kv_dtype_bytes": 0}, "kv_dtype_bytes=0"),
        ({"host_link_bytes_s": 0}, "host_link_bytes_s=0"),
    ],
)
def test_values_out_of_range(wrong, words):
    with pytest.raises(InvalidRequestError, match=words):
        a100(**wrong)


rows_of_decodes = st.lists(st.tuples(st.integers(0, 100_000), st.booleans()), min_size=1, max_size=12)


def step_by_step(cost, contexts, count):
    for step in range(count):
        rows = [
            row(start if padding else start + step, num_samples=int(not padding), is_padding=padding)
            for start, padding in contexts
        ]
        yield cost(StepPlan(step, rows))


def ramp(cost, contexts, count):
    return cost.ramp(StepPlan(0, [row(x, num_samples=int(not p), is_padding=p) for x, p in contexts]), count)


@settings(max_examples=60, deadline=None)
@given(
    contexts=rows_of_decodes,
    count=st.integers(1, 60),
    overlap=st.sampled_from([0.0, 0.4, 1.0]),
    device=st.sampled_from(sorted(GPUS)),
    balance=st.floats(1e-3, 1.0),
)
def test_a_ramp_is_the_steps_one_by_one(contexts, count, overlap, device, balance):
    cost = Roofline.on(device, "smollm2-135m", overlap=overlap, eff_compute=balance)
    got = ramp(cost, contexts, count)
    assert got.count == count
    assert list(got.durations()) == pytest.approx(list(step_by_step(cost, contexts, count)), rel=1e-9)


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("turn", [1, 17, 39])
@pytest.mark.parametrize("kv_dtype_bytes", [1, 8], ids=["memory first", "compute first"])
def test_a_ramp_bends_where_the_longer_one_changes(turn, kv_dtype_bytes, overlap):
    """The device's FLOPs are chosen such that both times are equal just before step `turn`."""
    contexts = [(200, False), (900, False), (40, True)]
    base = Roofline(LLAMA, 1e14, 1e12, kv_dtype_bytes=kv_dtype_bytes, overlap=overlap)
    there = base.of(StepPlan(0, [row(x if p else x + turn, num_samples=int(not p), is_padding=p) for x, p in contexts]))
    before = base.of(
        StepPlan(0, [row(x if p else x + turn - 1, num_samples=int(not p), is_padding=p) for x, p in contexts])
    )
    halfway = (there.flops + before.flops) / (there.bytes + before.bytes)
    cost = replace(base, flops=halfway * 1e12)
    got = ramp(cost, contexts, 40)
    assert [count for count, _, _ in got.segments] == [turn, 40 - turn]
    assert list(got.durations()) == pytest.approx(list(step_by_step(cost, contexts, 40)), rel=1e-9)
    assert len(ramp(cost, contexts, turn).segments) == 1


def test_padding_rows_do_not_grow():
    got = ramp(a100(), [(100, True), (5000, True)], 5)
    assert len(set(got.durations())) == 1


@pytest.mark.parametrize(
    ("plan", "count", "words"),
    [
        (decodes(10), 0, "count=0"),
        (StepPlan(0, [row(0, 12)]), 3, "rows: 1, tokens: 12"),
        (StepPlan(0), 3, "rows: 0"),
        (decodes(10, copies=[(0, 1)]), 3, "copies: 1"),
    ],
)
def test_only_decodes_ramp(plan, count, words):
    with pytest.raises(InvalidRequestError, match=words):
        a100().ramp(plan, count)
