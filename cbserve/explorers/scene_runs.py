"""What pitfall scenes simulate: a request that joins others on a machine of the menus."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cbserve.core.batching import ContinuousBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.trace import Admitted, Preempted, StepEvent
from cbserve.explorers.machines import Machines
from cbserve.explorers.scene import Control
from cbserve.sim.device import Device, device_of
from cbserve.sim.point import UTILIZATION
from cbserve.sim.settings import Settings
from cbserve.simulation import Simulation, simulate
from cbserve.viz.findings import plural
from cbserve.workloads.tokens import own_tokens
from cbserve.workloads.workload import Job, Workload

CHUNK, SLOTS = 2048, 128  # the step that a machine keeps room for beside the KV cache
CHAT_PROMPT = 100  # tokens of each of the others
LONG_ANSWER = 8  # tokens that answer the prompt that joins them
LEAD = 8  # steps in which all of them decode before somebody joins


@dataclass(frozen=True)
class Machine:
    """A device with its model, and the blocks that it has room for."""

    device: Device
    num_blocks: int

    @property
    def name(self) -> str:
        where = f"one {self.device.name}" if self.device.table else f"{self.device.name} (calibrated)"
        return f"{self.device.cost.model.name} on {where}"

    @property
    def longest_prompt(self) -> float:
        """Tokens of a prompt that leave `LONG_ANSWER` of what the model was made for; inf: no limit is known."""
        limit = self.device.max_model_len
        return math.inf if limit is None else limit - LONG_ANSWER

    def require_length(self, prompt_tokens: int) -> None:
        """Raises InvalidRequestError: the model was made for less, or the whole pool has no room for so much."""
        if prompt_tokens > self.longest_prompt:
            raise InvalidRequestError(
                f"a prompt of {prompt_tokens:,} tokens and an answer of {LONG_ANSWER}: the limit of "
                f"{self.device.cost.model.name} is {self.device.max_model_len:,} in all ({self.device.limit}); choose "
                "a shorter prompt, or another model" + (" on a GPU of the table" if self.device.table is None else "")
            )
        if prompt_tokens + LONG_ANSWER > self.num_blocks * self.device.cost.block_size:
            raise self.too_small(prompt_tokens, 0)

    def too_small(self, prompt_tokens: int, num_others: int) -> InvalidRequestError:
        room = self.num_blocks * self.device.cost.block_size
        beside = f" beside {plural(num_others, 'other answer')}" if num_others else ""
        fewer = "fewer other answers, " if num_others else ""
        return InvalidRequestError(
            f"a prompt of {prompt_tokens:,} tokens{beside}: the KV pool of {self.name} has room for {room:,} in all; "
            f"choose a shorter prompt, {fewer}or a GPU with more memory"
        )


def machine_of(machines: Machines, gpu: str, model: str) -> Machine:
    """What stands in the menus under these names.

    Raises:
        InvalidRequestError: the model does not fit, with what to choose instead and the arithmetic; or nobody knows how
            much room there is.
    """
    chosen, shape = machines.chosen(gpu, model)
    device = device_of(Settings(gpu=chosen, model=shape))  # type: ignore[arg-type]
    if device.table is None and not device.is_cpu:
        raise InvalidRequestError(
            f"the memory of {device.name} for a KV cache is not known; choose a GPU of the table, or this machine when "
            "it was calibrated on its CPU"
        )
    try:
        return Machine(device, device.room(UTILIZATION, CHUNK, SLOTS, device.cost.block_size)[0])
    except InvalidRequestError as error:
        raise InvalidRequestError(machines.why_not(model, error)) from error


def menus(machines: Machines) -> dict[str, Control]:
    """Controls for both."""
    return {
        "gpu": Control("GPU", [(name, name) for name in machines.gpus], is_menu=True),
        "model": Control("model", [(name, name) for name in machines.models], is_menu=True),
    }


def its_model(machines: Machines, values: Mapping[str, Any]) -> dict[str, Any]:
    """A machine that is calibrated comes with its model."""
    gpu = values["gpu"]
    return {"model": machines.calibrated[gpu]} if gpu in machines.calibrated else {}


def others(count: int, answer_tokens: int, arrival_s: float = 0.0) -> list[Job]:
    """Requests with short prompts that share nothing."""
    return [Job(arrival_s, own_tokens(1 + index, CHAT_PROMPT), answer_tokens) for index in range(count)]


@lru_cache(256)
def settled(machine: Machine, count: int, token_budget: int) -> tuple[float, float]:
    """When so many others have all decoded for `LEAD` steps, in the middle of the next one, in seconds after they came
    together; and the seconds of such a step."""
    if not count:
        return 0.0, 0.0
    fold = run(machine, others(count, LEAD + 1), token_budget).fold
    step_s = fold.tpot_s[-1]
    return max(fold.e2e_s) + step_s / 2, step_s


def run(machine: Machine, jobs: Sequence[Job], token_budget: int, caching: bool = False) -> Simulation:
    """All of `jobs` may run at a time."""
    batching = ContinuousBatching(max_num_seqs=len(jobs), max_num_batched_tokens=token_budget)
    cost = machine.device.cost
    workload = Workload("scene", jobs)
    return simulate(workload, cost, machine.num_blocks, cost.block_size, batching, enable_prefix_caching=caching)


def wait_of_last(simulation: Simulation, jobs: Sequence[Job]) -> tuple[float, float]:
    """Seconds from the arrival of the last of `jobs` to its admission, and to its first token; nan: there is no room
    for it, or not for all at a time."""
    events, last = simulation.trace.events, str(len(jobs) - 1)
    admitted = next((e for e in events if isinstance(e, Admitted) and e.request_id == last), None)
    if admitted is None or any(isinstance(event, Preempted) for event in events):
        return math.nan, math.nan
    arrival = jobs[-1].arrival_s
    first = next(
        step
        for step in events
        if isinstance(step, StepEvent) and any(row.seq_id == admitted.seq_id and row.num_sampled for row in step.rows)
    )
    return admitted.time_s - arrival, next(first.ends()) - arrival
