"""What the block pool costs: `python benchmarks/paging.py [--model NAME]`.

Allocate and free, prefix look-up, the memory of a large pool (pure Python), and what a shared system prompt saves on
the real engine against what the arithmetic promises.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from cbserve import LLM, BlockPool, KVCacheManager, Request, SamplingParams, sequence_metrics
from cbserve.core.request import Sequence


def median_s(run: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def pool_speed(num_blocks: int = 1_000_000, per_table: int = 8) -> None:
    """A million blocks taken and given back, as tables of `per_table` blocks."""
    pool = BlockPool(num_blocks)

    def run() -> None:
        tables = [pool.allocate(per_table) for _ in range(num_blocks // per_table)]
        for table in tables:
            pool.free(reversed(table))

    print(f"pool: {median_s(run, 3) / num_blocks * 1e6:.3f} us a block for allocate + free ({num_blocks:,} blocks)")


def lookup_speed() -> None:
    """A known prefix found in the index, hashes already made; linear in the blocks of the prompt."""
    for num_tokens in (1_000, 2_000, 4_000, 8_000):
        kv = KVCacheManager(BlockPool(1_000), enable_prefix_caching=True)
        request = Request("A", range(num_tokens), SamplingParams(max_tokens=1))
        seq, again = (Sequence(request, seq_id, 1) for seq_id in (0, 1))
        kv.allocate(seq, num_tokens)
        seq.num_computed_tokens = num_tokens
        hashing = median_s(lambda kv=kv, seq=seq: kv.step_done(seq), 1)
        kv.find_prefix(again)  # makes its hashes
        found = median_s(lambda kv=kv, again=again: kv.find_prefix(again), 51)
        print(
            f"look-up: {num_tokens:5,} tokens, {len(kv.find_prefix(again)):3} blocks: {found * 1e6:6.1f} us, "
            f"and {hashing * 1e6:7.1f} us to hash and publish them once"
        )


MEMORY = """
from cbserve.core.blocks import BlockPool

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

before = resident_mb()
pool = BlockPool(1_000_000)
blocks = pool.allocate(1_000_000)
for block in blocks:
    pool.publish(block, block.to_bytes(32, "little"))
pool.free(blocks)
print(resident_mb() - before)
"""


def pool_memory() -> None:
    """A process of its own, so that nothing else is counted."""
    out = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
    print(f"memory: a pool of 1,000,000 blocks takes {float(out):.0f} MB, all of them hashed")


def shared_prompt(model: str, num_requests: int = 32, shared: int = 1_000, own: int = 16) -> None:
    """Time to first token of requests that share a long prompt, one after the other, with and without the cache.

    The arithmetic: a request computes `shared + own` tokens, or what is left of them after the cached full blocks.
    """
    prompts = [[*range(100, 100 + shared), *(2_000 + 50 * i + j for j in range(own))] for i in range(num_requests)]
    params = SamplingParams(max_tokens=1, temperature=0)
    ttft, computed = {}, {}
    for caching in (False, True):
        llm = LLM(model, enable_prefix_caching=caching, num_blocks=1_024, max_num_seqs=1, verbose=False)
        llm.generate([prompts[0]], params, use_tqdm=False)  # warms up, and fills the cache
        times, tokens = [], 0
        for prompt in prompts[1:]:
            llm.generate([prompt], params, use_tqdm=False)
            times += [metrics.ttft_s for metrics in sequence_metrics(llm.trace)]
            tokens += sum(row.num_tokens for step in llm.trace.steps for row in step.rows)
        ttft[caching], computed[caching] = statistics.median(times), tokens / (num_requests - 1)
    saved, promised = 1 - ttft[True] / ttft[False], 1 - computed[True] / computed[False]
    print(
        f"shared prompt of {shared} tokens, {num_requests} requests: TTFT {ttft[False] * 1e3:.0f} ms without cache, "
        f"{ttft[True] * 1e3:.0f} ms with it: {saved:.1%} saved; {promised:.1%} of the tokens need not be computed "
        f"({saved / promised:.0%} of what the arithmetic promises)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    pool_speed()
    lookup_speed()
    pool_memory()
    shared_prompt(args.model)


if __name__ == "__main__":
    main()
