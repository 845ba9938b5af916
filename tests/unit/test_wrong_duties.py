"""A learner's duty that returns what it should not: a SchedulerError names it, and nothing is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_harness import make_scheduler

from cbserve import ContinuousBatching, Priority, Request, SamplingParams, Scheduler
from cbserve.clock import VirtualClock
from cbserve.core.errors import SchedulerError
from cbserve.core.trace import Admitted, Arrived, Finished, Left, Preempted
from cbserve.engine import Engine
from cbserve.executors.scripted import ScriptedExecutor


def _take_out_by_hand(self):
    done = [seq for seq in self.running if seq.is_finished]
    for seq in done:
        self.running.remove(seq)
    return done


def _drop(self):
    self.running = [seq for seq in self.running if not seq.is_finished]
    return []


WRONG = {
    "retire nothing": ("retire", lambda self: None),
    "retire numbers": ("retire", lambda self: [5]),
    "retire twice": ("retire", lambda self: [seq for seq in self.running if seq.is_finished] * 2),
    "retire the unfinished": ("retire", lambda self: self.running),
    "retire by hand": ("retire", _take_out_by_hand),
    "retire by forgetting": ("retire", _drop),
    "admit nothing": ("admit", lambda self, step: None),
    "admit numbers": ("admit", lambda self, step: [5]),
    "admit all": ("admit", lambda self, step: list(self.policy)),
    "admit the popped": ("admit", lambda self, step: [self.policy.pop()]),
    "grow yes": ("grow", lambda self, seq, num_tokens, step: True),
    "grow number": ("grow", lambda self, seq, num_tokens, step: 5),
    "displace nothing": ("displace", lambda self, step: None),
    "displace numbers": ("displace", lambda self, step: [5]),
    "displace nobody": ("displace", lambda self, step: [(None, None)]),
    "never blocked": ("blocked", lambda self, seq, step: None),
    "blocked says no": ("blocked", lambda self, seq, step: False),
    "blocked says why": ("blocked", lambda self, seq, step: "no room"),
    "tokens of None": ("num_new_tokens", lambda self, seq, step: None if seq.num_output_tokens else 8),
    "half a token": ("num_new_tokens", lambda self, seq, step: 1.0 if seq.num_output_tokens else 8),
    "no tokens": ("num_new_tokens", lambda self, seq, step: -1),
    "too many tokens": ("num_new_tokens", lambda self, seq, step: 2 if seq.num_output_tokens else 8),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_duty_is_named_and_the_engine_is_whole_afterwards(case):
    name, duty = WRONG[case]
    cls = type("Wrong", (Scheduler,), {name: duty})
    batching = ContinuousBatching(max_num_seqs=2)
    scheduler = make_scheduler(batching, policy=Priority(displace=True), num_blocks=12, block_size=4, cls=cls)
    engine = Engine(scheduler, ScriptedExecutor(), VirtualClock())
    requests = [Request(letter, range(8), SamplingParams(max_tokens=6)) for letter in "ABCDE"]
    with pytest.raises(SchedulerError):
        engine.run(requests)
    scheduler.check()
    assert not engine.has_unfinished and not scheduler.requests
    assert scheduler.kv.pool.num_used == 0 and sorted(scheduler.free_slots) == [0, 1]
    arrived, finished, admitted, preempted, left = (
        Counter(event.request_id for event in engine.trace.events if isinstance(event, kind))
        for kind in (Arrived, Finished, Admitted, Preempted, Left)
    )
    assert finished == arrived == Counter("ABCDE")
    assert not admitted - preempted - left


def test_a_way_of_preemption_that_is_none_is_named():
    scheduler = make_scheduler(num_blocks=6, block_size=4, preemption=lambda seq: "Swap")
    engine = Engine(scheduler, ScriptedExecutor(), VirtualClock())
    with pytest.raises(SchedulerError, match="returned 'Swap'; it must be 'recompute' or 'swap'"):
        engine.run([Request(letter, range(8), SamplingParams(max_tokens=12)) for letter in "AB"])
    scheduler.check()
