"""Requests that begin alike: many users of one system prompt, and conversations that grow turn by turn."""

from __future__ import annotations

import math
import random

from cbserve.workloads import given
from cbserve.workloads.synthetic import Arrivals, Lengths, draw
from cbserve.workloads.tokens import joined, own_tokens
from cbserve.workloads.workload import Job, Workload


def shared_prefix(
    n: int,
    num_prefixes: int,
    prefix_tokens: int,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    arrivals: Arrivals,
    seed: int = 0,
) -> Workload:
    """`n` requests, each one of `num_prefixes` system prompts and then `prompt_tokens` tokens of its own.

    Which prefix is random, all equally likely. `prefix_tokens` may be 0.

    Raises:
        InvalidRequestError: a number is out of range.
    """
    given.integer("num_prefixes", num_prefixes, 1)
    given.integer("prefix_tokens", prefix_tokens, 0)
    seed = given.seed(seed)
    times, own, outputs = draw(n, seed, arrivals=arrivals, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    which = random.Random(f"{seed} prefix")
    jobs = []
    for index, (at, num_tokens, num_output_tokens) in enumerate(zip(times, own, outputs, strict=True)):
        prefix = own_tokens(which.randrange(num_prefixes), prefix_tokens)
        jobs.append(Job(at, joined([prefix, own_tokens(num_prefixes + index, num_tokens)]), num_output_tokens))
    return Workload(f"{num_prefixes} shared prefixes of {prefix_tokens} tokens (synthetic)", jobs)


def multi_turn(
    num_sessions: int,
    turns: Lengths,
    user_tokens: Lengths,
    output_tokens: Lengths,
    arrivals: Arrivals,
    think_s: float,
    seed: int = 0,
    system_tokens: int = 0,
    exponential: bool = True,
) -> Workload:
    """Conversations: the prompt of a turn is everything said before, answers included, and then new words of the user.

    A simulated answer goes on with the token after the prompt's last one, so the next turn finds prompt *and* answer
    of the turn before in the prefix cache. Turn t + 1 arrives a think time after turn t *arrived*, answered or not:
    an open workload. Where users must wait for the answer, hand the jobs to `ClosedLoop`.

    Args:
        num_sessions: conversations, of `turns` turns each.
        user_tokens: what the user adds in every turn.
        output_tokens: the answer of every turn.
        arrivals: when the first turn of each session arrives.
        think_s: seconds from turn to turn; the mean where `exponential`.
        system_tokens: a system prompt that all sessions share.

    Raises:
        InvalidRequestError: a number is out of range.
    """
    given.integer("num_sessions", num_sessions, 0)
    given.integer("system_tokens", system_tokens, 0)
    given.number("think_s", think_s, lambda v: 0 <= v < math.inf, "a number of seconds of at least 0")
    seed = given.seed(seed)
    starts, counts = draw(num_sessions, seed, arrivals=arrivals, turns=turns)
    user, output = draw(sum(counts), seed + 1, user_tokens=user_tokens, output_tokens=output_tokens)
    thinking = random.Random(f"{seed} think")
    system = own_tokens(0, system_tokens)
    jobs: list[Job] = []
    for session, (at, count) in enumerate(zip(starts, counts, strict=True)):
        said = 0
        for number in range(count):
            if number:
                at += thinking.expovariate(1 / think_s) if exponential and think_s else think_s
            turn = len(jobs)
            said += user[turn]
            jobs.append(Job(at, joined([system, own_tokens(1 + session, said)]), output[turn], session=session))
            said += output[turn]
    jobs.sort(key=lambda job: job.arrival_s)  # stable: turns without a pause keep their order
    return Workload(f"{num_sessions} conversations (synthetic)", jobs)
