# %% [markdown]
# # Lab 2: write the scheduler that refills
#
# {{badges}}
#
# In lab 1 a customer whose answer has 20 tokens waited 100 steps. A slot stood free for 90 of them. Nobody was allowed
# to take it.
#
# Here you write the four duties, two bounds and the size of a pool. The duties let her in: who is complete, who
# leaves, who is admitted, and who must make room for somebody more urgent. The engine that runs them is the one that
# serves a real model. It has no second scheduler for exercises: if your decision is wrong, real requests wait.
#
# **Afterwards you can** write the four duties of an iteration, two bounds on what continuous batching can gain, and
# the size of a KV pool with the units named.
#
# **Checks and hints.** Replace each `...`, run the cell, then the check below it. A check names the rule that is
# broken and draws the first wrong step. `hint("lab2.ex1")` gives three hints, one a call. Everything here runs on a
# CPU.
#
# **Where to work.** In your own copy, which `make lab` has put into the folder `work/`:
# [open it](../work/lab2_continuous_batching.ipynb). If the path of this notebook begins with `labs/`, you are in the
# original, and what you write changes the course. (Colab and Binder have no such folder; there you use the original.)
#
# You need chapter 2 and lab 1, and about 80 minutes.

# %%
# {{colab}}

# %% tags=["parameters"]
device = "cpu"
seed = 0
size = "small"  # "large" serves SmolLM2-135M and prints its answers, instead of a tiny random model

# %%
import math
import statistics

from IPython.display import display

from cbserve import (
    LLM,
    ContinuousBatching,
    Preempted,
    Priority,
    SamplingParams,
    Scheduler,
    StaticBatching,
    azure,
    bars,
    check,
    claim,
    hint,
    ledger,
    progress,
    sequence_metrics,
    serve,
    slot_utilisation,
    solved,
    summarize,
    table,
    timeline,
)


def later(*ids):
    print(f"This cell runs your own code: solve {' and '.join(ids)} first, then run it again.")


# %% [markdown]
# ## One iteration, four duties
#
# After each step the scheduler looks at who is complete (1) and lets them go (2). Before the next step it admits who
# has room (3), and sees whether somebody urgent needs a place (4).
#
# The class that decides is `Scheduler`. Each duty is a method, and a subclass may override it. You override one at a
# time; the engine keeps its own version of the others. Here are six requests on two slots, static and refilled.

# %%
asked = [6, 14, 5, 3, 9, 4]
timeline(
    serve(asked, StaticBatching(batch_size=2)),
    serve(asked, ContinuousBatching(max_num_seqs=2)),
)

# %% [markdown]
# ## Who is complete, who leaves
#
# A *sequence* is one answer in the making. After each step the engine asks `retire` who leaves. What leaves gives back
# its slot and its *blocks*, the pieces of KV cache that the lecture calls pages.
#
# {{card lab2.ex1}}
#
# **`is_complete(...)`**: the last id in the list is the new one. It completes the answer if it is one of
# `eos_token_ids` and the request did not say `ignore_eos`, or if it is number `max_tokens`.
#
# **`retire(self)`** returns all complete sequences of `self.running`. What you need: `seq.output_token_ids`,
# `seq.max_tokens`, `seq.request.params.ignore_eos`, `self.stop_checker.eos_token_ids`. A sequence whose prompt is not
# finished has no output token.
#
# **Worked example.** `is_complete([17, 0], 10, [0], False)` is True: token 0 is the EOS. With `ignore_eos=True` it is
# False.


# %% tags=["exercise"]
# exercise: lab2.ex1
def is_complete(output_token_ids, max_tokens, eos_token_ids, ignore_eos):
    """Whether the answer ends with its newest token."""
    # BEGIN SOLUTION
    # STUB: ...
    ends_itself = output_token_ids[-1] in eos_token_ids and not ignore_eos
    return ends_itself or len(output_token_ids) >= max_tokens
    # END SOLUTION


