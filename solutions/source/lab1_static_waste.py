# %% [markdown]
# # Lab 1: what a static batch throws away
#
# {{badges}}
#
# A support team runs a chat model. Eight customers share a batch. Seven of them have their answers after a few
# seconds, and the eighth asked for a travel plan. Until the plan is complete, seven seats compute tokens that nobody
# reads, and the ninth customer waits in front of a machine that reports itself busy.
#
# In this lab you put a number on that. Then you predict the engine to the step, and test two sentences of the lecture.
#
# **Afterwards you can** compute utilisation and waste of static batches, say what to expect before anything has run,
# and tell how much a queue, not a scheduler, decides.
#
# **Checks and hints.** Replace each `...`, run the cell, then the check below it. A check names the rule that is
# broken. `hint("lab1.ex1")` gives the first of three hints, the next call the next one. Everything here runs on a CPU.
#
# **Where to work.** In your own copy, which `make lab` has put into the folder `work/`:
# [open it](../work/lab1_static_waste.ipynb). If the path of this notebook begins with `labs/`, you are in the
# original, and what you write changes the course. (Colab and Binder have no such folder; there you use the original.)
#
# You need chapter 1, and about 50 minutes.

# %%
# {{colab}}

# %% tags=["parameters"]
device = "cpu"
seed = 0
size = "small"  # "large" draws ten times as many lengths, and measures SmolLM2-135M instead of a tiny random model

# %%
import math

from IPython.display import display

from cbserve import (
    LLM,
    ContinuousBatching,
    Finished,
    StaticBatching,
    azure,
    bars,
    check,
    claim,
    exponential,
    hint,
    ledger,
    lines,
    progress,
    serve,
    slot_utilisation,
    solved,
    timeline,
)

num_lengths = 4_096 if size == "small" else 40_960


def later(id):
    print(f"This cell draws something from your own function: solve {id} first, then run it again.")


# %% [markdown]
# ## One batch
#
# Three answers, 10, 100 and 500 tokens long, share one batch. Each step gives every running answer one token. A row
# that is complete stays in the batch until the longest is done.

# %%
timeline(serve([10, 100, 500], StaticBatching(batch_size=3)))

# %% [markdown]
# A *slot-step* is one slot in one step: the smallest thing you pay for. *Slot utilisation* is the share of slot-steps
# that gave a token which somebody gets.
#
# {{card lab1.ex1}}
#
# `utilisation(lengths)` gets the lengths of the answers in one batch, in tokens, and returns its slot utilisation as a
# share between 0 and 1. There are as many slots as answers.
#
# **Worked example.** `[10, 100, 500]`: 610 useful slot-steps, and 3 slots for 500 steps are 1,500. The share is 610 /
# 1,500 ≈ 0.4067. Return the full number; the text rounds, the check does not.


# %% tags=["exercise"]
# exercise: lab1.ex1
def utilisation(lengths):
    """Slot utilisation of one static batch, a share between 0 and 1."""
    # BEGIN SOLUTION
    # STUB: ...
    return sum(lengths) / (len(lengths) * max(lengths))
    # END SOLUTION


# %%
check("lab1.ex1", utilisation, seed=seed)

# %% [markdown]
# **Predict, then run.** Eight real chat answers, drawn from the Azure trace of 2023, in one batch. How much is
# hatched: a quarter, half, or three quarters?

# %%
if solved("lab1.ex1"):
    batch = azure("conv").sample_output(8, seed)
    trace = serve(batch, StaticBatching(batch_size=8))
    title = f"Your function says {utilisation(batch):.1%}, the engine's trace says {slot_utilisation(trace):.1%}"
    display(timeline(trace, title=title))
else:
    later("lab1.ex1")

# %% [markdown]
# ## A queue of batches
#
# With 20 requests and 8 slots there are three batches, and the last one holds four requests.
#
# {{card lab1.ex2}}
#
# `waste(lengths, batch_size)` returns how many slot-steps gave no token. Batches are filled in order of arrival:
# nobody knows a length before the answer is complete, so nobody can sort. The next batch starts when the whole batch
# before it has ended.
#
# **An empty slot counts.** The last batch may have fewer requests than slots. Its empty slots compute nothing, but
# static batching gives them to nobody until the batch ends, and the machine was bought for all of them. The engine's
# trace counts the same way.
#
# **Worked example.** `waste([10, 100, 500, 20, 60], 3)`: the first batch holds 1,500 slot-steps, the second 3 x 60 =
# 180. Of these 1,680, 690 gave a token. 990 are waste.


# %% tags=["exercise"]
# exercise: lab1.ex2
def waste(lengths, batch_size):
    """Slot-steps of static batching that give no token, empty slots of the last batch included."""
    # BEGIN SOLUTION
    # STUB: ...
    paid = 0
    for first in range(0, len(lengths), batch_size):
        paid += batch_size * max(lengths[first : first + batch_size])
    return paid - sum(lengths)
    # END SOLUTION


