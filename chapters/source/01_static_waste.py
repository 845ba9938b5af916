# %% [markdown]
# # Static batching: a slot that waits
#
# {{badges}}
#
# A batch that waits for its slowest member throws away most of what it computes. In this chapter you see it happen
# on a real engine, find the formula, and test what the lecture says about it.
#
# Three people ask at the same moment. One needs a sentence, one a paragraph, one an essay: 10, 100 and 500 tokens.
# The GPU answers all three together, one token each in every step. After step 10 the first answer is complete. Its
# seat in the batch stays taken until the essay is done.

# %%
# {{colab}}

# %% tags=["parameters"]
device = None  # None: CUDA if there is one, else the CPU
seed = 0
size = "small"  # "large" draws more requests
model = "smollm2-135m"

# %%
from cbserve import LLM, StaticBatching, claim, ledger, serve, slot_utilisation, timeline

trace = serve([10, 100, 500], StaticBatching(batch_size=3))

# %% [markdown]
# **Predict, then run.** After 500 steps, what share of the seats did useful work?
#
# | your guess | why someone would say that |
# |---|---|
# | about 90 % | at first all three seats work; look again from step 100 on |
# | about 40 % | you added the three answers and divided by all seats times all steps |
# | 33 % | true from step 100 to the end, when only the essay is left, but not for the whole run |

# %%
timeline(trace)

# %% [markdown]
# The hatched steps are computed and thrown away. You pay for 3 x 500 = 1,500 slot-steps and use 10 + 100 + 500 = 610
# of them. *Slot* is the field's word for a seat. The share of slots that gave a useful token, over the whole run, is
# the *slot utilisation*:

# %%
print(f"slot utilisation: {slot_utilisation(trace):.2%} in {len(trace.steps)} steps (simulated: one step, one tick)")

# %% [markdown]
# ## What you will be able to do
#
# - Say why a language model is served differently from an image classifier.
# - Compute the slot utilisation of static batches, and what it throws away.
# - Predict it from the batch size and the way in which lengths are distributed.
# - Test the lecture's "20 to 40 %" on lengths from a real service.
#
# You need Python and a rough idea of how a transformer generates text. Reading and running takes about an hour;
# after that, lab 1 lets you write the arithmetic yourself.
#
# ## Nobody knows how long an answer is
#
# An image classifier does the same work for each image. You can put 32 images into a batch, and 32 results come out
# together.
#
# A language model writes one token in each pass. How many passes a request needs is known only when the model emits its
# *end-of-sequence* token. Ask the real model four questions and count.

# %%
from cbserve import SamplingParams

llm = LLM(model, device=device, batching=StaticBatching(batch_size=4), num_blocks=128)
questions = ["What is 2 + 2?", "Name a colour.", "What is the capital of France?", "Write a haiku about the sea."]
chats = [[{"role": "user", "content": text}] for text in questions]
answers = llm.chat(chats, SamplingParams(max_tokens=80, temperature=0), use_tqdm=False)
for question, answer in zip(questions, answers, strict=True):
    print(f"{answer.usage.completion_tokens:3d} tokens, {answer.times.e2e_s:5.2f} s | {question}")

# %% [markdown]
# The engine serves these four as one *static batch*: it takes the four that wait, runs them until the longest is
# complete, and admits nobody meanwhile. Each answer is given out at its own end, which is why the times differ. The
# slots are not.

# %%
timeline(llm.trace)

# %% [markdown]
# A hatched row is no decoration. This engine really computes it: the row of a finished request stays in the forward
# pass and its last token is computed again, with all layers, in each step until the batch ends. Its memory stays
# taken too.
#
# In the trace such rows are called `padding`. Count them:

# %%
from collections import Counter

rows = Counter(row.kind for step in llm.trace.steps for row in step.rows)
print(dict(rows))
print(f"padding: {rows['padding'] / sum(rows.values()):.1%} of all rows that were computed (measured here)")