class Retiring(Scheduler):
    def retire(self):
        """The running sequences that are complete."""
        # BEGIN SOLUTION
        # STUB: ...
        eos = self.stop_checker.eos_token_ids
        return [
            seq
            for seq in self.running
            if seq.output_token_ids
            and is_complete(seq.output_token_ids, seq.max_tokens, eos, seq.request.params.ignore_eos)
        ]
        # END SOLUTION


# %%
check("lab2.ex1", is_complete, Retiring, seed=seed)

# %% [markdown]
# **Predict, then run.** The engine below runs your `retire`: 41 tokens for two slots. How many slot-steps are lost,
# and when: at each change of place, or at the end?

# %%
if solved("lab2.ex1"):
    trace = serve(asked, ContinuousBatching(max_num_seqs=2), scheduler=Retiring)
    lost = [2 - sum(row.num_sampled for row in step.rows) for step in trace.steps]
    drain = sum(lost[step.step] for step in trace.steps if not step.num_waiting)
    paid = f"{len(trace.steps)} steps x 2 slots = {2 * len(trace.steps)} slot-steps for {sum(asked)} tokens"
    display(timeline(trace, title=f"{paid}: {sum(lost)} are lost, {drain} of them after the queue is empty"))
else:
    later("lab2.ex1")

# %% [markdown]
# The lost ones all lie in the *drain*: one answer runs on alone, and the other slot finds nobody. While somebody
# waited, none was lost.
#
# ## Who is admitted
#
# Three things can be missing: a slot, a place in the step's token budget, and blocks of KV cache.
#
# **Predict, then run.** Three slots and 3 blocks of 4 tokens. A, B and C have prompts of 8, 8 and 1 tokens. A takes 2
# blocks in step 0. B needs 2, C needs one, and one is free: who starts beside A?

# %%
trace = serve([3, 1, 3], ContinuousBatching(max_num_seqs=3), prompt_tokens=[8, 8, 1], num_blocks=3, block_size=4)
timeline(trace, title=f"Rows in step 0: {len(trace.steps[0].rows)}, on 3 slots; {trace.steps[0].num_waiting} wait")

# %% [markdown]
# Nobody. The first in the queue is asked first; if it has no room, nobody behind it is asked. A long request at the
# head would otherwise be passed by short ones for ever.
#
# {{card lab2.ex2}}
#
# `admit(self, step)` yields waiting sequences while there is room for this step's tokens; nothing is kept for later
# ones. The scheduler seats each before it asks for the next, so what you ask is up to date.
#
# | you ask | you get |
# |---|---|
# | `self.policy.peek()` | the first in the queue, or None; taken out when you yield it |
# | `self.free_slots` | a list of the free slots |
# | `self.num_new_tokens(seq, step)` | its tokens that this step can compute; 0: the budget is used up |
# | `self.kv.num_cached_tokens(seq)` | its tokens that the cache holds already |
# | `self.kv.blocks_needed(seq, num_tokens)` | new blocks so that it holds `num_tokens` tokens, cached ones included |
# | `self.kv.num_free_blocks` | free blocks in the pool |
#
# `self.blocked(seq, step)` would answer for you: write the conditions first, and read it afterwards. The check refuses
# it, and `super()` of any duty.


# %% tags=["exercise"]
# exercise: lab2.ex2
class Admitting(Scheduler):
    def admit(self, step):
        """Waiting sequences that join this step, in the queue's order, while there is room."""
        # BEGIN SOLUTION
        # STUB: ...
        while (seq := self.policy.peek()) is not None:
            if not self.free_slots:
                return
            num_tokens = self.num_new_tokens(seq, step)
            if num_tokens == 0:
                return
            num_tokens += self.kv.num_cached_tokens(seq)
            if self.kv.blocks_needed(seq, num_tokens) > self.kv.num_free_blocks:
                return
            yield seq
        # END SOLUTION


# %%
check("lab2.ex2", Admitting, seed=seed)

# %% [markdown]
# Now both of your duties in one scheduler, around a model that multiplies matrices. *Measured here.*


# %%
class MyScheduler(Retiring, Admitting):
    """retire from exercise 1, admit from exercise 2."""


