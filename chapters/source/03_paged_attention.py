# %% [markdown]
# # PagedAttention: memory in pages
#
# {{badges}}
#
# Cut the KV cache into equal pages and hand them out one at a time, and nearly all of the memory holds tokens. In this
# chapter you watch pages being taken, shared, copied, swapped and given back, and test what the lecture says of them.
#
# Three requests write at the same time. None of them knows how long it will be. Here is their memory in one moment: 24
# pages of four tokens each, handed out by the engine's own scheduler and pool. (*Simulated*: a script writes the
# tokens.)

# %%
# {{colab}}

# %% tags=["parameters"]
device = None  # None: CUDA if there is one, else the CPU
seed = 0
size = "small"  # "large" serves more requests in the simulations
model = "smollm2-135m"

# %%
import logging

from cbserve import page_map, serve

logging.getLogger("cbserve").setLevel(logging.ERROR)  # the engine warns of preemptions; here you cause them on purpose

opening = serve([9, 14, 6], prompt_tokens=[7, 5, 10], num_blocks=24, block_size=4)
page_map(opening, step=5)

# %% [markdown]
# Find A in the list on the left, then its pages in the pool on the right. The third lies behind those of others, and it
# does not matter: the list says where they are.
#
# ## What you will be able to do
#
# - Say what reserving memory wastes, in three kinds, and measure each.
# - Read a block table, and follow a page from the free list and back.
# - Compute the bytes of a page for any model, and say where the lecture's formula fails.
# - Choose a page size, and decide between swapping and recomputing.
# - Say when a shared system prompt helps, by how much at most, and when "super-linear" is true.
#
# You need chapter 2: slots, admission, chunks, preemption. Reading and running takes about 85 minutes; then comes
# lab 3.
#
# ## What reserving costs
#
# Before paging, an engine kept the keys and values of a request in *one* piece of memory, as long as the request would
# ever become. Nobody knows that, so it took the most that the model allows.
#
# You can have that engine: a scheduler that admits a request only if a free piece is long enough. The first of the two
# below reserves the maximum. The second asks an oracle for the true length.

# %%
from cbserve import ContinuousBatching, Scheduler

POOL_TOKENS, LONGEST = 16_384, 4_096


class OnePiece(Scheduler):
    """Every request gets one piece of memory, the first that is long enough, and keeps it to its end."""

    pieces = {}

    def admit(self, step):
        running = {seq.seq_id for seq in self.running}
        self.pieces = {seq_id: piece for seq_id, piece in self.pieces.items() if seq_id in running}
        for seq in super().admit(step):
            start, length = 0, self.length(seq)
            for taken, end in sorted(self.pieces.values()):
                if taken - start >= length:
                    break
                start = end
            if start + length > POOL_TOKENS:
                return
            self.pieces[seq.seq_id] = (start, start + length)
            yield seq


class ReserveMaximum(OnePiece):
    def length(self, seq):
        return LONGEST


class ReserveExact(OnePiece):
    def length(self, seq):
        return seq.num_prompt_tokens + seq.max_tokens  # `serve` sets it to the true length: the oracle


# %% [markdown]
# All three engines get the same memory, 16,384 tokens, and the same chat requests, with lengths drawn from Azure's
# trace. On average a request has 1,155 prompt tokens and 211 to write.
#
# **Predict, then run.** While requests are waiting, what share of the memory holds a token, if the exact length is
# reserved?
#
# | your guess | why someone would say that |
# |---|---|
# | 100 % | nothing is reserved that will not be used; but it is used later, and the pieces do not tile |
# | about 90 % | most of a request is its prompt, which is there from the start; now add the gaps between pieces |
# | about 70 % | you counted the gaps, too short for the next request and yet free |

# %%
from cbserve import azure, bars, summarize