# %% [markdown]
# ## The formula
#
# A batch of $B$ requests with answers of $T_1, \dots, T_B$ tokens runs for $\max_i T_i$ steps on $B$ slots:
#
# $$\text{utilisation} = \frac{\sum_i T_i}{B \cdot \max_i T_i}, \qquad \text{waste} = 1 - \text{utilisation}.$$
#
# Said aloud: *the tokens that somebody wanted, over the slots times the steps of the longest*. For 10, 100 and 500
# that makes 610 / (3 x 500) = 40.7 %. It is the same as the mean answer over the longest answer.
#
# Why 500 steps and not one more for the prompts? The step that reads a prompt, its *prefill*, also gives the first
# token.
#
# With several batches, add before you divide: all useful tokens over all slot-steps. The mean of the batches'
# percentages is a different number, because a long batch counts more.
#
# Now ask the engine instead of the formula. The model below is tiny and random, so that 500 real steps take a second
# or two, but scheduler, KV cache and forward pass are the real ones.

# %%
tiny = LLM("tiny", device=device, batching=StaticBatching(batch_size=3), verbose=False)
measured = serve([10, 100, 500], llm=tiny)
print(f"{len(measured.steps)} steps, slot utilisation {slot_utilisation(measured):.2%} (measured here)")

# %%
claim("static-40.7", utilisation=slot_utilisation(measured))

# %% [markdown]
# ## Real answers
#
# Three lengths prove little. What do people ask for? Microsoft published the lengths of 19,366 chat requests and
# 8,819 code completions that one of its services answered in November 2023. The course carries their quantiles as a
# table.

# %%
from cbserve import azure, table

chat, code = azure("conv"), azure("code")
shown = [10, 50, 90, 99, 100]
table(
    ["answers in tokens", "mean", *(f"{p} % have at most" for p in shown[:-1]), "the longest has"],
    [[t.name, t.output_mean, *(dict(t.output)[p] for p in shown)] for t in (chat, code)],
    caption=f"Source: {chat.source}. {chat.licence}. Reduced to quantiles.",
)

# %% [markdown]
# Half of the code completions have at most 13 tokens, and the longest has 1,899. Such lengths are *long-tailed*:
# most are short, a few are very long, and those few decide when a batch ends.
#
# From the table you can draw as many lengths as you like. The curve is the textbook's choice, an exponential
# distribution with the same mean.

# %%
import math

from cbserve import histogram

num_requests = 2048 if size == "small" else 20_480
chat_lengths = chat.sample_output(num_requests, seed=seed)
code_lengths = code.sample_output(num_requests, seed=seed)
mean = sum(chat_lengths) / len(chat_lengths)
histogram(
    chat_lengths,
    title=f"Half of the chat answers have at most {sorted(chat_lengths)[(num_requests - 1) // 2]} tokens, the longest "
    f"has {max(chat_lengths):,}",
    x_name="tokens in the answer",
    expected=lambda t: 1 - math.exp(-t / mean),
    expected_name="exponential, same mean",
    marks={"mean": mean},
    caption=f"{num_requests:,} lengths drawn from the quantiles of {chat.name}.",
)

# %% [markdown]
# Chat answers are no exponential distribution: there is a second hump near 400 tokens, and nothing beyond 1,000,
# because the service cut longer answers off. Keep the exponential in mind all the same. It has a formula.
#
# ## Larger batches wait longer
#
# **Predict, then run.** You serve these chat answers in static batches. What happens to the slot utilisation when
# you go from
# 8 slots to 64?
#
# | your guess | why someone would say that |
# |---|---|
# | it rises | a larger batch uses a GPU better; true for tokens a second, but this counts slots |
# | it stays | the mean length is the same; but the mean is divided by the *longest* of the batch |
# | it falls | among 64 answers there is almost surely a very long one, and all wait for it |

# %%
from cbserve import exponential, harmonic, lines, static_utilisation

