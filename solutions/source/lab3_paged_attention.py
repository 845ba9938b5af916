# %% [markdown]
# # Lab 3: write the pool and the attention that reads it
#
# {{badges}}
#
# A customer reads the end of somebody else's sentence in her answer. The model did nothing wrong. A page of KV cache
# was given back while she still held it, the next request wrote over it, and attention read what it found.
#
# Here you write the pool that knows who holds which page, and the attention that finds each token's page. The engine
# that runs them serves a real model, and its text must not change by a letter.
#
# **Afterwards you can** keep reference counts that neither leak nor free twice, write paged attention in torch and as
# a kernel, and say what a preemption and a shared prefix are worth.
#
# Replace each `...`, run the cell, then the check below it. `hint("lab3.ex1")` gives three hints, one a call.
# Everything runs on a CPU. You need chapter 3, lab 2, and about 105 minutes.
#
# **Where to work.** In your own copy, which `make lab` has put into the folder `work/`:
# [open it](../work/lab3_paged_attention.ipynb). If the path of this notebook begins with `labs/`, you are in the
# original, and what you write changes the course. (Colab and Binder have no such folder; there you use the original.)

# %%
# {{colab}}

# %% tags=["parameters"]
device = "cpu"  # "cuda" compiles your kernel; on a CPU Triton's interpreter runs it
seed = 0
size = "small"  # "large" serves SmolLM2-135M on your pool and your attention, instead of a tiny random model

# %%
import os

if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import math
import statistics
import time

import torch
from IPython.display import display

from cbserve import LLM, SamplingParams, check, claim, hint, ledger, solved
from cbserve.core.errors import ConservationError, NoFreeBlocksError
from cbserve.course import progress
from cbserve.course.exercises.paging import as_attention, block_by_block, triton_language, why_no_triton
from cbserve.course.exercises.pools import CountedPool
from cbserve.kernels.jit import Kernel
from cbserve.viz import bars, lines, table
from cbserve.viz.page_map import page_map

tl = triton_language()
model = "tiny" if size == "small" else "smollm2-135m"


def later(*ids):
    print(f"This cell runs your own code: solve {' and '.join(ids)} first, then run it again.")


# %% [markdown]
# ## Who holds which page
#
# The KV cache is cut into *blocks* of equal size, the pages of the lecture. A request's *block table* lists its blocks
# in order. Requests that sample several answers to one prompt share the prompt's blocks, so a block can have several
# holders. Here are three answers to one prompt in a pool of 20 blocks, in mid-answer.

# %%
how = {"device": device, "block_size": 16, "num_blocks": 20, "max_num_seqs": 3, "verbose": False}
prompt = "A page is a promise: whoever holds it finds what was written there."
three = SamplingParams(max_tokens=40, n=3, seed=7, ignore_eos=True)

llm = LLM(model, **how)
engines_text = [answer.text for answer in llm.generate([prompt], three, use_tqdm=False)[0].outputs]
page_map(llm.trace, step=30)

# %% [markdown]
# {{card lab3.ex1}}
#
# `CountedPool` has made two lists, and you keep them true: `self.free_blocks`, ids of free blocks, and
# `self.ref_counts[block]`, how many tables hold it.
#
# | you write | it does | it raises |
# |---|---|---|
# | `allocate(count)` | takes free blocks, one holder each; returns their ids | `NoFreeBlocksError` if too few |
# | `share(block_ids)` | one more holder for each | `ConservationError` if nobody holds one |
# | `free(block_ids)` | one holder fewer; without a holder it is free | `ConservationError` if nobody holds one |
#
# An `allocate` that raises has changed *nothing*.
# The engine hands `free` an iterator: go through it once.
#
# **Worked example.** 4 blocks. A allocates 2 and gets 3 and 2. B shares them: counts 2 and 2. A frees: counts 1 and 1,
# and still only 0 and 1 are free. B frees: all four are. Freeing block 3 again is an error.