# %%
check("lab1.ex2", waste, seed=seed)

# %% [markdown]
# **Predict, then run.** The same chat answers in batches of 2, 4, ... 64. Does a larger batch waste a larger share, a
# smaller one, or the same?

# %%
if solved("lab1.ex2"):
    answers = azure("conv").sample_output(num_lengths, seed)
    sizes = [2, 4, 8, 16, 32, 64]
    thrown = [waste(answers, b) / (waste(answers, b) + sum(answers)) for b in sizes]
    display(
        bars(
            [f"batches of {b}" for b in sizes],
            [round(100 * share, 1) for share in thrown],
            title=f"Azure chat: {thrown[0]:.0%} of the slot-steps are wasted at 2 slots, {thrown[-1]:.0%} at 64",
            unit="%",
            caption=f"Waste of {num_lengths:,} answers, computed by your function. Lengths sampled from the "
            "quantiles of the Azure LLM inference trace 2023 (Patel et al. 2024, CC-BY-4.0).",
        )
    )
else:
    later("lab1.ex2")

# %% [markdown]
# More slots make it more likely that one of them holds a long answer. Everybody else in the batch waits for that one.
#
# ## Before anything has run
#
# You are asked for a machine size before there is a trace. Take lengths that are *exponential*: at each token the
# chance that the answer ends is the same. Then the expected longest of B answers is known exactly.
#
# While k answers run, the next end comes after 1/k of a mean length, because any of the k may be it. So the longest of
# B takes 1/B + 1/(B-1) + ... + 1/2 + 1 means. This sum is called H_B, the *harmonic number* of B (Rényi 1953).
#
# {{card lab1.ex3}}
#
# `expected_utilisation(batch_size)` returns the mean length over the expected longest of `batch_size` exponential
# lengths. That is what pooled utilisation tends to over many full batches.
#
# **Worked example.** B = 2: the longest of two is 1 + 1/2 means long. The utilisation is 1 / 1.5 ≈ 0.6667, not rounded.


# %% tags=["exercise"]
# exercise: lab1.ex3
def expected_utilisation(batch_size):
    """Expected slot utilisation of static batches of exponential lengths."""
    # BEGIN SOLUTION
    # STUB: ...
    return 1 / sum(1 / k for k in range(1, batch_size + 1))
    # END SOLUTION


# %%
check("lab1.ex3", expected_utilisation, seed=seed)

# %% [markdown]
# **Predict, then run.** Below, your formula stands beside lengths that really are exponential and beside two real
# services: chat, and code completion. Which of them lies above your curve, and which below?

# %%
if solved("lab1.ex2") and solved("lab1.ex3"):
    sizes = [1, 2, 4, 8, 16, 32, 64]

    def measured(lengths):
        return [100 * sum(lengths) / (sum(lengths) + waste(lengths, b)) for b in sizes]

    curves = {
        "1 / H_B, your formula": [100 * expected_utilisation(b) for b in sizes],
        "exponential, sampled": measured(exponential(211, num_lengths, seed)),
        "Azure chat": measured(azure("conv").sample_output(num_lengths, seed)),
        "Azure code": measured(azure("code").sample_output(num_lengths, seed)),
    }
    formula, _, chat, code = (values[sizes.index(32)] for values in curves.values())
    display(
        lines(
            {name: (sizes, values) for name, values in curves.items()},
            title=f"At 32 slots: chat {chat:.0f} %, your formula {formula:.0f} %, code {code:.0f} %",
            x_name="slots, B",
            y_name="slot utilisation, %",
            log_x=True,
            caption=f"Static batches of {num_lengths:,} answers, pooled. Azure LLM inference trace 2023, CC-BY-4.0.",
        )
    )
else:
    later("lab1.ex2 and lab1.ex3")

# %% [markdown]
# Chat answers in this trace stop at 1,000 tokens and vary less than exponential ones, so they use more. Code answers
# are mostly tiny with a few very long ones, so they use less. The formula is a ruler, not a law.
#
# ## Predict the engine
#
# A prediction that cannot fail is worth nothing. The next one can: you say for each request in which step its last
# token comes, and a real engine with a real forward pass says whether you are right.
#
# {{card lab1.ex4}}
#
# `predict_steps(lengths, batch_size)` returns a list: for each request, in order of arrival, the number of the step
# that gives its last token. The first step is number 1. A request's first token comes out of the step that computes
# its prompt, so a request of 10 tokens in the first batch ends in step 10.
#
# **Worked example.** `predict_steps([10, 100, 50, 20, 40], 3)` is `[10, 100, 50, 120, 140]`. The fourth request waits
# 100 steps for 20 tokens.