sizes = [1, 2, 4, 8, 16, 32, 64, 128]
samples = {
    "chat": chat_lengths,
    "code": code_lengths,
    "exponential": exponential(mean, num_requests, seed=seed),
    "all equal": [round(mean)] * num_requests,
}
curves = {
    name: (sizes, [100 * static_utilisation(lengths, size_) for size_ in sizes]) for name, lengths in samples.items()
}
lines(
    curves,
    title=f"64 slots use {curves['chat'][1][6]:.0f} % on chat answers, {curves['code'][1][6]:.0f} % on code",
    x_name="slots in a batch (B)",
    y_name="slot utilisation, %",
    log_x=True,
    caption="Static batches in order of arrival, from the formula. Lengths drawn from the tables above.",
)

# %% [markdown]
# It falls, and for code it falls to a few percent. Equal answers waste nothing, whatever the batch size. So the
# waste is a property of the lengths *and* of the batch size, never of one alone.
#
# For exponential lengths there is an exact value. The longest of $B$ of them is on average $H_B = 1 + \frac12 + \dots +
# \frac1B$ times the mean, so
#
# $$\text{utilisation} = \frac{1}{H_B}.$$
#
# Said aloud: *one over the B-th harmonic number*. For $B = 8$: $H_8 = 2.718$, so 36.8 %.

# %%
table(
    ["B", "1 / H_B, %", "drawn, %"],
    [
        [b, round(100 / harmonic(b), 1), round(100 * static_utilisation(samples["exponential"], b), 1)]
        for b in (2, 8, 16, 64)
    ],
    caption=f"Exponential lengths: the formula beside {num_requests:,} drawn ones. Few batches make large B noisy.",
)

# %% [markdown]
# ## Does the lecture tell the truth?
#
# The lecture says: *output lengths are heavy-tailed, so utilisation is often 20 to 40 %*, and in its summary: *static
# batching wastes 40 to 80 %*. The formula is one way to test that. The other is the scheduler itself: hand it the
# lengths and read the trace. Do both agree?

# %%
num_served = 256 if size == "small" else 2048
batch_sizes, rows = (8, 16, 32, 64), []
for b in batch_sizes:
    run, served = serve(chat_lengths[:num_served], StaticBatching(b)), chat_lengths[:num_served]
    shares = slot_utilisation(run), static_utilisation(served, b), static_utilisation(chat_lengths, b)
    rows.append([b, len(run.steps), *(f"{share:.1%}" for share in shares)])
table(
    ["B", "steps", f"scheduler, {num_served:,} answers", "formula, the same", f"formula, all {num_requests:,}"],
    rows,
    caption="Chat answers in static batches, slot utilisation. Simulated: one tick a step.",
)

# %% [markdown]
# The two columns in the middle agree: the formula says what the scheduler does. So the cards may take all answers,
# which the formula counts at once. Why the last column differs comes below the cards.

# %%
found = {f"chat, B = {b}": static_utilisation(chat_lengths, b) for b in batch_sizes}
found |= {f"code, B = {b}": static_utilisation(code_lengths, b) for b in (8, 64)}
how = f"simulated: {num_requests:,} lengths each, by the formula"
claim("static-20-40", label=how, utilisation=found)
claim("waste-40-80", label=how, waste={name: 1 - used for name, used in found.items()})

# %% [markdown]
# Read the verdicts: a card names the cases for which your numbers lie in the lecture's band. Small batches of chat
# answers use more of their slots than the lecture says. Code completions fit its words in small batches, and in large
# ones they use far less.
#
# Now the last column. In batches of 64, 256 answers make four batches, and one long answer decides each. Draw again
# and you get another number. A difference says something only if it is larger than that chance. How large is it? Draw
# twenty times, 2,048 answers each time, then as many as the trace has.

# %%
from statistics import mean as average
from statistics import stdev

# Counted from the full trace, not in this notebook (tests/unit/test_workloads_real_traces.py)
in_order = {8: 48.3, 16: 42.8, 32: 38.4, 64: 34.4}
shuffled = {8: 46.3, 16: 41.6, 32: 37.5, 64: 33.6}  # the same answers in random order, mean of twenty


def drawn_again(count, b, draws=20):
    """Slot utilisation of `count` chat answers in batches of b, in percent: mean and spread over several draws."""
    drawn = [100 * static_utilisation(chat.sample_output(count, seed=seed + i), b) for i in range(draws)]
    return f"{average(drawn):.1f} ± {stdev(drawn):.1f}"


