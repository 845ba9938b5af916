"""The statements of the lecture that can be tested, chapter by chapter, and the band that counts as holding."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One statement. `measure` names its evidence; the claim holds where `low` <= measure <= `high`.

    unit: "share" (0 to 1, shown in percent), "times" (a ratio) or the noun that is counted.
    """

    id: str
    chapter: int
    text: str
    measure: str
    unit: str
    low: float
    high: float
    test: str
    condition: str
    source: str

    def written(self, value: float) -> str:
        """A value with its unit."""
        if self.unit == "share":
            return f"{100 * value:.1f} %"
        if self.unit == "times":
            return f"{value:.2f}x"
        return f"{value:,.0f} {self.unit}"

    def band(self) -> str:
        """The band in words."""
        factor, unit = {"share": (100, " %"), "times": (1, "x")}.get(self.unit, (1, f" {self.unit}"))
        unit = "" if unit == f" {self.measure}" else unit  # "requests of 201", not "requests of 201 requests"
        low, high = f"{factor * self.low:g}{unit}", f"{factor * self.high:g}{unit}"
        if self.high == math.inf:
            return f"of at least {low}"
        return f"of {low}" if low == high else f"from {low} to {high}"


CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(
            id="static-40.7",
            chapter=1,
            text="Answers of 10, 100 and 500 tokens in one static batch use 40.7 % of the slots.",
            measure="utilisation",
            unit="share",
            low=0.4065,  # what rounds to 40.7 %
            high=0.4075,
            test="serve the three as one static batch; useful tokens over slots times steps, from the trace",
            condition="slot utilisation is meant, not how busy the GPU is",
            source="lecture, Static Batching",
        ),
        Claim(
            id="static-20-40",
            chapter=1,
            text="With heavy-tailed answer lengths, static batching often uses 20 to 40 % of the slots.",
            measure="utilisation",
            unit="share",
            low=0.20,
            high=0.40,
            test="draw lengths, serve them in static batches of several sizes, pool useful tokens over slot-steps",
            condition="the batch size and the lengths: exponential lengths give 1/H_B, equal lengths give 100 %",
            source="lecture, Static Batching; Azure LLM inference traces 2023 (Patel et al. 2024, Splitwise)",
        ),
        Claim(
            id="waste-40-80",
            chapter=1,
            text="Static batching wastes 40 to 80 % of the compute, because answers differ in length.",
            measure="waste",
            unit="share",
            low=0.40,
            high=0.80,
            test="padded slot-steps over all slot-steps of the same runs",
            condition="the batch size and the lengths; slots are counted, and a padded row costs less than it counts",
            source="lecture, Summary",
        ),
        Claim(
            id="utilisation-100",
            chapter=2,
            text="Continuous batching uses nearly 100 % of the slots while requests are waiting.",
            measure="utilisation",
            unit="share",
            low=0.95,  # "approaches 100 %": at most one slot in twenty idle
            high=1.0,
            test="serve a queue that never runs empty, and one that does; useful rows over slots times steps",
            condition="a queue that is never empty, and blocks for every slot; the drain at the end counts too",
            source="lecture, Continuous Batching and Summary; Yu et al. 2022 (Orca), section 3.1",
        ),
        Claim(
            id="speedup-2-3x",
            chapter=2,
            text="Continuous batching serves 2 to 3 times as many tokens per second as static batching.",
            measure="speedup",
            unit="times",
            low=1.95,  # what rounds to 2.0x and 3.0x
            high=3.05,
            test="the same requests served both ways; tokens per second of one over the other",
            condition="the batch caps, how lengths differ, the share of prefill, and what a larger batch costs a step",
            source="lecture, Continuous Batching; bound: 1 / (utilisation of the static batches) at equal caps",
        ),
        Claim(
            id="kv-admission",
            chapter=2,
            text="KV-cache memory is the key constraint on admission.",
            measure="blocks_share",
            unit="share",
            low=0.5,  # more often blocks than slots or tokens
            high=1.0,
            test="of the steps in which a request had to wait, the share whose reason was missing blocks",
            condition="the pool against max_num_seqs: with blocks for every slot, the slots bind first",
            source="lecture, Iteration-Level Scheduling",
        ),
        Claim(
            id="pitfall-1",
            chapter=2,
            text="Admitting too many requests runs the GPU out of KV memory when they all generate long answers.",
            measure="preemptions",
            unit="in the run",
            low=1,  # this engine preempts where a naive one would run out of memory
            high=math.inf,
            test="admit by the memory of this step alone, then by the most that each can need; count preemptions",
            condition="answers long against the pool, and an admission that reserves nothing",
            source="lecture, Common Pitfalls, 1",
        ),
        Claim(
            id="max-concurrency",
            chapter=2,
            text="80 GB, weights of 14 GB, 160 KB a token and contexts of 2,048 tokens give 201 concurrent requests.",
            measure="requests",
            unit="requests",
            low=201,
            high=201,
            test="floor((memory - weights) / (bytes a token x tokens)), once for each reading of GB and KB",
            condition="decimal or binary units, the share of memory in use, and every context being 2,048 long",
            source="lecture, Exercise 2; 201 is its value in decimal units",
        ),
        Claim(
            id="no-fragmentation",
            chapter=3,
            text="Paging eliminates internal fragmentation, since nothing is allocated up to the maximum length.",
            measure="waste",
            unit="share",
            low=0.0,
            high=0.04,  # what the authors report for "eliminates"
            test="places in held pages without a token, over all places in held pages, over the life of each request",
            condition="length against page size: on average half a page is empty, which is a lot of a short request",
            source="lecture, PagedAttention and Summary; below 4 %: vLLM blog, June 2023",
        ),
        Claim(
            id="demand-paging",
            chapter=3,
            text="Demand paging: pages are allocated only when tokens are generated.",
            measure="early",
            unit="pages",
            low=0,
            high=0,
            test="pages held minus pages that the counted tokens fill, the most in any step of a run on the engine",
            condition="which tokens count: a prompt takes its pages before anything is generated, a chunk all its own",
            source="lecture, PagedAttention; Kwon et al. 2023, section 4.3",
        ),
        Claim(
            id="allocate-o1",
            chapter=3,
            text="Allocating a page from the free list is O(1).",
            measure="slowdown",
            unit="times",
            low=0.0,
            high=3.0,  # caches of the CPU may triple it; a search through the pool would cost a hundred times as much
            test="time to allocate and free a page in a pool 100 times as large, over the time in the small pool",
            condition="a free list with counts; finding a known prefix costs more, in proportion to the prompt",
            source="lecture, PagedAttention, Implementation",
        ),
        Claim(
            id="page-bytes",
            chapter=3,
            text="A page takes 2 x L x H x d_k x P x 2 bytes in FP16.",
            measure="ratio",
            unit="times",
            low=0.999,
            high=1.001,
            test="the formula with all query heads, over 2 bytes for each K and V value that the model stores",
            condition="multi-head attention and 2-byte values: with grouped queries H is the number of KV heads",
            source="lecture, PagedAttention, Implementation; shapes from each model's config.json",
        ),
        Claim(
            id="page-size-16",
            chapter=3,
            text="A page holds typically 16 tokens.",
            measure="cost",
            unit="times",
            low=0.0,
            high=1.10,  # within a tenth of the best size
            test="memory held and attention time with pages of 16, over the best of the page sizes that were swept",
            condition="lengths and kernel: long contexts allow larger pages, transfers to the host want them",
            source="lecture, PagedAttention, Implementation; vLLM's default on CUDA is 16; Kwon et al. 2023, figure 18",
        ),
        Claim(
            id="supports-swap",
            chapter=3,
            text="Paging supports preemption: pages are swapped to CPU memory and back.",
            measure="restored",
            unit="pages",
            low=1,
            high=math.inf,
            test="pages copied back from the host in a run with too small a pool whose answers stay what they were",
            condition="an engine that swaps, and room on the host; otherwise the tokens are computed again",
            source="lecture, PagedAttention and Scheduling Policies; Kwon et al. 2023, section 4.5",
        ),
        Claim(
            id="super-linear",
            chapter=3,
            text="With a shared system prompt, prefix caching and continuous batching scale throughput super-linearly.",
            measure="scaling",
            unit="times",
            low=1.05,  # more than n times the throughput from n times the resource, beyond rounding
            high=math.inf,
            test="throughput with n times the slots or replicas, over n times the throughput with one",
            condition="replicas whose caches are too small alone, and a router that keeps equal prefixes together",
            source="lecture, Exercise 5",
        ),
    )
}
