"""When requests arrive: open processes, which do not care how busy the server is, and a closed loop, which does."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads import given
from cbserve.workloads.workload import LATEST_S, Job, problem_of


def all_at_once(n: int, seed: int = 0) -> list[float]:
    """`n` arrivals at 0: a backlog, as of offline inference. There is nothing random about it.

    Raises:
        InvalidRequestError: `n` is no integer of at least 0.
    """
    given.seed(seed)
    return [0.0] * given.integer("n", n, 0)


def poisson(n: int, rate: float, seed: int = 0) -> list[float]:
    """`n` arrivals in seconds of independent users, `rate` a second: exponential gaps, coefficient of variation 1.

    Raises:
        InvalidRequestError: `rate` is not above 0, or `n` no integer of at least 0.
    """
    return gamma(n, rate, 1.0, seed)


def gamma(n: int, rate: float, cv: float, seed: int = 0) -> list[float]:
    """`n` arrivals in seconds whose gaps are Gamma distributed: mean 1 / `rate`, coefficient of variation `cv`.

    `cv` is the burstiness: 0 is a clock, 1 Poisson, above 1 comes in bursts (vLLM's benchmark names 1 / cv**2).

    Raises:
        InvalidRequestError: `rate` is not above 0, `cv` not in 0..100, or `n` no integer of at least 0.
    """
    given.integer("n", n, 0)
    given.positive("rate", rate)
    given.number("cv", cv, lambda v: 0 <= v <= 100, "a number from 0 (a clock) to 100; 1 is Poisson")
    rng, now, times = given.generator(seed), 0.0, []
    for _ in range(n):
        if cv == 0:
            now += 1 / rate
        elif cv == 1:
            now += rng.expovariate(rate)
        else:
            now += rng.gammavariate(1 / cv**2, cv**2 / rate)
        times.append(now)
    return times


def on_off(n: int, rate_on: float, on_s: float, off_s: float, seed: int = 0) -> list[float]:
    """`n` arrivals in seconds that come in bursts: Poisson at `rate_on` while on, nothing while off.

    On and off last exponential times of means `on_s` and `off_s` (an interrupted Poisson process; Kuczura 1973), so the
    mean rate is rate_on * on_s / (on_s + off_s), and the squared coefficient of variation of the gaps is
    1 + 2 * rate_on * on_s * off_s**2 / (on_s + off_s)**2.

    Raises:
        InvalidRequestError: a rate or a time is not above 0, or `n` no integer of at least 0.
    """
    given.integer("n", n, 0)
    for name, value in (("rate_on", rate_on), ("on_s", on_s), ("off_s", off_s)):
        given.positive(name, value)
    rng = given.generator(seed)
    times: list[float] = []
    now, end = 0.0, rng.expovariate(1 / on_s)  # it starts at the beginning of a burst
    while len(times) < n:
        now += rng.expovariate(rate_on)
        while now > end:  # the rest of the gap falls into the next burst: exponential gaps have no memory
            pause = rng.expovariate(1 / off_s)
            now += pause
            end += pause + rng.expovariate(1 / on_s)
        times.append(now)
    return times


class ClosedLoop:
    """`users` people who each ask, wait for the answer, think, and ask again: a slow server is asked less.

    Jobs are dealt to the users in turn; jobs of one session stay with one user, in order. Think times belong to the
    user and are drawn in the order of their jobs, so they do not depend on who is answered first. A job's own
    `arrival_s` is replaced: by 0 for each user's first, afterwards by the end of the answer plus the time to think.

    Args:
        jobs: what is asked.
        users: how many are in the system or think.
        think_s: seconds between an answer and the next request; the mean where `exponential`.
        exponential: think times are exponential instead of all equal.

    Raises:
        InvalidRequestError: `users` is no integer of at least 1, `think_s` is negative, or a job cannot be simulated.
    """

    def __init__(
        self, jobs: Sequence[Job], users: int, think_s: float = 0.0, exponential: bool = False, seed: int = 0
    ) -> None:
        self.users = users = given.integer("users", users, 1)
        self.think_s = given.number(
            "think_s", think_s, lambda v: 0 <= v < LATEST_S, "a number of seconds of at least 0, below 1e10"
        )
        self.exponential, self.seed = exponential, given.seed(seed)
        sessions: dict[Hashable, list[Job]] = {}
        for index, job in enumerate(given.listed("jobs", jobs)):
            if problem := problem_of(job):
                raise InvalidRequestError(f"jobs[{index}]: {problem}")
            key = ("alone", index) if job.session is None else ("session", job.session)
            sessions.setdefault(key, []).append(job)
        self._jobs: list[list[Job]] = [[] for _ in range(min(users, len(sessions)))]  # further users never ask
        for index, session in enumerate(sessions.values()):
            self._jobs[index % users].extend(session)
        self.start()

    def start(self) -> list[Job]:
        """Begin anew: the first job of every user who has one, at 0. `client_id` is the user's number."""
        users = range(len(self._jobs))
        self._next = [0 for _ in users]
        self._asking = [False for _ in users]
        self._rng = [random.Random(f"{self.seed} {user}") for user in users]
        return [job for user in users if (job := self._ask(user, 0.0)) is not None]

    def on_finish(self, user: int | str, time_s: float) -> Job | None:
        """The answer of `user` (a number, or the `client_id`) ended at `time_s`: what they ask next, or None.

        Raises:
            InvalidRequestError: there is no such user, or they wait for no answer.
        """
        number = int(user) if isinstance(user, int) or user.isdecimal() else -1
        if not 0 <= number < len(self._asking) or not self._asking[number]:
            raise InvalidRequestError(f"user={user!r}: waits for no answer; there are users 0 to {self.users - 1}")
        self._asking[number] = False
        think_s = self.think_s
        if self.exponential and think_s:
            think_s = self._rng[number].expovariate(1 / think_s)
        return self._ask(number, time_s + think_s)

    def _ask(self, user: int, arrival_s: float) -> Job | None:
        if self._next[user] == len(self._jobs[user]):
            return None
        job = self._jobs[user][self._next[user]]
        self._next[user] += 1
        self._asking[user] = True
        return replace(job, arrival_s=arrival_s, client_id=str(user))