table(
    ["B", "2,048 drawn, %", "19,366 drawn, %", "the trace shuffled, %", "the trace in order, %"],
    [[b, drawn_again(2048, b), drawn_again(19_366, b), shuffled[b], in_order[b]] for b in batch_sizes],
    caption="Mean and standard deviation of twenty draws. The last two columns: the 19,366 chat requests themselves.",
)

# %% [markdown]
# In its own order the trace uses a little more of the slots than any draw of its size. That is no chance: the
# difference is several times the spread. Neighbours in a real queue resemble each other, and shuffling takes most of
# it away. (Drawing from the quantile table costs a few tenths of a point too.)
#
# Is a run on a script the same as a run on the engine? Serve a few of these answers for real and compare.

# %%
few = [min(length, 160) for length in chat_lengths[: 16 if size == "small" else 64]]
tiny = LLM("tiny", device=device, batching=StaticBatching(batch_size=8), verbose=False)
real = serve(few, llm=tiny)
print(f"formula    {static_utilisation(few, 8):.4f}")
print(f"scheduler  {slot_utilisation(serve(few, StaticBatching(8))):.4f} (simulated)")
print(f"engine     {slot_utilisation(real):.4f} (measured here)")

# %% [markdown]
# Three ways, one number. That is no luck: there is one scheduler in this course. The simulation and the engine run
# the same object; only what happens inside a step differs.
#
# ## Your own lengths
#
# Write the lengths of answers that you expect in your own application, and run the cell. Then move the sliders: how
# small must a batch be before you would accept its waste?

# %%
my_lengths = [12, 40, 7, 95, 30, 18, 60, 22, 150, 9, 33, 48]

mine = serve(my_lengths, StaticBatching(batch_size=4))
print(f"{static_utilisation(my_lengths, 4):.1%} of 4 slots used in {len(mine.steps)} steps")

# %%
from cbserve import timeline_explorer

timeline_explorer(my_lengths, batch_size=4, show="static")

# %% [markdown]
# ## What a wasted slot costs
#
# A slot that computes nothing useful sounds free: the other slots need the step anyway. Is it? Measure how long a
# step takes with 1, 2, 4 and 8 rows.

# %%
import torch

from cbserve import measure_step_times

times = measure_step_times(llm, num_tokens=(1, 2, 4, 8), repeats=9)  # in turn, nine times each
rows_measured = [n for n, _ in times.points]
milliseconds = [1e3 * times.seconds(n, 64 * n) for n in rows_measured]
rate = [1e3 * n / ms for n, ms in zip(rows_measured, milliseconds, strict=True)]
table(
    ["rows in the step", "ms a step", "tokens/s if all rows are useful"],
    [[n, round(ms, 1), round(r, 1)] for n, ms, r in zip(rows_measured, milliseconds, rate, strict=True)],
    caption=f"Decode steps of {model} with 64 tokens of context, medians of 9, measured here on {llm.device}"
    + (f", threads: {torch.get_num_threads()}." if llm.device.type == "cpu" else "."),
)

# %%
print(f"8 rows take {milliseconds[-1] / milliseconds[0]:.1f} times as long as 1 row and give 8 times the tokens")
if milliseconds != sorted(milliseconds):
    print("Somewhere more rows took less time. Run it again: what stays is the math library's, which computes a row or")
    print("two in another, slower way; what goes was other work on this machine.")

# %% [markdown]
# A step with eight rows does not take eight times as long, because the weights are read once for all rows. On a GPU the
# difference is larger still. So the wasted row costs little *time*. What it costs is the token that another request
# could have got in that slot, at almost no extra price. This is why an engine wants every slot full, and why a
# waiting queue beside a hatched slot hurts.
#
# Two things are easily mixed up here. *Slot utilisation* counts useful rows. A tool such as `nvidia-smi` shows 100 %
# when a kernel runs all the time, even if every row is padding.
#
# ## Can sorting save it?
#
# If long answers wait for long ones, nobody waits in vain. Sort the queue by length first:

