"""The public traces themselves: their published statistics, and Mooncake's prefixes through the engine's own index.

The files are not in the repository (Azure: CC-BY-4.0, Mooncake: Apache-2.0). They are looked for in the folder that the
environment variable CBSERVE_TRACES names, or in ../shared/data/traces beside the repository.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from statistics import mean

import pytest

from cbserve.core.blocks import BlockPool
from cbserve.core.bounds import static_utilisation
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.request import Request, Sequence
from cbserve.workloads.measured import read_requests
from cbserve.workloads.readers import BLOCK_TOKENS, read_trace
from cbserve.workloads.workload import Workload

FOLDER = Path(
    os.environ.get("CBSERVE_TRACES") or Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
)


def trace(name: str) -> Workload:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {FOLDER}; set CBSERVE_TRACES to the folder that holds it")
    return read_trace(path)


@pytest.fixture(scope="module")
def synthetic() -> Workload:
    return trace("mooncake_synthetic_trace.jsonl.gz")


def test_azure_conv_has_its_published_statistics() -> None:
    rows = trace("AzureLLMInferenceTrace_conv.csv.gz").summary()
    expected = {
        "requests": 19_366, "duration_s": 3501.7, "rate_per_s": 5.530, "gap_cv": 1.094,
        "prompt_mean": 1154.7, "prompt_p50": 1020, "prompt_p90": 2734.5, "prompt_p99": 4142, "prompt_max": 14_050,
        "output_mean": 211.1, "output_p50": 129, "output_p90": 424, "output_p99": 601, "output_max": 1000,
    }  # fmt: skip
    assert {name: rows[name] for name in expected} == pytest.approx(expected, rel=5e-4)


def test_the_shares_that_chapter_1_quotes_are_those_of_the_trace() -> None:
    """Static batches of 8 to 64 in the trace's own order, and shuffled; the notebook has no trace to count them in."""
    lengths = list(trace("AzureLLMInferenceTrace_conv.csv.gz").answer_lengths.values())
    rng = random.Random(0)
    orders = [rng.sample(lengths, len(lengths)) for _ in range(20)]
    for b, in_order, shuffled in ((8, 48.3, 46.3), (16, 42.8, 41.6), (32, 38.4, 37.5), (64, 34.4, 33.6)):
        assert 100 * static_utilisation(lengths, b) == pytest.approx(in_order, abs=0.05)
        assert 100 * mean(static_utilisation(order, b) for order in orders) == pytest.approx(shuffled, abs=0.1)


def test_mooncake_synthetic_has_its_published_statistics(synthetic: Workload) -> None:
    rows = synthetic.summary()
    expected = {
        "requests": 3993, "duration_s": 1022.0, "rate_per_s": 3.906, "gap_cv": 1.011,
        "prompt_mean": 15_325, "prompt_p50": 11_587, "prompt_p90": 38_611, "prompt_p99": 66_456, "prompt_max": 191_378,
        "output_mean": 149.1, "output_p50": 69, "output_p90": 389, "output_p99": 768, "output_max": 893,
    }  # fmt: skip
    assert {name: rows[name] for name in expected} == pytest.approx(expected, rel=5e-4)
    assert synthetic.note == ""  # these arrivals are not rounded, so nobody moved them


@pytest.mark.slow
def test_mooncake_prefix_hits_through_the_engines_own_index(synthetic: Workload) -> None:
    """77,740 of the 117,888 *full* blocks of 512 tokens are found in a cache that never forgets.

    The engine caches full blocks only; with the partial last blocks, which Mooncake hashes too, see below. It also
    computes at least one token of every prompt, so that a prompt of whole blocks, all known, would lose its last one;
    four prompts of the trace are of whole blocks, and none of them is all known: the rule costs nothing here.
    """
    num_full = sum(len(job.prompt) // BLOCK_TOKENS for job in synthetic.jobs)
    kv = KVCacheManager(BlockPool(num_full, BLOCK_TOKENS), enable_prefix_caching=True)
    found, whole, whole_and_known = 0, 0, 0
    for seq_id, request in enumerate(synthetic.requests(max_tokens=1)):
        seq = Sequence(request, seq_id, max_tokens=1)
        full = seq.num_prompt_tokens // BLOCK_TOKENS
        num_cached_tokens = kv.admit(seq)[1]
        kv.allocate(seq, full * BLOCK_TOKENS)
        seq.num_computed_tokens = full * BLOCK_TOKENS  # the prefill, without the partial last block
        newly_findable = kv.step_done(seq)
        kv.free(seq)
        found += num_cached_tokens // BLOCK_TOKENS
        if seq.num_prompt_tokens % BLOCK_TOKENS == 0:
            whole += 1
            whole_and_known += not newly_findable
    assert not kv.pool.take_evicted()
    assert (found, num_full) == (77_740, 117_888)
    assert (whole, whole_and_known) == (4, 0)


def test_mooncake_prefix_hits_with_partial_last_blocks(synthetic: Workload) -> None:
    """77,953 of 121,877 as Mooncake counts: the first token of a block tells its hash, be it full or not."""
    seen: set[int] = set()
    found, blocks = 0, 0
    for job in synthetic.jobs:
        hashes = [job.prompt[at] for at in range(0, len(job.prompt), BLOCK_TOKENS)]
        found += sum(content in seen for content in hashes)
        blocks += len(hashes)
        seen.update(hashes)
    assert (found, blocks) == (77_953, 121_877)


def test_a_known_prompt_of_whole_blocks_loses_its_last_one() -> None:
    """The rule that costs nothing on the trace, where it does cost: 3 blocks are known, 2 are used."""
    kv = KVCacheManager(BlockPool(9, BLOCK_TOKENS), enable_prefix_caching=True)
    for seq_id, cached in ((0, 0), (1, 2 * BLOCK_TOKENS)):
        seq = Sequence(Request(str(seq_id), range(3 * BLOCK_TOKENS)), seq_id, max_tokens=1)
        assert kv.admit(seq)[1] == cached
        kv.allocate(seq, 3 * BLOCK_TOKENS)
        seq.num_computed_tokens = 3 * BLOCK_TOKENS
        kv.step_done(seq)
        kv.free(seq)


def test_the_measured_run_of_vllm() -> None:
    path = FOLDER.parent / "measured" / "llmservingsim_RTX4090_Llama-3.1-8B.requests.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {path.parent}; CBSERVE_TRACES may name the folder traces beside it")
    sent, queued = (read_requests(path, clock) for clock in ("arrival_time", "queued_ts"))
    assert len(sent.workload) == len(queued.workload) == 300
    assert sent.makespan_s == pytest.approx(183.57, abs=0.01) == queued.makespan_s
    assert mean(sent.ttft_s) == pytest.approx(65.486, abs=0.001)
    assert mean(queued.ttft_s) == pytest.approx(65.457, abs=0.001)
    assert sent.tpot_s == pytest.approx(queued.tpot_s)
    # How much later a request was queued than sent, beyond the quickest one: up to a step or two of the engine.
    assert min(sent.lag_s) == 0.0
    assert mean(sent.lag_s) == pytest.approx(0.0298, abs=0.0001)
    assert max(sent.lag_s) == pytest.approx(0.2007, abs=0.0001)