chat = azure("conv")
num_requests = 64 if size == "small" else 512
answers = chat.sample_output(num_requests, seed=seed)
prompts = [min(n, LONGEST - 1_000) for n in chat.sample_prompt(num_requests, seed=seed + 1)]
plenty = {"num_blocks": 4 * POOL_TOKENS // 16}  # these two keep their own books of POOL_TOKENS
engines = {
    "reserve the maximum": (ReserveMaximum, plenty),
    "reserve exactly": (ReserveExact, plenty),
    "pages of 16 tokens": (Scheduler, {"num_blocks": POOL_TOKENS // 16}),
}
useful, rows = {}, []
for name, (scheduler, pool) in engines.items():
    trace = serve(answers, ContinuousBatching(max_num_seqs=64), scheduler=scheduler, prompt_tokens=prompts, **pool)
    queued = [step for step in trace.steps if step.num_waiting]
    held = sum(row.context_len for step in queued for row in step.rows) / len(queued)
    useful[name] = 100 * held / POOL_TOKENS
    running = sum(step.num_running for step in queued) / len(queued)
    rows.append([name, f"{running:.1f}", len(trace.steps), summarize(trace).num_preemptions])
bars(
    list(useful),
    list(useful.values()),
    title="Memory that holds tokens: " + ", ".join(f"{share:.0f} %" for share in useful.values()),
    unit="%",
    caption="Simulated: the real scheduler, 16,384 tokens of memory, while requests wait. "
    f"Lengths: {chat.source}. {chat.licence}.",
)

# %%
from cbserve import table

table(
    ["memory", "requests that run at a time", "steps for all", "preemptions"],
    rows,
    caption="The same simulated runs. More requests in a step, fewer steps.",
)

# %% [markdown]
# Three kinds of waste have names:
#
# - *Reserved*: places for tokens that are not written yet.
# - *Internal fragmentation*: places in a piece that will never be used.
# - *External fragmentation*: gaps between pieces, each too short for the next request.
#
# **Which bar suffers from which?** Decide, then read on.
#
# Reserving the maximum: the first two. The oracle: the first and the third. Pages: a rest of the second. The authors of
# PagedAttention report the same order for OPT-13B: 20.4 %, 38.2 % and 96.3 % useful (Kwon et al. 2023, figure 2).
#
# The price is in the last column. Pages are handed out without a promise, so the pool can run out. That is chapter 2's
# preemption, and below you will make it cheaper.
#
# ## The oldest trick of operating systems
#
# Processes had the same problem around 1960. The answer was *virtual memory*: each process sees one long row of
# addresses, and a table maps it to *pages* that lie anywhere.
#
# **Cover the right column**, and name the counterpart of each row yourself.
#
# | operating system | KV cache |
# |---|---|
# | process | request |
# | page | *block*: K and V of 16 tokens, in all layers |
# | page table | *block table*, one a request |
# | demand paging | a block is taken when a token needs it |
# | fork, copy on write | several answers share a prompt |
# | page cache | a known prefix is found again |
# | swap | blocks are copied to CPU memory |
#
# *Page* is the lecture's word, *block* the one in code. Now translate a position yourself: where in the first figure is
# position 13 of C, counted from 0? Then let the engine's rule answer.

# %%
from cbserve import page_state

state = page_state(opening, step=5)
tables = {state.owners[seq_id][0]: blocks for seq_id, blocks in state.tables.items()}
request, position = "C", 13
index, place = divmod(position, state.block_size)
print(f"block table of {request}: {list(tables[request])}")
print(f"position {position} is in entry {index}, which is block {tables[request][index]}, at place {place}")

# %% [markdown]
# **Where the analogy ends.** No hardware translates. The attention kernel reads the table and gathers K and V from
# wherever they are. The paper's kernel was 20 to 26 % *slower* than one on contiguous memory: paging wins by the number
# of requests that fit.
#
# And a kernel cannot stop in the middle to fetch a page. So a request is swapped whole or not at all.
#
# ## Watch it
#
# The same three requests, on a pool too small for them. Before each step say who will take a page. Choose a request to
# light its pages.

# %%
from cbserve.explorers import page_map_explorer

tight = serve([9, 14, 6], prompt_tokens=[7, 5, 10], num_blocks=9, block_size=4)
page_map_explorer(tight)

# %% [markdown]
# A request takes a page in the step in which its tokens run over the edge of the last one. That is *demand paging*.
#
# **Predict, then run.** The lecture says: "Allocate pages only when tokens are generated." How many pages of 16 does a
# prompt of 40 tokens take in its first step, before anything is generated? (Three such prompts come at once. A second
# engine has a budget of 16 tokens a step, so its prompts come in chunks.)
#
# | your guess | why someone would say that |
# |---|---|
# | none | the sentence says *generated*; but keys and values of the prompt must be somewhere |
# | 3 | 40 tokens in pages of 16; a page for the answer is not needed yet |
# | 4 | 3 and one for the first answer token; that token is known after this step and written in the next |

# %%
from cbserve import LLM, claim


def pages_early(trace, first_token):
    """Pages held beyond those that cached tokens fill, counted from position `first_token`: the most in any step."""
    size = trace.meta["block_size"]
    filled = [sum(-(-max(0, row.context_len - first_token) // size) for row in step.rows) for step in trace.steps]
    return max(step.num_used_blocks - pages for step, pages in zip(trace.steps, filled, strict=True))


whole = LLM("tiny", device=device, num_blocks=64, seed=seed, verbose=False)
chunks = LLM("tiny", device=device, num_blocks=64, seed=seed, max_num_batched_tokens=16, verbose=False)
early = {"only generated tokens count": [], "prompt tokens count too": []}
for name, llm in {"prompts whole": whole, "prompts in chunks": chunks}.items():
    trace = serve([30, 12, 20], llm=llm, prompt_tokens=40)
    first = trace.steps[0]
    print(f"{name}: the first step computes {first.rows[0].num_tokens} tokens of A; pages: {first.num_used_blocks}")
    early["only generated tokens count"].append(pages_early(trace, first_token=40))
    early["prompt tokens count too"].append(pages_early(trace, first_token=0))
claim("demand-paging", early={words: max(pages) for words, pages in early.items()})

# %% [markdown]
# Nine pages are three for each prompt; a chunk of 16 takes one. So word for word the sentence does not hold: those
# pages are there before anything is generated. It holds as it is meant, once prompt tokens count like generated ones:
# then no page waits for a token that may never come.
#
# Taking one must be cheap, since it happens in every step. The pool keeps its free blocks in a list and takes the
# first. Is the time the same in a pool a hundred times as large?

# %%
from timeit import repeat

from cbserve import BlockPool


def nanoseconds(pool, blocks=20_000):
    """To allocate one block and free it again: the best of five tries."""
    return 1e9 / blocks * min(repeat(lambda: pool.free(pool.allocate(1)), number=blocks, repeat=5))


small_pool, large_pool = nanoseconds(BlockPool(1_000)), nanoseconds(BlockPool(100_000))
print(f"{small_pool:.0f} ns a page in a pool of 1,000, {large_pool:.0f} ns in one of 100,000 (measured here)")
claim("allocate-o1", slowdown=large_pool / small_pool)

# %% [markdown]
# ## How large is a page?
#
# Each token leaves a key and a value in every layer, for each *KV head*:
#
# $$\text{page} = 2 \cdot L \cdot H_{kv} \cdot d_k \cdot P \cdot b \text{ bytes.}$$
#
# Said aloud: *key and value, times layers, KV heads, head size, tokens a page, bytes a number*. For Llama-3.1-8B in
# 16 bits: 2 x 32 x 8 x 128 x 16 x 2 = 2,097,152 bytes, or 2 MiB.
#
# The lecture writes $H$, the query heads, for $H_{kv}$. In *multi-head attention* each query head has its own K and V.
# In *grouped-query attention* several share one.
#
# **Predict.** Llama-3.1-8B has 32 query heads and 8 KV heads. By how much is the lecture's formula off, and for which
# of the models below is it right?

# %%
from cbserve import MODELS

names = (
    "OPT-13B",
    "Llama-2-7B",
    "Llama-2-70B",
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Qwen2.5-7B",
    "Qwen3-32B",
    "SmolLM2-135M",
)
models = [MODELS[name] for name in names]
MIB = 2**20
table(
    ["model", "layers", "query heads", "KV heads", "KV bytes a token", "page of 16", "lecture's formula"],
    [
        [
            m.name,
            m.num_layers,
            m.num_heads,
            m.num_kv_heads,
            m.kv_bytes_per_token(),
            f"{m.block_bytes() / MIB:.3g} MiB",
            f"{m.block_bytes_all_heads() / MIB:.3g} MiB",
        ]
        for m in models
    ],
    caption="Computed for 16-bit values. " + "; ".join(sorted({m.source for m in models})) + ".",
)

# %% [markdown]
# A formula can be wrong in its turn. So weigh the real thing: the cache that the engine has allocated for the model on
# your machine, divided by its pages.

# %%
from cbserve import CBServeError

try:
    llm = LLM(model, device=device, num_blocks=160, enable_prefix_caching=True, seed=seed, verbose=False)
except CBServeError as error:  # no network, say: the experiments are the same, their seconds are smaller
    print(f"{error}\nGoing on with the tiny random model.")
    model = "tiny"
    llm = LLM(model, device=device, num_blocks=160, enable_prefix_caching=True, seed=seed, verbose=False)
cache = llm.executor.kv_cache
config, b = llm.config, cache.element_size()
weighed = cache.numel() * b / 160
all_heads = 2 * config.num_layers * config.num_heads * config.head_dim * 16 * b
print(f"{model}: {weighed:,.0f} bytes a page, weighed; {all_heads:,} by the lecture's formula at {b} bytes a value")
claim(
    "page-bytes",
    ratio={f"{model}, weighed here": all_heads / weighed}
    | {
        f"{m.name} by its shape": m.block_bytes_all_heads() / m.block_bytes() for m in models if m.name.lower() != model
    },
)

# %% [markdown]
# The lecture's formula is right for the multi-head models and too large by $H / H_{kv}$ for all others. The mistake
# reaches production: a library (torchtune, issue 38) allocated eight times what it needed.
#
# Two more factors. An fp8 cache has $b = 1$. DeepSeek-V3 stores neither K nor V but one compressed vector of 576 values
# a token and layer (*multi-head latent attention*): 70,272 bytes over 61 layers in 16 bits, about half of Llama-3.1-8B
# for a model 80 times its size.
#
# ## How many tokens a page?
#
# Large pages leave more room at the end of each request. Small ones make long tables and many short reads.
#
# **Predict, then run.** What does going from pages of 16 to pages of 128 cost a chat request in memory? It holds about
# 1,260 tokens on average.
#
# | your guess | why someone would say that |
# |---|---|
# | 8 times as much | the page is; but only the *last* page of a request is not full |
# | about 4 % | half of a page stays empty: 64 places in place of 8, of 1,260 |
# | nothing | few pages; each still has an end |

# %%
from cbserve import lines

code = azure("code")
num_lengths, sizes = 200, [1, 2, 4, 8, 16, 32, 64, 128, 256]
workloads = {
    "chat": list(zip(chat.sample_prompt(num_lengths, seed + 1), chat.sample_output(num_lengths, seed), strict=True)),
    "code": list(zip(code.sample_prompt(num_lengths, seed + 1), code.sample_output(num_lengths, seed), strict=True)),
    "one-liners": [(19, 58)] * num_lengths,  # the means of Alpaca in Kwon et al. 2023
}


def empty_share(work, block_size):
    """Places without a token over places in held pages, over the whole life of all requests."""
    lives = [length for prompt, answer in work for length in range(prompt, prompt + answer)]
    return 1 - sum(lives) / sum(-(-length // block_size) * block_size for length in lives)


empty = {name: [empty_share(work, p) for p in sizes] for name, work in workloads.items()}
at_16 = {name: shares[sizes.index(16)] for name, shares in empty.items()}
at_128 = {name: shares[sizes.index(128)] for name, shares in empty.items()}
lines(
    {name: (sizes[1:], [100 * share for share in shares[1:]]) for name, shares in empty.items()},
    title="Empty with pages of 16: "
    + ", ".join(f"{name} {share:.1%}" for name, share in at_16.items())
    + f"; chat with pages of 128: {at_128['chat']:.1%}",
    x_name="tokens a page",
    y_name="empty places, %",
    log_x=True,
    log_y=True,
    reference=(4, "4 %: what vLLM's authors report for paging"),
    caption=f"Computed from {num_lengths} requests each, over their whole life. "
    f"Chat and code: {chat.source}. {chat.licence}. The dashed line: vLLM blog, June 2023, waste under 4 %.",
)

# %%
more = (1 - at_16["chat"]) / (1 - at_128["chat"]) - 1
print(f"chat: {at_16['chat']:.1%} empty with pages of 16, {at_128['chat']:.1%} with 128: {more:.1%} more memory")
in_16 = {f"{name}, pages of 16": share for name, share in at_16.items()}
claim("no-fragmentation", waste=in_16, label="simulated from trace lengths")

# %% [markdown]
# "Eliminates" is a statement about long requests. On average half a page is empty: 7.5 places of 16, whatever the
# length. The engine says the same of its own runs, as `tail_waste`.
#
# The other side is the table: with pages of 16 a chat request of 1,260 tokens has 79 entries, with single tokens it has
# one for each. And the kernel has to find them. Measure attention itself, on your machine: eight requests of 512
# tokens, in pages of 1 to 256 that lie in random order. In torch the engine gathers K and V into one piece first. In C,
# which it takes where your machine has a compiler, it reads each page where it lies.
#
# **Predict.** Which of the two cares more for the size of a page?

# %%
from statistics import median
from time import perf_counter

import torch

from cbserve import tail_waste

run = serve([58] * 8, llm=whole, prompt_tokens=19)
print(f"tail waste of one-liners on the engine: {tail_waste(run):.1%}, computed above: {at_16['one-liners']:.1%}")
in_torch = LLM("tiny", device=device, num_blocks=64, backend="torch", verbose=False)
ways = {"gathers (torch)": in_torch.executor.backend}
if whole.executor.backend.name == "c":
    ways["reads in place (C)"] = whole.executor.backend


def attention(backend, block_size, batch=8, context=512, heads=9, kv_heads=3, head_dim=64):
    """A function that computes decode attention of one of SmolLM2's layers over pages of this size."""
    blocks = batch * context // block_size
    k, v = torch.randn(2, blocks, block_size, kv_heads, head_dim)
    tables = torch.randperm(blocks).view(batch, -1).tolist()
    q = torch.randn(batch, heads, head_dim)
    step = backend.paged_attention(tables, [1] * batch, [context] * batch, block_size, q.dtype, q.device)
    return lambda: step.run(q, k, v, head_dim**-0.5)


threads = torch.get_num_threads()
torch.set_num_threads(1)  # with more, a thread that is held up elsewhere makes the others wait
swept = [1, 2, 4, 8, 16, 32, 64, 128, 256]
kernels = {(way, p): attention(backend, p) for way, backend in ways.items() for p in swept}
times = {at: [] for at in kernels}
for _ in range(60):  # in turn, so that a busy moment of the machine hits all alike
    for at, kernel in kernels.items():
        start = perf_counter()
        kernel()
        times[at].append(1e3 * (perf_counter() - start))
torch.set_num_threads(threads)
attention_ms = {way: [min(times[way, p]) for p in swept] for way in ways}
at_best = {way: ms[swept.index(16)] / min(ms) for way, ms in attention_ms.items()}
lines(
    {way: (swept, ms) for way, ms in attention_ms.items()},
    title="With pages of 16 attention takes "
    + ", ".join(f"{ratio:.2f} times its best where it {way}" for way, ratio in at_best.items()),
    x_name="tokens a page",
    y_name="milliseconds",
    log_x=True,
    caption="Measured here: decode attention of one layer on the CPU, one thread, 8 requests of 512 tokens. "
    "Best of 60: other work only ever adds time.",
)

# %% [markdown]
# Gathering pays for each page, so it wants large ones. Who reads in place pays less. A kernel for a GPU reads in place
# too; there, pages that are too small make short reads and many table look-ups. The paper found 16 to 128 good for
# long chats and 16 to 32 for short ones (figure 18).
#
# The card counts 16 as fine where it costs at most a tenth more than the best size. The memory numbers are arithmetic
# and the same everywhere. Those for attention are your machine's: with another processor, or with gathering, the same
# card may say something else.

# %%
cost = {f"memory of {name}": (1 - min(empty[name])) / (1 - at_16[name]) for name in workloads}
claim("page-size-16", cost=cost | {f"attention that {way}, here": ratio for way, ratio in at_best.items()})

# %% [markdown]
# "Typically" is right for vLLM on CUDA. It is no law: Mooncake's traces count in pages of 512 tokens, DeepSeek's kernel
# FlashMLA in 64, and models that mix attention with state-space layers such as Mamba have pages of 528 tokens and more
# in vLLM.
#
# ## One prompt, three answers
#
# You ask for three samples of one prompt, with `SamplingParams(n=3)`: A.0, A.1 and A.2 in the figure. The prompt has 22
# tokens, a page holds 4.
#
# The step that computes the prompt samples three first tokens. Their keys and values come one step later.
#
# **Predict, then run.** How many pages do the three hold in that step, when each token goes into the cache?
#
# | your guess | why someone would say that |
# |---|---|
# | 18 | three times 6; right without sharing |
# | 6 | everything is shared; but the answers differ, and they begin in the prompt's last page |
# | 8 | five full pages of prompt once, and a last page for each |

# %%
forked = serve([7], num_samples=3, prompt_tokens=22, block_size=4, num_blocks=12)
page_map(forked, step=1)

# %%
copies = sum(step.num_copies for step in forked.steps)
print(f"{forked.steps[1].num_used_blocks} pages in step 1; {copies} pages were copied in the whole run")

# %% [markdown]
# The prompt's last page was half full, and all three wanted to write into it. A page counts its holders, and who writes
# into one with several gets a copy first: *copy-on-write*. The last of the three is alone by then, and writes in place.
# Three samples, two copies: the two pages with a corner, the only ones that were taken in this step.
#
# ## A prefix that is known
#
# A system prompt is shared in another way, by requests that never met. A full page gets a name, the hash of its tokens
# *and of the page before it*. A new request looks its prompt up, page by page, until one is not found. Each page found
# is a *hit*. This is *prefix caching*.
#
# **Predict each row before you run**, with the reasons at the ends of the lines covered. A first request has computed
# its prompt. A second one comes. Pages hold 16 tokens. For how many of its tokens is nothing computed?

# %%
from cbserve import prefix_hit_rate

text = list(range(100, 200))


def found(first, second, salts=None):
    """Tokens of the second prompt that the cache knows."""
    both = serve([2, 2], prompts=[first, second], arrivals_s=[0, 5], cache_salts=salts, enable_prefix_caching=True)
    return [event for event in both if event.type == "admitted"][1].num_cached_tokens


table(
    ["the second prompt", "its tokens", "found", "why"],
    [
        ["first 40 tokens equal", 60, found(text[:40] + [1] * 20, text[:40] + [2] * 20), "two full pages"],
        ["first 15 tokens equal", 60, found(text[:15] + [1] * 45, text[:15] + [2] * 45), "no full page"],
        ["all but the first equal", 60, found(text[:60], [1] + text[1:60]), "the hash chain breaks at its root"],
        ["the same prompt", 60, found(text[:60], text[:60]), "three full pages"],
        ["the same prompt", 64, found(text[:64], text[:64]), "one token must be computed, to have logits"],
        ["the same, another tenant", 64, found(text[:64], text[:64], ["ours", "theirs"]), "salted at the root"],
    ],
    caption="Simulated: the engine's own cache manager; its decisions do not depend on a model.",
)

# %% [markdown]
# Why 48 of 64? The last token must be computed, so its page is not taken, and a page counts whole.
#
# The last row is no detail. A *tenant* is a customer who shares the engine with others. A hit is fast, and fast can be
# *measured*: one tenant can time whether another has sent a text before. A `cache_salt`, hashed into the first page,
# keeps them apart.
#
# No page of a prefix is ever copied: only full pages are shared, and nobody writes into those. Here are three requests
# with one system prompt of 12 tokens.

# %%
system = text[:12]
chats = [system + [token] * 5 for token in (1, 2, 3)]
together = {"prompts": chats, "arrivals_s": [0, 1, 2], "block_size": 4, "num_blocks": 16}
shared = serve([8, 8, 8], enable_prefix_caching=True, **together)
page_map(shared, step=4)

# %% [markdown]
# ## What it saves: time to first token
#
# A system prompt of 256 tokens, and questions of 16. Somebody has asked before. Now four people ask the real model on
# your machine, all at once: first with a salt each, so that everything must be computed, then without.
#
# The arithmetic: 256 of 272 prompt tokens are found, a *hit rate* of 94 %. If time followed tokens, the first token
# would come after 16 / 272 of the time: a fall by 94 %.
#
# **Predict.** Will the measured fall be larger, smaller, or the same? Think of what a step costs however few tokens it
# computes.

# %%
import random

from cbserve import sequence_metrics

rng = random.Random(seed)
low, high = (5, 250) if model == "tiny" else (1_000, 40_000)


def tokens(count):
    return [rng.randrange(low, high) for _ in range(count)]


instructions = tokens(256)
ttft, hit = {}, {}
for name, salts in {"every prompt computed": list("abcd"), "prefix found": [""] * 4}.items():
    serve([1], llm=llm, prompts=[instructions + tokens(16)])  # somebody has asked before
    trace = serve([1] * 4, llm=llm, prompts=[instructions + tokens(16) for _ in range(4)], cache_salts=salts)
    ttft[name] = 1e3 * median(m.ttft_s for m in sequence_metrics(trace))
    hit[name] = prefix_hit_rate(trace)
threads = f"; threads: {torch.get_num_threads()}" if llm.device.type == "cpu" else ""
del llm
before, after = ttft.values()
fall, promised = 1 - after / before, hit["prefix found"]
bars(
    list(ttft),
    list(ttft.values()),
    title=f"First token after {after:,.0f} ms, not {before:,.0f}: {fall:.0%} less; tokens promised {promised:.0%}",
    unit="ms",
    caption=f"Measured here: {model}, four requests at once, a shared prefix of 256 of 272 tokens{threads}.",
)

# %%
print(f"hit rate: {hit['every prompt computed']:.1%} with four salts, {promised:.1%} with one")
print(f"the fall is {fall / promised:.0%} of what the tokens promised (measured here)")

# %% [markdown]
# What is missing, if anything, is the fixed cost of a step. And the answer's *later* tokens come no faster: a hit saves
# prefill, never a decode step.
#
# ## When the pool is full
#
# A page that nobody holds any more keeps its content. It goes to the far end of the free list and can still be found,
# until its turn comes to be handed out: then it is *evicted*. The least recently used goes first, *LRU*.
#
# **Predict, then run.** Six pages of four tokens. A has come and gone: 13 prompt tokens and its answer filled four of
# them. Now a stranger, B, needs four pages, and two were never used. Which of A's pages should go: those of its
# beginning or of its end?

# %%
first, stranger, again = text[:12] + [1], text[50:62], text[:12] + [2]
lru = {"arrivals_s": [0, 6, 12], "num_blocks": 6, "block_size": 4, "enable_prefix_caching": True}
evicting = serve([4, 4, 4], prompts=[first, stranger, again], **lru)
lost = sum(len(event.evicted) for event in evicting if event.type == "pages" and event.step < 8)
found_again = [event.num_cached_tokens for event in evicting if event.type == "admitted"][-1]
page_map(
    evicting, step=5, title=f"B evicts {lost} of A's 4 pages, and A's prompt is still found for {found_again} tokens"
)

# %% [markdown]
# The end goes first, since a prefix is worth nothing without its beginning. The engine gives the pages of a request
# back in reverse, and LRU does the rest.
#
# So a cache costs no memory that anybody needs. But how large must the pool be? Eight system prompts of 1,024 tokens,
# 64 pages each, come in random order: 512 pages worth keeping, the *working set*. A step takes as long as it was
# measured to take for Llama-3.1-8B on an A100.
#
# **Predict the shape.** You give the pool a third of those pages, two thirds, all of them, and more. Does the hit rate
# rise in proportion? Where does it stop?

# %%
from cbserve import StepTimes

# (tokens in a step, seconds), and seconds for each token of context: NVIDIA aiconfigurator tables for vLLM
a100 = StepTimes(((1, 0.0118), (32, 0.0130), (128, 0.0143), (512, 0.036), (1024, 0.0647), (2048, 0.125)), 0.08e-6)
per_prompt = 40 if size == "small" else 120
order = [k for k in range(8) for _ in range(per_prompt)]
rng.shuffle(order)
systems = [tokens(1024) for _ in range(8)]
asked = [(k, systems[k] + tokens(64)) for k in order]


def replica(requests, num_blocks):
    """One GPU: 8 slots, answers of 32 tokens. Returns the trace."""
    return serve(
        [32] * len(requests),
        ContinuousBatching(max_num_seqs=8),
        prompts=[prompt for _, prompt in requests],
        num_blocks=num_blocks,
        enable_prefix_caching=True,
        step_time_s=a100,
    )


pools = [160, 240, 320, 400, 480, 560, 640, 720, 800]
alone = {blocks: replica(asked, blocks) for blocks in pools}
rates = [100 * prefix_hit_rate(trace) for trace in alone.values()]
first_time, own = 8 / len(asked), 64 / 1088
print(f"can never be found: a system prompt's first call, {first_time:.1%}, and the questions, {own:.1%} of all tokens")
print(f"at most {100 * (1 - first_time) * (1 - own):.1f} % can; the largest pool finds {rates[-1]:.1f} %")
lines(
    {"8 system prompts": (pools, rates)},
    title=f"A hit rate of {rates[0]:.0f} % with {pools[0]} pages, {rates[2]:.0f} % with {pools[2]}, "
    f"{rates[4]:.0f} % with {pools[4]}, {rates[-1]:.0f} % with {pools[-1]}",
    x_name="pages in the pool",
    y_name="prompt tokens found, %",
    caption=f"Simulated: the real cache with LRU eviction, {len(asked)} requests, Llama-3.1-8B step times on an A100.",
)

# %% [markdown]
# Nearly in proportion: in random order each of the eight is equally likely to come next, so a pool with room for half
# of them finds half. But the rate goes on rising beyond the 512 pages of the working set. A running request holds six
# pages of its own, and one that has left leaves five full ones behind. Nobody will ask for them again, and LRU does not
# know that: between two uses of a system prompt they take its place.
#
# From about 700 pages on everything fits, and the rate ends near the most that can be found at all.
#
# ## Give back or put aside
#
# The pool is full and a request must yield. Its pages can be thrown away and computed again, or copied to CPU memory
# and back. Exercise 4 of the lecture: what does it cost to *swap out* 4,096 tokens over PCIe Gen4 at 32 GB/s?
#
# $$t_\text{swap} = \frac{n \cdot \text{KV bytes a token}}{\text{link}}, \qquad
# t_\text{recompute} \approx \frac{2 N n}{F \cdot 0.7}.$$
#
# Said aloud: *bytes over bandwidth*, against *two operations for each of N parameters and n tokens, at 70 % of the
# GPU's peak F*. **Compute the first** with the lecture's 160 KB a token; the cell's first line checks you.
#
# **Predict.** For which models below could recomputing be the better choice? Which two of their numbers decide?

# %%
from cbserve import GPUS

victim = 4096
lecture_s = victim * 160e3 / 32e9
megabytes = victim * 160e3 / 1e6
print(f"the lecture's 160 KB: {megabytes:.0f} MB, {1e3 * lecture_s:.1f} ms out, {2e3 * lecture_s:.0f} ms both ways")
rows = []
for gpu in (GPUS["A100-80 SXM"], GPUS["H100 SXM"]):
    for m in (MODELS[name] for name in ("OPT-13B", "Llama-2-7B", "Llama-3.1-8B", "Qwen2.5-7B")):
        moved = victim * m.kv_bytes_per_token()
        out_s = moved / gpu.host_link_bytes_s
        again_s = 2 * m.num_params * victim / (0.7 * gpu.flops)
        tips = 2 * moved / again_s
        at_70 = "swap" if 0.7 * gpu.host_link_bytes_s > tips else "recompute"
        ms = [f"{1e3 * seconds:.1f}" for seconds in (out_s, 2 * out_s, again_s)]
        rows.append([m.name, gpu.name, f"{moved / 1e6:.0f}", *ms, f"{tips / 1e9:.1f}", at_70])
table(
    ["model", "GPU", "MB", "out, ms", "in too", "again, ms", "tips at", "at 70 %"],
    rows,
    caption="Computed. Links: 32 GB/s (Gen4), 64 GB/s (Gen5). Above the GB/s in 'tips at' swapping wins; the last "
    "column says who wins at 70 % of the link, about what real copies reach.",
)

# %% [markdown]
# Parameters and KV bytes decide. Grouped queries shrank the pages and not the weights. From A100 to H100 computing grew
# more than the link did: there the two multi-head models come near the tip, and one passes it.
#
# And yet vLLM has no swapping any more: since its V1 a preempted request is always recomputed. Its pages lay in many
# small pieces, and copying those ran far below the peak. Recomputing is one prefill that shares its step with others,
# and the prefix cache often has part of it.
#
# This engine can do both. The same requests, the same pool, in turns one way and the other, on the real model. One of
# four requests has to yield in each run, and returns when the others are done.

# %%
roomy = {"device": device, "seed": seed, "verbose": False}
llm = LLM(model, num_blocks=27, max_num_seqs=4, preemption="swap", **roomy)
serve([2], llm=llm)  # the first pass of a model is slower than all others
turns = 5 if size == "small" else 15
step_ms = {
    "an ordinary step": [],
    "a victim goes, swapped out": [],
    "a victim returns, swapped in": [],
    "a victim returns, computed again": [],
}
ordinary, goes, returns, again = step_ms.values()
for how in ["swap", "recompute"] * turns:
    llm.scheduler.preemption = how  # the same engine, told otherwise
    trace = serve([8] * 4, llm=llm, prompt_tokens=94)
    out = {event.step: event.num_computed_tokens for event in trace if event.type == "preempted"}
    back = {event.step for event in trace if event.type == "admitted" and event.resumed}
    for step in trace.steps[1:]:  # the first computes the prompts
        ms = 1e3 * (step.end_s - step.start_s)
        if step.step in back:
            (returns if how == "swap" else again).append(ms)
        elif step.step in out:
            (goes if how == "swap" else ordinary).append(ms)  # to throw pages away moves nothing
        else:
            ordinary.append(ms)
del llm
medians = {name: median(found) for name, found in step_ms.items()}
bars(
    list(medians),
    list(medians.values()),
    title=f"The step in which a victim returns: {medians['a victim returns, swapped in']:,.0f} ms with swapping, "
    f"{medians['a victim returns, computed again']:,.0f} ms with recomputing, {medians['an ordinary step']:,.0f} ms "
    "without a victim",
    unit="ms",
    caption=f"Measured here: {model}, victims of {' and '.join(map(str, sorted(set(out.values()))))} tokens. "
    f"Medians of {turns} steps each, of {len(ordinary)} ordinary ones{threads}.",
)

# %% [markdown]
# On a CPU "swapping" is a copy from memory to memory, and computing is slow: a one-sided contest. Should a step with a
# copy look faster than an ordinary one, the copy is smaller than the noise of your machine.
#
# `preemption="auto"` measures both once, where it runs, and takes the faster.
#
# What must not depend on the choice is the answer.

# %%
from cbserve import Request, SamplingParams

params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
six = [Request(name, range(20 + i, 60 + i), params) for i, name in enumerate("ABCDEF")]


def answered(num_blocks, **how):
    llm = LLM("tiny", num_blocks=num_blocks, **roomy, **how)
    told = {output.request_id: output.outputs[0].token_ids for output in llm.engine.run(six)}
    return told, sum(e.num_swapped_blocks for e in llm.trace if e.type == "admitted")


undisturbed, _ = answered(64)
restored = {}
for name, how in {
    'preemption="swap"': {"preemption": "swap"},
    "the host has room for one page": {"preemption": "swap", "swap_space_bytes": whole.kv_bytes_per_token * 16},
}.items():
    told, came_back = answered(20, **how)
    restored[name] = came_back if told == undisturbed else 0
    print(f"{name}: {came_back} pages came back; the answers are the same: {told == undisturbed}")
claim("supports-swap", restored=restored)

# %% [markdown]
# With a full host the engine recomputes. So swapping is a property of an engine, not of paging.
#
# ## Super-linear?
#
# Exercise 5 of the lecture asks why prefix caching and continuous batching together scale *super-linearly* when many
# requests share a system prompt. Before you explain something, check that it happens. Two effects are real.
#
# **Less work.** A share $f$ of the time is prefill and a share $h$ of the prefill is found: at most $1 / (1 - f h)$
# times as fast. With $f = 0.5$ and $h = 0.9$: 1.8 times.
#
# **More requests.** Of the $c$ tokens of a request $s$ are shared, and stored once. In a pool of $M$ tokens fit
# $(M - s) / (c - s)$ requests instead of $M / c$.
#
# Separate them: 1,024 shared tokens, 128 own, 128 to write; a pool of 16,384. Without sharing 12 fit, with it 60.
#
# **Predict.** What gains more: 60 slots without the cache, or the cache with 12 slots? And both together?

# %%
questions = [systems[0] + tokens(128) for _ in range(64)]


def throughput(slots, caching):
    trace = serve(
        [128] * len(questions),
        ContinuousBatching(max_num_seqs=slots),
        prompts=questions,
        num_blocks=POOL_TOKENS // 16,
        enable_prefix_caching=caching,
        step_time_s=a100,
    )
    return summarize(trace).tokens_per_s


speed = {(slots, caching): throughput(slots, caching) for slots in (12, 60) for caching in (False, True)}
base = speed[12, False]
table(
    ["slots", "no prefix cache", "prefix cache"],
    [
        [slots, *(f"{speed[slots, c]:.0f} tokens/s, {speed[slots, c] / base:.2f}x" for c in (False, True))]
        for slots in (12, 60)
    ],
    caption="Simulated: Llama-3.1-8B step times on an A100, pool of 1,024 pages.",
)

# %% [markdown]
# More slots alone gain nearly nothing, since the pool is full. The cache alone gains from less work. Together they gain
# more than the sum of both (*super-additive*) and even more than the product. It is one factor, though, and it is
# bounded. Nothing here grows faster than the load.
#
# Scaling is a question about *n times as much*. So ask it: eight times the slots, and four times the replicas. For
# replicas a router has to choose: in turn, or all requests of one system prompt to the same replica.
#
# **Predict, then run.** Which of these gives more than four times the throughput of one?
#
# | your guess | why someone would say that |
# |---|---|
# | four replicas, in turn | four caches; but each sees all eight system prompts, and keeps what one could keep |
# | four replicas, by prompt | each sees two system prompts, and those fit |
# | four large replicas, by prompt | everything fits; and did so in the one that you compare with |


# %%
def scaling(num_blocks, share):
    """Throughput of four replicas over four times that of one. `share` says which replica takes a request."""
    parts = [[r for i, r in enumerate(asked) if share(i, r[0]) == n] for n in range(4)]
    slowest = max(replica(part, num_blocks).steps[-1].end_s for part in parts)
    return (alone[num_blocks] if num_blocks in alone else replica(asked, num_blocks)).steps[-1].end_s / (4 * slowest)


scaled = {
    "8 times the slots": throughput(8, True) / (8 * throughput(1, True)),
    "4 replicas of 240 pages, in turn": scaling(240, lambda i, k: i % 4),
    "4 replicas of 240 pages, by prompt": scaling(240, lambda i, k: k % 4),
    "4 replicas of 800 pages, by prompt": scaling(800, lambda i, k: k % 4),
}
claim("super-linear", scaling=scaled, label="simulated for Llama-3.1-8B on A100s")

# %% [markdown]
# Read 1x as linear: 2x from four replicas is eight times the work of one. It holds on three conditions: more replicas
# mean more cache, *and* the router keeps equal prefixes together, *and* the working set did not fit before. Once
# everything fits, scaling is linear at best. Against the batch size it never was super-linear.
#
# ## Your own lengths
#
# Edit the lists: prompt and answer lengths of *your* requests, and your model.

# %%
my_prompts = [350, 1200, 80, 600]
my_answers = [120, 40, 300, 220]
my_model = MODELS["Llama-3.1-8B"]
my_longest = 4096

needed = sum(p + a for p, a in zip(my_prompts, my_answers, strict=True))
pages = sum(-(-(p + a) // 16) for p, a in zip(my_prompts, my_answers, strict=True))
GB = 1e9
rows = [
    ["the maximum", len(my_prompts) * my_longest],
    ["exactly, known beforehand", needed],
    ["pages of 16", 16 * pages],
]
table(
    ["reserved", "tokens", "GB at the end", "of it used"],
    [[name, held, f"{held * my_model.kv_bytes_per_token() / GB:.3f}", f"{needed / held:.1%}"] for name, held in rows],
    caption=f"Computed for {my_model.name} in 16 bits, when all answers are complete.",
)

# %%
mine = serve(my_answers, prompt_tokens=my_prompts, block_size=256)  # larger pages, a smaller picture
page_map(mine)

# %% [markdown]
# ## Limits, and what others do
#
# - **vLLM** began with this chapter's design. Its kernels are fast today, prefix caching is on by default, and
#   preemption only recomputes. It takes a hit by hash, as this engine does.
# - **SGLang** keeps known prefixes in a *radix tree*, whose paths are prefixes, and orders its queue by them.
#   **TensorRT-LLM** can promise never to evict a running request.
# - **Copies on the host came back** for prefixes: with pages of 0.5 to 2 MB, vLLM 0.12 moves them at about 50 GB/s over
#   PCIe Gen5. Running requests are not moved.
# - **Prefix caching is not free.** Hashing costs a little on every prompt; vLLM's first benchmark lost 2 to 8 % where
#   nothing was shared.
#
# **Of this chapter:** attention was timed on a CPU, in torch and in C, not in a GPU kernel. Recomputing was priced
# without the attention of its prefill. All requests of a simulation wait from the start.
#
# ## Take-aways
#
# - Reserving wastes most of the memory; pages waste half a page a request. More requests fit, and that is the whole
#   gain.
# - A page takes 2 x layers x *KV heads* x head size x tokens x bytes a value.
# - Samples share by copy-on-write, strangers by prefix cache: full pages only, from the first token on.
# - Swap or recompute is bytes over a link against operations over a GPU. Measure it.
#
# ## Decide
#
# **1.** Your pool has 2,000 pages of 16 tokens. All requests share a system prompt of 1,600 tokens and hold 400 of
# their own. How many fit with prefix caching, and how many without?
#
# <details><summary>an answer</summary>
# Without: 2,000 tokens are 125 pages, so 16 fit. With: 100 pages once, then 25 for each: (2,000 - 100) / 25 = 76. If
# the prompt begins with the user's name, still 16: the chain breaks at its root. Put what is shared first.
# </details>
#
# **2.** A colleague proposes pages of 256 tokens, since transfers to the host are faster then. Your requests have 20
# prompt tokens and 60 to write. Do you agree?
#
# <details><summary>an answer</summary>
# No. Each request would hold 256 places and use 50 on average, a fifth. And no prompt would ever be found again, for
# none fills a page. For documents of 20,000 tokens it would be a good idea.
# </details>
#
# **3.** You run four replicas behind a round-robin balancer. Each has a hit rate of 35 %, and 20 customers have system
# prompts of 3,000 tokens. Do you buy a fifth replica or change the router?
#
# <details><summary>an answer</summary>
# The router first. By customer each replica sees five system prompts instead of 20, and if those fit, the hit rate
# rises for nothing. Watch the load: the largest customer may fill a replica alone, so let it spill over to a second
# one.
# </details>
#
# ## Your ledger
#
# A claim that says *not measured here* waits for its turn: `max-concurrency` is tested in lab 2.

# %%
from cbserve import ledger

ledger()

# %% [markdown]
# ## Read on
#
# - Kwon et al., [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), SOSP 2023: section 4, and figures 2, 18 and 19.
# - vLLM, [the announcement of June 2023](https://blog.vllm.ai/2023/06/20/vllm.html): 60 to 80 % before, under 4 %
#   after.
# - Ainslie et al., [GQA](https://arxiv.org/abs/2305.13245), 2023: why $H_{kv}$ is small.
# - Zheng et al., [SGLang](https://arxiv.org/abs/2312.07104), NeurIPS 2024: prefixes in a radix tree.
# - vLLM, [Automatic prefix caching](https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html).
# - Qin et al., [Mooncake](https://arxiv.org/abs/2407.00079), FAST 2025: when the cache outgrows the GPU.
#
# Next: [lab 3](../work/lab3_paged_attention.ipynb), your copy in `work/` (on GitHub, Colab and Binder:
# [the original](../labs/lab3_paged_attention.ipynb)). You write the pool and the attention, and the engine runs on
# yours.
