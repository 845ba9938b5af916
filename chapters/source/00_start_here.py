# %% [markdown]
# # Start here
#
# {{badges}}
#
# A language model answers one request at a time, one token at a time. A server answers hundreds at once. This course
# takes the machine between the two apart: you run it, you measure it, and you write parts of it yourself.
#
# It follows a lecture, *Continuous Batching & Serving*, and tests what the lecture says. You need not know it: each
# statement is quoted where you test it.
#
# In this notebook you check your machine, see a real model answer, and learn how the course talks back to you. It takes
# ten minutes.

# %%
# {{colab}}

# %% tags=["parameters"]
device = None  # None: CUDA if there is one, else the CPU
seed = 0
size = "small"
model = "smollm2-135m"

# %% [markdown]
# ## Is this machine ready?
#
# `doctor()` looks at everything that the course needs: Python, PyTorch, the widgets, the model, memory. A line with
# a fault says what to do about it on *this* host.

# %%
from cbserve import LLM, SamplingParams, check, doctor, hint, ledger, timeline

doctor()

# %% [markdown]
# ## A real model
#
# The course serves SmolLM2-135M-Instruct, a chat model with open weights (Apache-2.0), stored in 4 bits: 93 MB to
# fetch, once, and 540 MB on disk. It is weak at facts and small enough for a laptop, and every scheduling effect of
# this course is real on it.
#
# The line that the cell prints names two sizes. *Slots* say how many requests run at a time. The *KV pool* is memory
# for what the model keeps of each token; chapter 2 opens it.

# %%
llm = LLM(model, device=device, max_num_seqs=4, num_blocks=256)
llm

# %%
question = [{"role": "user", "content": "Name three things that people wait for in a queue."}]
(answer,) = llm.chat(question, SamplingParams(max_tokens=60, temperature=0), use_tqdm=False)
print(answer.outputs[0].text)
print()
print(answer.usage, "finish reason:", answer.outputs[0].finish_reason)

# %% [markdown]
# The answer is a value with a shape you will meet again in vLLM: `outputs[0].text`, `token_ids`, `finish_reason`,
# `usage`.
#
# ## Four at once
#
# Now four people ask. The engine gives each a *slot* and computes one token for all of them in one pass through the
# model, again and again. Such a pass is a *step*, or an iteration.

# %%
questions = [
    "What is the capital of France?",
    "Write one sentence about rain.",
    "List five fruits.",
    "Why is the sky blue? Explain in two sentences.",
]
chats = [[{"role": "user", "content": text}] for text in questions]
answers = llm.chat(chats, SamplingParams(max_tokens=60, temperature=0), use_tqdm=False)
for text, answer in zip(questions, answers, strict=True):
    print(f"{answer.usage.completion_tokens:3d} tokens | {text}")

# %% [markdown]
# Every step of that run was written down. A picture in this course is drawn from such a *trace*, never by hand. One
# row is one slot, time runs to the right, and each bar is one request: the dark part is its *prefill* (the prompt is
# read), the rest its *decode* (the answer is written, one token a step).

# %%
timeline(llm.trace)

# %% [markdown]
# Look at the right edge. The answers do not end together. What should the engine do with a slot whose answer is
# complete? Chapter 1 shows the old way and counts what it costs. Chapter 2 shows the way that every serving engine
# works today.
#
# ## How the course talks back
#
# **A check** tells you whether your answer is right and, if not, which rule it breaks. Here is the smallest exercise
# of the course: three requests need 10, 100 and 500 tokens. How many useful tokens is that in all?

# %%
check("start.ex1", 610)

# %% [markdown]
# Change 610 to 500 in the cell above and run it again: the check names the rule. It never shows the answer.
#
# **A hint** comes when you ask for it. There are three for each exercise, from a nudge to nearly the way.

# %%
hint("start.ex1", 1)

# %% [markdown]
# **A claim card** holds one statement of the lecture, how it is tested, and a verdict that is computed from *your*
# numbers. The **ledger** collects the cards. It is empty now; at the end of the course it holds every claim
# with your machine's evidence.

# %%
ledger()

# %% [markdown]
# ## The way through
#
# | | notebook | what you do there |
# |---|---|---|
# | 1 | [Static batching](01_static_waste.ipynb) | see a slot wait, derive what it costs, test it on real lengths |
# | | [Lab 1](../work/lab1_static_waste.ipynb) | write the arithmetic, and check it against the engine |
# | 2 | [Continuous batching](02_continuous_batching.ipynb) | refill slots at once, and find the limit |
# | | [Lab 2](../work/lab2_continuous_batching.ipynb) | write the scheduler's four duties |
# | 3 | [PagedAttention](03_paged_attention.ipynb) | cut the memory into pages: share, copy, swap, evict |
# | | [Lab 3](../work/lab3_paged_attention.ipynb) | write the pool, and the attention that reads it |
#
# The lab links lead to *your* copies, which `make lab` puts into the folder `work/`. There is no such folder on GitHub,
# Colab or Binder: use the originals there ([1](../labs/lab1_static_waste.ipynb),
# [2](../labs/lab2_continuous_batching.ipynb), [3](../labs/lab3_paged_attention.ipynb)). `cbserve lab reset lab1.ex1`
# brings one exercise back to its start.
#
# You need Python, and you should have seen a transformer from the inside once. You do not need a GPU: every exercise
# can be solved on a CPU. Where a cell says *measured here*, the number comes from your machine. Where it says
# *simulated*, the same scheduler ran without a model, on a virtual clock.
#
# **Next:** [Static batching: a slot that waits](01_static_waste.ipynb)