# %% tags=["exercise"]
# exercise: lab1.ex4
def predict_steps(lengths, batch_size):
    """The step, counted from 1, in which each request gets its last token under static batching."""
    # BEGIN SOLUTION
    # STUB: ...
    steps, begin = [], 0
    for first in range(0, len(lengths), batch_size):
        batch = lengths[first : first + batch_size]
        steps += [begin + length for length in batch]
        begin += max(batch)
    return steps
    # END SOLUTION


# %%
check("lab1.ex4", predict_steps, seed=seed)

# %% [markdown]
# The check compared you with the engine's scheduler on a virtual clock. Here is the same scheduler around a model that
# multiplies real matrices. *Measured here.*

# %%
if solved("lab1.ex4"):
    asked = [12, 30, 7, 18, 45, 9, 25, 6]
    llm = LLM(
        "tiny" if size == "small" else "smollm2-135m",
        device=device,
        batching=StaticBatching(batch_size=3),
        verbose=False,
    )
    trace = serve(asked, llm=llm)
    ends = {event.request_id: event.step + 1 for event in trace.of(Finished)}
    steps_measured = [ends[name] for name in sorted(ends)]
    steps_predicted = predict_steps(asked, 3)
    late = steps_measured[-1] - asked[-1]
    right = sum(a == b for a, b in zip(steps_predicted, steps_measured, strict=True))
    display(timeline(trace))
    display(
        bars(
            [f"{name}: {length} tokens" for name, length in zip(sorted(ends), asked, strict=True)],
            {"predicted": steps_predicted, "measured": steps_measured},
            title=f"{right} of {len(asked)} predictions are exact; the last request waits {late} steps",
            caption=f"Step of the last token, measured here on {llm.config.name} ({llm.device}).",
        )
    )
else:
    later("lab1.ex4")

# %% [markdown]
# Look at the last request. Waste costs the owner of the machine; waiting costs the customer. Both come from the same
# rule: nobody enters before everybody has left.
#
# ## Exercise 1 of the handout
#
# "For requests with lengths T = [50, 150, 400, 80, 200]: compute static batching utilization vs continuous batching
# utilization (assuming infinite queue)." *Continuous batching* refills a slot in the step after it becomes free.
#
# **Predict, then run.** Five requests, five slots, and the queue is not infinite. Which of the two ends sooner?

# %%
T = [50, 150, 400, 80, 200]
timeline(
    serve(T, StaticBatching(batch_size=len(T))),
    serve(T, ContinuousBatching(max_num_seqs=len(T))),
)

# %% [markdown]
# Neither: a free slot finds nobody waiting. The words in brackets decide the answer, so you compute it for a queue
# that holds the list once, twice, ... and without end.
#
# {{card lab1.ex5}}
#
# `handout_1(lengths, copies)` returns `[static, continuous]`, two shares, on `len(lengths)` slots. The queue holds
# `lengths * copies`; each static batch is one copy. For `continuous`, take the best that any scheduler could reach:
# all tokens, over slots times the fewest steps. `math.inf` copies: no slot is ever without a request.
#
# **Worked example.** `handout_1([10, 100, 500], 10)` is about `[0.4067, 0.9997]`, not rounded: 6,100 tokens on 3 slots
# are at least 2,034 steps, and 6,100 / 6,102 ≈ 0.9997.


# %% tags=["exercise"]
# exercise: lab1.ex5
def handout_1(lengths, copies):
    """[static, best continuous] slot utilisation on len(lengths) slots, with `copies` of the list in the queue."""
    # BEGIN SOLUTION
    # STUB: ...
    slots = len(lengths)
    static = sum(lengths) / (slots * max(lengths))
    if copies == math.inf:
        return [static, 1.0]
    queue = lengths * copies
    fewest_steps = max(math.ceil(sum(queue) / slots), max(queue))
    return [static, sum(queue) / (slots * fewest_steps)]
    # END SOLUTION


# %%
check("lab1.ex5", handout_1, seed=seed)

# %% [markdown]
# The bound says what is possible. Does a scheduler that serves in order of arrival, and cannot see the future, get
# there?

# %%
if solved("lab1.ex5"):
    copies = [1, 2, 4, 8, 16]
    bound = [100 * handout_1(T, n)[1] for n in copies]
    traces = [serve(T * n, ContinuousBatching(max_num_seqs=len(T))) for n in copies]
    engine = [100 * slot_utilisation(trace) for trace in traces]
    static, endless = handout_1(T, math.inf)
    display(
        lines(
            {"your bound": (copies, bound), "the engine": (copies, engine)},
            title=f"One copy gives {engine[0]:.0f} %, 16 copies {engine[-1]:.0f} %, a queue without end {endless:.0%}",
            x_name="copies of the list in the queue",
            y_name="slot utilisation, %",
            log_x=True,
            reference=(100 * static, f"static batches: {static:.0%}, however long the queue"),
        )
    )