# %% tags=["exercise"]
# exercise: lab3.ex1
class MyPool(CountedPool):
    def allocate(self, count=1):
        """Take `count` free blocks; returns their ids."""
        # BEGIN SOLUTION
        # STUB: ...
        if count > len(self.free_blocks):
            raise NoFreeBlocksError(f"{count} blocks wanted, {len(self.free_blocks)} are free")
        blocks = [self.free_blocks.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks
        # END SOLUTION

    def share(self, block_ids):
        """One more holder for each block."""
        # BEGIN SOLUTION
        # STUB: ...
        for block in block_ids:
            if self.ref_counts[block] == 0:
                raise ConservationError(f"nobody holds block {block}")
            self.ref_counts[block] += 1
        # END SOLUTION

    def free(self, block_ids):
        """One holder fewer for each block; without a holder it is free."""
        # BEGIN SOLUTION
        # STUB: ...
        for block in block_ids:
            if self.ref_counts[block] == 0:
                raise ConservationError(f"nobody holds block {block}")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)
        # END SOLUTION


# %%
check("lab3.ex1", MyPool, seed=seed)

# %% [markdown]
# Now the engine serves the same prompt on your pool. *Measured here:* its text, letter by letter.

# %%
if solved("lab3.ex1"):
    llm = LLM(model, block_pool=MyPool, debug=True, **how)
    yours = [answer.text for answer in llm.generate([prompt], three, use_tqdm=False)[0].outputs]
    pool = llm.scheduler.kv.pool
    same = sum(a == b for a, b in zip(yours, engines_text, strict=True))
    print(f"{same} of 3 answers are the engine's own, letter by letter")
    print(f"blocks still held at the end: {pool.num_used} of {pool.num_blocks}")
    display(page_map(llm.trace, step=30))
else:
    later("lab3.ex1")

# %% [markdown]
# **Predict, then run.** A careless pool does not count the second and third holder. Nothing crashes. What becomes of
# the three answers?
#
# | your guess | why someone would say that |
# |---|---|
# | nothing, until the pool is full | the blocks are all there; but who copies a page before writing into it? |
# | they differ from the first token on | the prompt's pages are right; they are spoiled by what is written later |
# | they go wrong where one writes into a page that another reads | a count of 1 says: nobody else is here |