if solved("lab2.ex1") and solved("lab2.ex2"):
    model = "tiny" if size == "small" else "smollm2-135m"
    batching = ContinuousBatching(max_num_seqs=3)
    llm = LLM(model, device=device, scheduler=MyScheduler, batching=batching, verbose=False, debug=True)
    trace = serve([12, 30, 7, 18, 45, 9, 25, 6], llm=llm)
    same = serve([12, 30, 7, 18, 45, 9, 25, 6], batching)
    yours, engines = ([[row[:3] for row in step.rows] for step in run.steps] for run in (trace, same))
    agree = "as the engine's own would" if yours == engines else "in another way than the engine's own"
    display(timeline(trace, title=f"{llm.config.name}, scheduled by you in {len(trace.steps)} steps, {agree}"))
else:
    later("lab2.ex1", "lab2.ex2")

# %% [markdown]
# **Pitfall 1 of the lecture** is in your code: you admit by the memory of one step. Watch what a small pool does. A
# cross marks a *preemption*: somebody gave back slot and blocks, and will compute those tokens again.

# %%
if solved("lab2.ex1") and solved("lab2.ex2"):
    crowded = {
        blocks: serve([40] * 6, ContinuousBatching(max_num_seqs=6), scheduler=MyScheduler, num_blocks=blocks)
        for blocks in (18, 10)
    }
    display(timeline(*crowded.values(), labels=[f"{blocks} blocks of 16 tokens" for blocks in crowded]))
    claim(
        "pitfall-1",
        label="simulated: your scheduler on a virtual clock",
        preemptions={f"{blocks} blocks": summarize(run).num_preemptions for blocks, run in crowded.items()},
    )
else:
    later("lab2.ex1", "lab2.ex2")

# %% [markdown]
# vLLM V1 does what you did: blocks for this step, and preemption by recomputing when they run out. The other choice is
# to keep blocks for the longest answer that each request may give, as Orca did: no preemption, and many empty blocks.
#
# ## How much can refilling gain?
#
# Before you measure, ask what no scheduler can beat. Two limits hold at the same time. All slots together give at most
# `slots` tokens a step. And a single answer gives one token a step.
#
# {{card lab2.ex3}}
#
# `continuous_bound(lengths, slots)` returns the fewest steps in which any scheduler can give all the tokens, a whole
# number.
#
# **Worked example.** `continuous_bound([4, 4, 4, 4, 5], 3)`: 21 tokens on 3 slots are 7 steps; the longest takes 5. So
# 7.


# %% tags=["exercise"]
# exercise: lab2.ex3
def continuous_bound(lengths, slots):
    """The fewest steps that any scheduler can need."""
    # BEGIN SOLUTION
    # STUB: ...
    return max(math.ceil(sum(lengths) / slots), max(lengths))
    # END SOLUTION


# %%
check("lab2.ex3", continuous_bound, seed=seed)

# %% [markdown]
# {{card lab2.ex4}}
#
# `speedup_bound(lengths, slots)` returns how many times fewer steps the bound has than static batches of `slots`
# requests, in order of arrival.
#
# **Worked example.** `speedup_bound([4, 4, 4, 4, 5], 3)`: static batches take 4 + 5 = 9 steps, the bound is 7. So 9 / 7
# ≈ 1.286, not rounded.


# %% tags=["exercise"]
# exercise: lab2.ex4
def speedup_bound(lengths, slots):
    """Static steps over the fewest possible steps."""
    # BEGIN SOLUTION
    # STUB: ...
    static = sum(max(lengths[first : first + slots]) for first in range(0, len(lengths), slots))
    return static / continuous_bound(lengths, slots)
    # END SOLUTION


# %%
check("lab2.ex4", speedup_bound, seed=seed)

# %% [markdown]
# **Predict, then run.** 96 chat answers on 8 slots. Does your scheduler, which serves in order of arrival and knows no
# length, come within 5 % of the bound, within 20 %, or not even near?