else:
    later("lab1.ex5")

# %% [markdown]
# With one copy, continuous batching gains nothing: there is nobody to refill with. The gap between the two curves is
# the drain, the last steps when the queue is empty and slots run dry one by one.
#
# ## Your own lengths, and what the lecture says
#
# Change the list to the lengths that *you* see: from your logs, or from a guess. Then run the cells again.

# %%
my_lengths = [120, 45, 300, 80, 60, 950, 210, 30, 500, 75, 140, 20, 260, 90, 410, 55]
my_batch_size = 4

timeline(serve(my_lengths, StaticBatching(batch_size=my_batch_size)), width=980)

# %% [markdown]
# The lecture says that static batching "often" uses 20 to 40 % of the slots, and that it wastes 40 to 80 %. The
# verdicts below come from your `waste` and nothing else.

# %%
if solved("lab1.ex2"):
    runs = {f"yours, B = {my_batch_size}": (my_lengths, my_batch_size)}
    for service, name in (("conv", "chat"), ("code", "code")):
        for b in (8, 32):
            runs[f"Azure {name}, B = {b}"] = (azure(service).sample_output(num_lengths, seed), b)
    lost = {name: waste(T, b) / (waste(T, b) + sum(T)) for name, (T, b) in runs.items()}
    how = "simulated: lengths sampled, slot-steps counted by your function"
    claim("static-20-40", label=how, utilisation={name: 1 - share for name, share in lost.items()})
    claim("waste-40-80", label=how, waste=lost)
else:
    later("lab1.ex2")

# %% [markdown]
# One limit. This counts decode steps only. Prompts must be computed either way, and the last steps run with empty
# slots. So 60 % waste means at most 2.5 times fewer steps, and less in seconds. Chapter 2 measures seconds. Production
# engines (vLLM, SGLang, TensorRT-LLM) have no static batching left to compare with.
#
# ## Where you stand

# %%
progress()

# %%
ledger()

# %% [markdown]
# ## Decide
#
# 1. Your service answers with 4 to 6 tokens, always: labels for e-mails. The engine can do static batches of 64. A
#    colleague wants two weeks to add continuous batching. What do you compute first, and what would make you say no?
# 2. Your pool has room for 64 slots or for 16. Latency must not get worse than with today's 16 static slots. Read the
#    utilisation of both off your waste figure (100 % less the bar). Would you take 64 static slots? Say what happens
#    to tokens per step and to the wait of a short answer.
# 3. A user may set `max_tokens` to 8,000; almost nobody's answer is longer than 400. Static batching serves 32 at a
#    time. What do you change first: the cap, the batch size, or who shares a batch with whom?
#
# The solved lab, `solutions/lab1_static_waste.ipynb`, has an answer to each.

# %% [markdown] tags=["solution"]
# ## Decide: one answer to each
#
# 1. Mean over maximum first: about 5 / 6 = 83 %, whatever the batch size. Refilling can make at most 1.2 times fewer
#    steps, and with 5 tokens a request most of the time is prompts, which both ways compute. Say no, unless requests
#    wait long for a batch to *begin*: measure the queue time.
# 2. From the figure some 41 % at 16 slots and 33 % at 64: 0.41 x 16 = 6.6 and 0.33 x 64 = 21 tokens a step, three times
#    as many. But a batch now lasts as long as the longest of 64: with a mean of 211 tokens 211 / 0.33 = 640 steps, not
#    211 / 0.41 = 515, and each step takes longer. A short answer inside the batch is given out at its own end. One that
#    comes just after the start waits a quarter longer. With a queue in front 64 slots shorten the wait all the same;
#    without one they lengthen it. "Must not get worse" decides: 64 only if requests queue today.
# 3. One answer of 8,000 keeps 31 slots for 7,600 steps. Who shares a batch with whom comes first: `max_tokens` is known
#    before anything runs, so put those who ask for 8,000 together. If most leave it at its default it says nothing;
#    then lower the cap. A smaller batch makes fewer wait for the long one, and everybody pays for it.

# %% [markdown]
# ## Links
#
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI, section 3.1:
#   [why request-level batching wastes slots](https://www.usenix.org/conference/osdi22/presentation/yu)
# - Patel et al. 2024, *Splitwise*, ISCA, and the
#   [Azure LLM inference traces](https://github.com/Azure/AzurePublicDataset) that this lab samples
# - Daniel et al. 2023, [How continuous batching enables 23x
#   throughput](https://www.anyscale.com/blog/continuous-batching-llm-inference): static and continuous batching side
# by side, with exponential lengths
# - Next: chapter 2 and [lab 2](lab2_continuous_batching.ipynb), where you write the scheduler that refills.