# %%
from cbserve import bars

queue = chat_lengths[:512]
by_arrival, by_length = static_utilisation(queue, 32), static_utilisation(sorted(queue), 32)
bars(
    ["in order of arrival", "sorted by length"],
    [round(100 * by_arrival, 1), round(100 * by_length, 1)],
    unit="%",
    title=f"Sorting 512 chat answers lifts 32 slots from {by_arrival:.1%} to {by_length:.1%} in use",
    caption="Slot utilisation of static batches of 32, from the formula.",
)

# %% [markdown]
# Two things stand in the way. You would have to know each length before the model has written it; in the Azure traces
# the length of the prompt says almost nothing about it (correlation of the logarithms: 0.087 for chat, -0.005 for
# code, counted from the full traces). And somebody must wait until enough similar requests have come. Offline jobs
# with known lengths do sort. A chat server cannot.
#
# ## Limits of this chapter
#
# - Prompts are *packed* here: a batch computes exactly the prompt tokens it has. Simple servers pad each prompt to
# the longest one and waste a part of the prefill as well; in Hugging Face transformers, for example, `generate` on a
# list pads.
# - This engine reserves memory for the longest answer of each request, as static servers do. A small memory
# therefore makes small batches. Chapter 3 is about that.
# - Slots are not seconds. A long prompt makes one step much longer than another; chapter 2 goes from steps to time.
#
# ## Take-aways
#
# - Static batching keeps a slot until the longest answer of its batch is complete.
# - Utilisation is mean over maximum: sum of $T_i$ over $B \cdot \max T_i$.
# - Exponential lengths give $1/H_B$; real chat lengths give somewhat more, code far less; equal lengths give 100 %.
# - "20 to 40 %" is true of chat in large batches (B = 32 and 64) and of code completions in small ones (B = 8); code in
# batches of 64 uses far less. It is a statement about slots, not about how busy the GPU looks.
#
# ## Decide
#
# **1.** Your service summarises documents: all answers have 120 to 130 tokens. A colleague wants to replace static
# batching because "it wastes 60 %". What do you tell them?
#
# <details><summary>one answer</summary>
# Mean over maximum is at least 120 / 130 = 92 %. The waste is under 8 % whatever the batch size. Arrivals that must
# wait for the next batch may still be a good reason.
# </details>
#
# **2.** You serve code completions in batches of 16 and may change one thing: batches of 4, or a cap of 250 tokens
# on an answer. Which helps slot utilisation more? Test it with `static_utilisation` and `code_lengths`.
#
# <details><summary>one way</summary>
# `static_utilisation(code_lengths, 4)` beside `static_utilisation([min(t, 250) for t in code_lengths], 16)`. Then
# ask which of the two your users would notice.
# </details>
#
# **3.** The dashboard of a static server shows 100 % GPU utilisation and 25 % slot utilisation. Requests queue. Do
# you buy a second GPU?
#
# <details><summary>one answer</summary>
# Not yet. Three of four rows are thrown away. Refilling slots in each step, the subject of chapter 2, can serve up
# to four times as many requests on the GPU that you have.
# </details>
#
# ## Your ledger

# %%
ledger()

# %% [markdown]
# ## Links
#
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI): names the
# problem and the cure. <https://www.usenix.org/conference/osdi22/presentation/yu>
# - Patel et al. 2024, *Splitwise* (ISCA): the paper behind the traces. <https://arxiv.org/abs/2311.18677>
# - The traces: <https://github.com/Azure/AzurePublicDataset>
# - Daniel et al. 2023, *How continuous batching enables 23x throughput in LLM inference*: static batching against
# the rest. <https://www.anyscale.com/blog/continuous-batching-llm-inference>
#
# **Next:** [Lab 1](../work/lab1_static_waste.ipynb), your copy, which `make lab` has put into `work/` (on GitHub, Colab
# and Binder: [the original](../labs/lab1_static_waste.ipynb)). Then [Continuous batching](02_continuous_batching.ipynb)