# %%
if all(map(solved, ("lab2.ex1", "lab2.ex2", "lab2.ex3", "lab2.ex4"))):
    answers = azure("conv").sample_output(96, seed)
    static = serve(answers, StaticBatching(batch_size=8))
    yours = serve(answers, ContinuousBatching(max_num_seqs=8), scheduler=MyScheduler)
    bound = continuous_bound(answers, 8)
    over = len(yours.steps) / bound - 1
    display(
        bars(
            ["static batches of 8", "your scheduler", "no scheduler can do better"],
            [len(static.steps), len(yours.steps), bound],
            unit="steps",
            title=f"Your scheduler is {over:.0%} above the bound, which allows {speedup_bound(answers, 8):.2f}x",
            caption="96 answers sampled from the Azure chat trace 2023 (CC-BY-4.0), 8 slots, simulated.",
        )
    )
    last_arrival = max(step.step for step in yours.steps if step.num_waiting)
    busy = [row.num_sampled for step in yours.steps[: last_arrival + 1] for row in step.rows]
    claim(
        "utilisation-100",
        label="simulated: your scheduler on a virtual clock",
        utilisation={
            "while somebody waits": sum(busy) / (8 * (last_arrival + 1)),
            "with the drain at the end": slot_utilisation(yours),
        },
    )
else:
    later("lab2.ex1", "lab2.ex2", "lab2.ex3", "lab2.ex4")

# %% [markdown]
# Steps are not seconds. A step with eight rows costs more than one with three, and prompts cost steps too. So here is
# the clock of this machine: the same requests, through static batches and through your scheduler. *Measured here.*