# %%
def same_letters(one, other):
    """How many letters agree before the first that does not."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


if solved("lab3.ex1"):

    class Careless(MyPool):
        def share(self, block_ids):
            """Counts nobody."""

        def free(self, block_ids):
            super().free(block for block in block_ids if self.ref_counts[block])

    llm = LLM(model, block_pool=Careless, **how)
    spoiled = [answer.text for answer in llm.generate([prompt], three, use_tqdm=False)[0].outputs]
    rows = [
        [f"answer {i + 1}", f"{same_letters(a, b)} of {len(b)} letters", a[:32]]
        for i, (a, b) in enumerate(zip(spoiled, engines_text, strict=True))
    ]
    display(table(["careless pool", "right until", "begins with"], rows))
else:
    later("lab3.ex1")

# %% [markdown]
# A count of 1 says *nobody else is here*, so nobody copied, and one wrote over what another reads. That is why the
# engine can check *conservation* after every step (`debug=True`): each count is the number of tables that hold the
# block, and blocks without a holder are free. One limit: your pool forgets what a freed block held. The engine's
# own keeps a hash of full blocks and finds them again: a prefix cache.
#
# ## Finding a token
#
# {{card lab3.ex2}}
#
# `slot_of(position, block_table, block_size)` returns the pair (block, place in the block) of a token's K and V.
# Positions and places count from 0. (Engines call a place in the pool a *slot* too. It is not the slot of chapter 1.)
#
# **Worked example.** `slot_of(5, [7, 2, 9], 4)` is `(2, 1)`: positions 4 to 7 lie in block 2, and 5 is the second.


# %% tags=["exercise"]
# exercise: lab3.ex2
def slot_of(position, block_table, block_size):
    """(block, place in the block) of a position."""
    # BEGIN SOLUTION
    # STUB: ...
    return block_table[position // block_size], position % block_size
    # END SOLUTION


# %%
check("lab3.ex2", slot_of, seed=seed)

# %% [markdown]
# A block's id says nothing about its position: it is a name. Here is the table of a request in mid-answer, on a pool
# that others have used before. Your function finds its tokens.

# %%
if solved("lab3.ex1") and solved("lab3.ex2"):
    llm = LLM(model, block_pool=MyPool, **{**how, "block_size": 8, "num_blocks": 60})
    llm.generate(["a short one", "another", "and a third"], SamplingParams(max_tokens=9, seed=1), use_tqdm=False)
    asked = "Where do my tokens lie, and who else has been here before me?"
    stream = llm.stream(asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    for _ in range(6):
        next(stream)
    block_table = list(next(iter(llm.scheduler.kv.tables.values())))
    stream.close()
    end = 8 * len(block_table) - 1
    rows = [[p, *slot_of(p, block_table, 8)] for p in (0, 7, 8, end - 8, end - 7, end)]
    print(f"block table {block_table}")
    display(table(["position", "block", "place"], rows))
else:
    later("lab3.ex1", "lab3.ex2")

# %% [markdown]
# ## Attention over pages
#
# One new token asks all tokens before it: scores q . k, softmax, the mean of V by it. K and V lie in pages.
#
# {{card lab3.ex3}}
#
# `paged_decode(...)` returns [heads, head_dim], for one sequence.
#
# | argument | shape | what it is |
# |---|---|---|
# | `q` | [heads, head_dim] | the query of the newest token |
# | `k_cache`, `v_cache` | [num_blocks, block_size, kv_heads, head_dim] | the whole pool, of one layer |
# | `block_table` | int64 [blocks] | this sequence's blocks, in order |
# | `context_len` | int | its tokens in the cache, the newest included |
# | `scale` | float | what q . k is multiplied by, usually head_dim ** -0.5; take what is given |
#
# *Grouped-query attention*: `heads // kv_heads` neighbouring query heads share a KV head. What lies behind
# `context_len` in the last block is somebody else's, and may be NaN.
#
# **Worked example.** 4 query heads on 2 KV heads: heads 0 and 1 read KV head 0. Context 10 in blocks of 4: two places
# of the third block.


# %% tags=["exercise"]
# exercise: lab3.ex3
def paged_decode(q, k_cache, v_cache, block_table, context_len, scale):
    """Attention of one query over the pages of its sequence."""
    # BEGIN SOLUTION
    # STUB: ...
    group = q.shape[0] // k_cache.shape[2]
    k, v = (
        cache[block_table].flatten(0, 1)[:context_len].repeat_interleave(group, dim=1) for cache in (k_cache, v_cache)
    )
    weights = (torch.einsum("hd,thd->ht", q, k) * scale).softmax(dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)
    # END SOLUTION


# %%
check("lab3.ex3", paged_decode, seed=seed)

# %% [markdown]
# The engine takes it as `attention=`. A prompt's tokens go through it too: each is a query whose context ends with
# itself. **Predict, then run.** The text will be the same. How much slower will it come?

# %%
questions = ["A page table maps", "Nobody reads a page that"]
greedy = SamplingParams(max_tokens=24 if size == "small" else 6, temperature=0, ignore_eos=True)


if solved("lab3.ex3"):
    ways = {"the engine's attention": None, "your paged_decode": as_attention(paged_decode)}
    engines = {name: LLM(model, device=device, verbose=False, attention=op) for name, op in ways.items()}
    texts, speeds = {}, {name: [] for name in ways}
    for _ in range(4):  # in turn, since other work on this machine slows both; the first warms up
        for name, llm in engines.items():
            start = time.perf_counter()
            outputs = llm.generate(questions, greedy, use_tqdm=False)
            speeds[name].append(len(questions) * greedy.max_tokens / (time.perf_counter() - start))
            texts[name] = [output.outputs[0].text for output in outputs]
    medians = {name: statistics.median(found[1:]) for name, found in speeds.items()}
    fast, slow = medians.values()
    same = "the same text" if len({tuple(text) for text in texts.values()}) == 1 else "another text"
    display(
        bars(
            list(medians),
            list(medians.values()),
            unit="tokens/s",
            title=f"Your attention gives {same} and takes {fast / slow:.1f} times as long",
            caption=f"Measured here: {model} on {device}, two answers of {greedy.max_tokens} tokens; medians of 3.",
        )
    )
else:
    later("lab3.ex3")

# %% [markdown]
# Yours gathers K and V into a copy, once for each query and layer. A kernel reads each page where it lies.
#
# ## One block at a time
#
# A kernel sees one block, adds it up, forgets it. But softmax needs the largest score of *all* positions before the
# first exponential is safe. An *online softmax* takes the largest so far, and corrects when a larger one comes.
#
# Scores 2 and 3 are in the first block, 5 in the second. **Predict, then run:** by what factor does the first sum
# shrink?

# %%
first = math.exp(2 - 3) + math.exp(3 - 3)  # the best so far is 3
shrink = math.exp(3 - 5)  # each term was divided by exp(3) and should have been by exp(5)
online, at_once = first * shrink + math.exp(5 - 5), sum(math.exp(score - 5) for score in (2, 3, 5))
print(f"first block {first:.3f}, shrunk by {shrink:.3f}, with the second {online:.3f}; all at once {at_once:.3f}")

# %% [markdown]
# The sum of V, each row times its exponential, shrinks by the same factor. At the end one is divided by the other.
#
# {{card lab3.ex4}}
#
# Write **one** of the two below; either earns all points.
#
# - **`decode_kernel`**, in Triton: program `kv_head` computes the `GROUP` query heads that share this KV head. For each
#   block: its id, K and V *with a mask*, scores, rescale, add; at the end divide and store.
# - **`absorb(state, q, k, v, seen, scale)`**, in torch, if you have no Triton: one block of one KV head. `state` is
#   (best [group], total [group], values [group, head_dim]), at first -inf, 0, 0; `q` is [group, head_dim], `k` and `v`
#   [block_size, head_dim], of which the first `seen` rows count. Returns the new state, not divided.

# %%
print(why_no_triton() or f"Triton runs your kernel here: {'compiled' if device == 'cuda' else 'in its interpreter'}.")

# %% [markdown]
# What you need of Triton. All arrays are flat: `q + 5` points to element 5, and [i, j] of a row-major array of width w
# is element i w + j.
#
# | | |
# |---|---|
# | `tl.load(pointers, mask=..., other=0.0)` | a tile of values; where the mask is False, `other` and no access |
# | `tl.store(pointers, values)` | the way back |
# | `x[:, None]`, `x[None, :]` | a column, a row: they broadcast as in numpy |
# | `tl.dot(a, b, input_precision="ieee")` | matrix product; `tl.trans(b)` transposes |
# | `tl.max(x, axis=1)`, `tl.sum(x, axis=1)` | over one axis |
# | `tl.maximum`, `tl.exp`, `tl.where(condition, x, y)` | element by element |
# | `tl.full([GROUP], -float("inf"), tl.float32)`, `tl.zeros([...], tl.float32)` | a new tile |
# | `range(0, tl.cdiv(context_len, BLOCK_SIZE))` | a loop over the blocks; cdiv rounds up |


# %% tags=["exercise"]
# exercise: lab3.ex4
@Kernel
def decode_kernel(
    q, k_cache, v_cache, block_table, out, context_len, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program kv_head: the GROUP query heads that share it. Shapes as in exercise 3, out like q."""
    kv_head = tl.program_id(0)
    row = tl.arange(0, GROUP)  # of its query heads
    column = tl.arange(0, HEAD_DIM)
    place = tl.arange(0, BLOCK_SIZE)
    # BEGIN SOLUTION
    # STUB: ...
    own = (kv_head * GROUP + row)[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + own)
    best = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    values = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for index in range(0, tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(block_table + index)
        seen = index * BLOCK_SIZE + place < context_len
        token = (block * BLOCK_SIZE + place) * KV_HEADS + kv_head
        at = token[:, None] * HEAD_DIM + column[None, :]
        k = tl.load(k_cache + at, mask=seen[:, None], other=0.0)
        v = tl.load(v_cache + at, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - top)
        weights = tl.exp(scores - top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = values * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        best = top
    tl.store(out + own, values / total[:, None])
    # END SOLUTION


def absorb(state, q, k, v, seen, scale):
    """The state (best, total, values) after one more block."""
    # BEGIN SOLUTION
    # STUB: ...
    best, total, values = state
    scores = q @ k[:seen].T * scale
    top = torch.maximum(best, scores.amax(dim=1))
    shrink, weights = torch.exp(best - top), torch.exp(scores - top[:, None])
    return top, total * shrink + weights.sum(dim=1), values * shrink[:, None] + weights @ v[:seen]
    # END SOLUTION


# %%
check("lab3.ex4", decode_kernel, absorb, seed=seed)

# %% [markdown]
# The engine once more, on attention that never sees more than one block. In the interpreter a program takes
# milliseconds, so one short answer of the tiny model will do. What counts is the text.

# %%
if solved("lab3.ex4"):
    short = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    ways = {"the engine's own": None, "yours, block by block": as_attention(block_by_block(decode_kernel, absorb))}
    texts = {
        name: LLM("tiny", device=device, verbose=False, attention=op).generate(["A page"], short, use_tqdm=False)
        for name, op in ways.items()
    }
    display(table(["attention", "text"], [[name, out[0].outputs[0].text] for name, out in texts.items()]))
else:
    later("lab3.ex4")

# %% [markdown]
# Limits. Your program walks its context alone: with few long sequences most of a GPU idles. Production kernels split a
# context over several programs and merge their (best, total, values) by the rule that you wrote. They pad groups such
# as SmolLM2's three, and count places in 64 bits.
#
# ## Exercise 4 of the handout
#
# "Derive the memory transfer cost of preempting a request with 4096 cached tokens to CPU (PCIe Gen4, 32 GB/s)."
#
# {{card lab3.ex5}}
#
# `preemption_cost(...)` returns a dict: `"bytes"` moved out, and in milliseconds `"out_ms"`, `"round_trip_ms"` (out and
# in again) and `"recompute_ms"`, one prefill of all tokens instead. The link's rate holds in each direction.
#
# **Worked example.** 1,000 tokens of 100,000 bytes over 10^10 bytes/s: 10^8 bytes, 10 ms out, 20 ms for the round trip.
# At 20,000 tokens/s of prefill, recomputing takes 50 ms.


# %% tags=["exercise"]
# exercise: lab3.ex5
def preemption_cost(num_tokens, kv_bytes_per_token, link_bytes_per_s, prefill_tokens_per_s):
    """Bytes and milliseconds of swapping a request, and of recomputing it."""
    # BEGIN SOLUTION
    # STUB: ...
    num_bytes = num_tokens * kv_bytes_per_token
    out_ms = 1000 * num_bytes / link_bytes_per_s
    recompute_ms = 1000 * num_tokens / prefill_tokens_per_s
    return {"bytes": num_bytes, "out_ms": out_ms, "round_trip_ms": 2 * out_ms, "recompute_ms": recompute_ms}
    # END SOLUTION


# %%
check("lab3.ex5", preemption_cost, seed=seed)

# %% [markdown]
# **Predict, then run.** In chapter 3 swapping won on an A100, on paper. How slow may the link become before it loses:
# half of its 32 GB/s, a tenth? *Simulated for an A100* at 70 % of 312 TFLOP/s, with 2 FLOP a parameter and token.


# %%
def said(cost):
    return f"{cost['bytes'] / 1e6:,.0f} MB", f"{cost['out_ms']:.1f}", f"{cost['round_trip_ms']:.1f}"


if solved("lab3.ex5"):
    # layers, KV heads, head size, parameters; K and V, 2 bytes each
    models = {
        "Llama-2-7B": (32, 32, 128, 6.738e9),
        "Llama-3-8B": (32, 8, 128, 8.030e9),
        "Qwen2.5-7B": (28, 4, 128, 7.615e9),
        "OPT-13B": (40, 40, 128, 12.85e9),
    }
    rows, crossover = [], {}
    handout = preemption_cost(4096, 160e3, 32e9, 1)
    rows.append(["the handout", "160 kB", *said(handout), "no model given"])
    for name, (layers, kv_heads, head_dim, parameters) in models.items():
        token = 2 * layers * kv_heads * head_dim * 2
        cost = preemption_cost(4096, token, 32e9, 0.7 * 312e12 / (2 * parameters))
        rows.append([name, f"{token // 1024} KiB", *said(cost), f"{cost['recompute_ms']:.0f}"])
        crossover[name] = 32 * cost["round_trip_ms"] / cost["recompute_ms"]
    display(table(["4,096 tokens of", "a token", "bytes", "out, ms", "round trip, ms", "recompute, ms"], rows))
    low, high = min(crossover.values()), max(crossover.values())
    display(
        bars(
            list(crossover),
            list(crossover.values()),
            unit="GB/s",
            title=f"Swapping wins above {low:.1f} to {high:.1f} GB/s, by model; the link has 32",
            caption="The link speed at which both cost the same. Simulated for an A100; the link is PCIe Gen4.",
        )
    )
else:
    later("lab3.ex5")

# %% [markdown]
# Llama-2-7B, with multi-head attention, loses at half of the link; Qwen2.5-7B, with four KV heads, still wins at a
# tenth. vLLM recomputes all the same: many small copies run far below the link's speed, one prefill shares its step
# with others, and a prefix cache often still has part of the blocks.
#
# ## Exercise 5 of the handout
#
# "Explain why prefix caching combined with continuous batching can achieve super-linear throughput scaling." There are
# three readings. **Predict:** which have a bound?
#
# | what grows | why |
# |---|---|
# | compute | a share f of the time is prefill, a share h of its tokens is found: 1 - f h of the time is left |
# | memory | M tokens fit, a request has c, s of them shared, stored *once*: (M - s) / (c - s) in place of M / c |
# | replicas | n GPUs, and requests go where their prefix lies: the hit rate rises with n |
#
# {{card lab3.ex6}}
#
# `gains(...)` returns `{"compute": ..., "batch": ...}`: how many times the throughput, how many times the batch,
# unrounded. `scale_out(...)` returns `{"times": ..., "super_linear": ...}`: the throughput of all replicas, each with
# hit rate `hit_many`, over that of one GPU with `hit_one`; and True if that is more than linear.
#
# **Worked example.** `gains(0.5, 0.4, 10_000, 1_000, 500)`: 1 / 0.8 = 1.25; 19 requests in place of 10: 1.9.


# %% tags=["exercise"]
# exercise: lab3.ex6
def gains(prefill_share, hit_rate, memory, context, shared):
    """What a shared prefix gains on one GPU."""
    # BEGIN SOLUTION
    # STUB: ...
    batch = ((memory - shared) / (context - shared)) / (memory / context)
    return {"compute": 1 / (1 - prefill_share * hit_rate), "batch": batch}
    # END SOLUTION


def scale_out(replicas, prefill_share, hit_one, hit_many):
    """What replicas gain together."""
    # BEGIN SOLUTION
    # STUB: ...
    times = replicas * (1 - prefill_share * hit_one) / (1 - prefill_share * hit_many)
    return {"times": times, "super_linear": times > replicas}
    # END SOLUTION


# %%
check("lab3.ex6", gains, scale_out, seed=seed)

# %% [markdown]
# **Predict, then run.** Forty prefixes are asked for in random order, each cache has room for ten. Up to how many GPUs
# does each further one add more than itself, and what does a router do that ignores prefixes? *Simulated* by your
# function.

# %%
if solved("lab3.ex6"):
    share, room, prefixes = 0.6, 10, 40
    gpus = range(1, 9)
    hit = {n: min(1.0, n * room / prefixes) for n in gpus}
    curves = {
        "prefix-aware": (gpus, [scale_out(n, share, hit[1], hit[n])["times"] for n in gpus]),
        "round robin": (gpus, [scale_out(n, share, hit[1], hit[1])["times"] for n in gpus]),
    }
    best = max(n for n in hit if n == 1 or hit[n] > hit[n - 1])
    bound = gains(share, 1.0, 100_000, 1_200, 1_000)  # 1,000 of 1,200 tokens are shared: c / (c - s) = 6
    display(
        lines(
            curves,
            x_name="GPUs",
            y_name="times one GPU",
            title=f"More than linear up to {best} GPUs, while the hit rate rises; then a straight line",
            caption="Simulated by your function: 60 % prefill, forty prefixes in random order, room for ten a cache.",
        )
    )
    print(f"Compute on one GPU: at most {bound['compute']:.2f} times, even if every token is a hit.")
    print(f"Batch on one GPU: {bound['batch']:.2f} times with room for 100,000 tokens, and never more than 6.")
    claim(
        "super-linear",
        label="simulated: computed by your function",
        scaling={f"{best} GPUs, {name}": times[best - 1] / best for name, (_, times) in curves.items()},
    )
else:
    later("lab3.ex6")

# %% [markdown]
# The lecture's sentence holds under conditions: replicas, a router that knows prefixes, and prefixes that one cache
# cannot hold. On one GPU a shared prefix saves compute and memory at once, and each gain has its bound. Throughput
# against batch size is never super-linear: a line until the GPU is busy, then it bends.
#
# ## Where you stand

# %%
progress()

# %%
ledger()

# %% [markdown]
# ## Decide
#
# 1. Your pool has 2,000 blocks and after a week 1,940 are free with nobody running. Nothing crashed. What do you log
#    from tomorrow on to find the call that lost the 60, and what do you do tonight?
# 2. Contexts are 200 to 30,000 tokens, one program walks each. Which sequences do you split, into how many parts, and
#    what does a split of a short one cost?
# 3. Somebody offers to swap preempted requests to the host for a model with 56 KiB a token on PCIe Gen3. Say which two
#    numbers you measure first, and at which values you say no.
#
# The solved lab, `solutions/lab3_paged_attention.ipynb`, has an answer to each.

# %% [markdown] tags=["solution"]
# ## Decide: one answer to each
#
# 1. Log each call that changes a count: who (request id), what (allocate, share, free), which blocks, the counts after.
#    On one replica check conservation after every step (`debug=True`): the first step in which the counts are not the
#    tables names the call. Look first at ends that are not the ordinary one: an abort, a preemption, a fork, an error
#    between `share` and the table's entry. Tonight nothing burns, 3 % are lost: restart when nobody runs, and set an
#    alarm for "idle, and not all free".
# 2. A step ends with its longest program. Split what is much longer than the rest into parts of about equal length, a
#    thousand tokens or so: 30 parts for 30,000, one for 200. Stop when there are a few programs for each processor of
#    the GPU; beyond that a split only adds work. For a short one it costs a second pass that reads and merges (best,
#    total, values) of parts that were hardly any work.
# 3. The rate of a real copy both ways, in the many small pieces in which the pages lie, and the tokens a second of a
#    prefill beside your usual load. Both ways a token is 2 x 57,344 bytes. At 14,000 tokens/s (the A100 of the figure)
#    recomputing is faster below 14,000 x 114,688 = 1.6 GB/s. Gen3 has 16 on paper: say no if a real copy stays below a
#    tenth of that, or if the prefix cache has most of the blocks anyway.

# %% [markdown]
# ## Links
#
# - Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP, section
#   4: [tables, sharing, preemption](https://arxiv.org/abs/2309.06180)
# - Milakov and Gimelshein 2018, [online softmax](https://arxiv.org/abs/1805.02867): the rule of exercise 4
# - Dao et al. 2023, [Flash-Decoding](https://pytorch.org/blog/flash-decoding/): a context over several programs
# - Ainslie et al. 2023, [GQA](https://arxiv.org/abs/2305.13245)
# - vLLM, [automatic prefix caching](https://docs.vllm.ai/en/latest/design/prefix_caching.html): what your pool forgets
# - Before: [lab 2](lab2_continuous_batching.ipynb) and chapter 3.