# %%
if solved("lab2.ex1") and solved("lab2.ex2"):
    wanted = [max(1, n // 4) for n in azure("conv").sample_output(32, seed)]
    ways = {"static batches of 8": {"batching": StaticBatching(batch_size=8)}}
    ways["your scheduler, 8 slots"] = {"batching": ContinuousBatching(max_num_seqs=8), "scheduler": MyScheduler}
    engines = {name: LLM(model, device=device, verbose=False, **how) for name, how in ways.items()}
    runs = {name: [] for name in ways}
    for _ in range(3):  # in turn, since other work on this machine slows both; the medians are shown
        for name, llm in engines.items():
            runs[name].append(summarize(serve(wanted, llm=llm)).tokens_per_s)
    speeds = {name: statistics.median(found) for name, found in runs.items()}
    slow, fast = speeds.values()
    display(
        bars(
            list(speeds),
            list(speeds.values()),
            unit="tokens/s",
            title=f"Your scheduler serves {fast / slow:.2f} times as many tokens a second",
            caption=f"Measured here: {llm.config.name} on {llm.device}, 32 answers, Azure chat over 4; medians.",
        )
    )
    claim("speedup-2-3x", speedup={f"{llm.config.name}, 8 slots": fast / slow})
else:
    later("lab2.ex1", "lab2.ex2")

# %%
if solved("lab2.ex1") and solved("lab2.ex2") and size != "small":
    outputs = llm.generate(
        ["The best thing about a queue is", "A scheduler is", "Once a slot is free,"],
        SamplingParams(max_tokens=24, temperature=0),
        use_tqdm=False,
    )
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
else:
    print('size = "large" lets SmolLM2-135M speak through your scheduler')

# %% [markdown]
# ## Exercise 2 of the handout
#
# "Compute the maximum concurrent requests for an 80GB GPU serving a 7B model (14GB weights) with per-token KV-cache of
# 160KB and average context 2048 tokens." One sentence, and three right answers: it depends on what GB and KB mean, and
# on how much of the memory may be used.
#
# | | decimal | binary |
# |---|---|---|
# | giga | 1 GB = 10^9 bytes | 1 GiB = 2^30 bytes |
# | kilo | 1 kB = 10^3 bytes | 1 KiB = 2^10 bytes |
#
# {{card lab2.ex5}}
#
# `max_requests(gpu_bytes, weights_bytes, kv_bytes_per_token, context_tokens, memory_share=1.0)` returns how many
# requests fit when each holds `context_tokens` tokens. All sizes are bytes. `memory_share` is the part of the *whole*
# GPU memory that the engine may use, weights included (vLLM's `gpu_memory_utilization`). When nothing fits, the answer
# is 0.
#
# **Worked example.** 24 GB, weights of 14 GB, 512 KiB a token, 1,000 tokens, everything used: 10^10 bytes are left, a
# request takes 524,288,000. 19 fit, and a 20th would not.


# %% tags=["exercise"]
# exercise: lab2.ex5
def max_requests(gpu_bytes, weights_bytes, kv_bytes_per_token, context_tokens, memory_share=1.0):
    """How many requests of full context fit into the memory beside the weights."""
    # BEGIN SOLUTION
    # STUB: ...
    room = memory_share * gpu_bytes - weights_bytes
    return max(0, math.floor(room / (kv_bytes_per_token * context_tokens)))
    # END SOLUTION


# %%
check("lab2.ex5", max_requests, seed=seed)

# %% [markdown]
# **Predict, then run.** Three readings of the handout, then models that exist. Which 7B model has 160 KB a token?

# %%
GB, KB, GIB, KIB = 10**9, 10**3, 2**30, 2**10

if solved("lab2.ex5"):
    readings = {
        "decimal, all of it": max_requests(80 * GB, 14 * GB, 160 * KB, 2048),
        "binary, all of it": max_requests(80 * GIB, 14 * GIB, 160 * KIB, 2048),
        "decimal, 90 % of it": max_requests(80 * GB, 14 * GB, 160 * KB, 2048, 0.9),
    }
    claim("max-concurrency", label="simulated: computed by your function", requests=readings)
    # layers, KV heads, head size; K and V, 2 bytes each (float16)
    models = {"Llama-2-7B": (32, 32, 128), "Mistral-7B": (32, 8, 128), "Qwen2.5-7B": (28, 4, 128)}
    rows = []
    for name, (layers, kv_heads, head_size) in models.items():
        token_bytes = 2 * layers * kv_heads * head_size * 2
        fits = [max_requests(80 * GB, 14 * GB, token_bytes, 2048, share) for share in (1.0, 0.9)]
        rows.append([name, f"2 x {layers} x {kv_heads} x {head_size} x 2", f"{token_bytes // KIB} KiB", *fits])
    display(
        table(["model", "K and V x layers x KV heads x head size x 2 bytes", "a token", "fit", "fit at 90 %"], rows)
    )
else:
    later("lab2.ex5")

# %% [markdown]
# None. 160 KiB is 40 layers with 8 KV heads of 128: a model of 12 to 14 billion parameters. A 7B model with as many KV
# heads as query heads needs 512 KiB a token, one with *grouped-query attention* 128 or 56. KV heads decide, not size.
#
# One limit: the formula fills every context to its end. Real requests are mostly half grown, so engines admit more and
# preempt when they must. Activations and CUDA graphs take another 1 to 4 GB.

# %% [markdown]
# ## Who makes room
#
# **Predict, then run.** D pays for speed and arrives in step 6. Both slots are taken, and C waits too. Priority alone,
# without a fourth duty: in which step does D start?

# %%
situation = {"arrivals_s": [0, 1, 2, 6, 7], "priorities": [1, 1, 1, 0, 1]}
trace = serve([18, 16, 12, 5, 6], ContinuousBatching(max_num_seqs=2), policy=Priority(), **situation)
wait = next(m.ttft_s for m in sequence_metrics(trace) if m.request_id == "D")
timeline(trace, title=f"D arrives in step 6; her first token is there {wait:.0f} steps later")

# %% [markdown]
# D passes C in the queue, and waits for a slot all the same. The fourth duty asks the *policy*, which owns the queue,
# whose place she takes. A smaller `priority` number is more urgent.
#
# {{card lab2.ex6}}
#
# `displaces(self, candidate, running, now_s)` returns the running sequence that goes, or None: `candidate` waits. You
# need `seq.request.priority` and `seq.arrival_s`.
#
# - The least urgent of `running` goes; among equals the latest arrival, which has the least to lose.
# - It goes only if the candidate is strictly more urgent. Two equals would throw each other out in turn.
#
# **Worked example.** A and B run, priority 1, arrived at 0 and 1. C with priority 0 takes the place of B. With
# priority 1 it would wait.


# %% tags=["exercise"]
# exercise: lab2.ex6
class PremiumFirst(Priority):
    def displaces(self, candidate, running, now_s):
        """The running sequence whose place the candidate takes, or None."""
        # BEGIN SOLUTION
        # STUB: ...
        victim = max(running, key=lambda seq: (seq.request.priority, seq.arrival_s))
        return victim if candidate.request.priority < victim.request.priority else None
        # END SOLUTION


# %%
check("lab2.ex6", PremiumFirst, seed=seed)

# %% [markdown]
# **Predict, then run.** The same five with your `displaces`; who goes queues again and computes its tokens anew. How
# much sooner is D's first token there, and what do the others pay?

# %%
if solved("lab2.ex6"):
    runs = {
        name: serve([18, 16, 12, 5, 6], ContinuousBatching(max_num_seqs=2), policy=policy, **situation)
        for name, policy in {"it waits": Priority(), "your displaces": PremiumFirst()}.items()
    }
    waits = [next(m.ttft_s for m in sequence_metrics(run) if m.request_id == "D") for run in runs.values()]
    again = sum(event.num_computed_tokens for event in runs["your displaces"].of(Preempted))
    title = f"D's first token comes {waits[0] - waits[1]:.0f} steps sooner; {again} tokens are computed again"
    display(timeline(*runs.values(), labels=list(runs), title=title))
else:
    later("lab2.ex6")

# %% [markdown]
# One limit: under a steady stream of premium requests the standard ones starve. Production engines add ageing, quotas,
# or separate pools; the lecture's list of policies is where chapter 2 leaves off.
#
# ## Where you stand

# %%
progress()

# %%
ledger()

# %% [markdown]
# ## Decide
#
# 1. Your pool has 2,000 blocks of 16 tokens, prompts have 1,000 tokens and answers up to 1,000. 24 slots or 64? Say
#    what happens at each when all answers turn out long, and what you would watch to notice.
# 2. Your bound says 1.3 times fewer steps, and somebody promises a manager "2 to 3 times". Which property of your
#    requests makes the bound so small, and what else, besides the scheduler, could make up the rest?
# 3. A request of 30,000 prompt tokens stands at the head of the queue and does not fit for minutes. Forty short ones
#    wait behind it. Do you let them pass? Say what you promise to whom, and how the long one still gets in.
#
# The solved lab, `solutions/lab2_continuous_batching.ipynb`, has an answer to each.

# %% [markdown] tags=["solution"]
# ## Decide: one answer to each
#
# 1. A request needs 63 blocks for its prompt and 125 at most, so 31 get in and 16 fit at their full length. With 24
#    slots all get in, and when all answers turn out long the pool is full after about 330 tokens (2,000 / 24 = 83
#    blocks each); from there on preemptions push out eight of them, one by one, 1,300 tokens to compute again each
#    time. With 64 slots the slots decide nothing: 31 run, and the pool is full after two dozen tokens. Take 16 to 24,
#    and watch preemptions, tokens computed again, and the p99 gap between two tokens.
# 2. Answers of nearly equal length: static batches waste little, so there is little to win. (A single answer that is
#    as long as all the others over the slots does it too: it is the second wall.) What else may help is no scheduling:
#    more slots, because paged memory reserves nothing; a prefix cache; better kernels; smaller weights.
# 3. Let them pass, with a limit. To the short ones: you do not wait for a request that cannot start anyway. To the long
#    one: after so many seconds nobody passes you any more; blocks that fall free are kept for you, so you start at the
#    latest when the longest running answer is complete. Without the limit it may starve. If such requests are common,
#    give them a pool of their own.

# %% [markdown]
# ## Links
#
# - Yu et al. 2022, *Orca*, OSDI, section 3.1:
#   [iteration-level scheduling](https://www.usenix.org/conference/osdi22/presentation/yu)
# - Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP, section
#   4: [blocks, preemption, recomputation](https://arxiv.org/abs/2309.06180)
# - vLLM, [V1 guide](https://docs.vllm.ai/en/latest/usage/v1_guide.html): a production scheduler that admits by the
#   memory of this step and preempts by recomputing
# - Ainslie et al. 2023, [GQA](https://arxiv.org/abs/2305.13245): why 8 KV heads replaced 32
# - Before: [lab 1](lab1_static_waste.ipynb) and chapter 2.
