"""What a client gets back, shaped like vLLM's outputs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from cbserve.core.request import FinishReason, Request, Sequence
from cbserve.core.stopping import visible_text


@dataclass(slots=True)
class CompletionOutput:
    """One sample of an answer. `token_ids` holds the stop token, `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None  # for each token: {id: log-probability}, the chosen one and the top


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    num_preemptions: int = 0


@dataclass(slots=True)
class Times:
    """Seconds on the engine's clock; None when it never got that far."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: whole when `finished`, else what there is so far.

    `error` says why a request was refused; such an answer has finish_reason "error" and no tokens.
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    outputs: list[CompletionOutput]
    finished: bool
    usage: Usage
    times: Times
    prompt: str | None = None
    error: str | None = None


class OutputBuilder:
    """Collects the output of one unfinished request."""

    def __init__(self, request: Request, arrival_s: float) -> None:
        self.request = request
        self.times = Times(arrival_s)
        self.samples: dict[int, Sequence] = {}
        self.logprobs: dict[int, list[dict[int, float]]] = {}
        self.text_sent: dict[int, int] = {}
        self.texts: dict[int, str] = {}

    @property
    def finished(self) -> bool:
        return len(self.samples) == self.request.params.n and all(seq.is_finished for seq in self.samples.values())

    def build(self) -> RequestOutput:
        """The output so far; text that a stop string may yet cut is held back until the end."""
        outputs = []
        for index, seq in sorted(self.samples.items()):
            text, self.text_sent[index] = visible_text(seq, self.text_sent.get(index, 0))
            text = self.texts[index] = self.texts.get(index, "") + text
            ids, logprobs = list(seq.output_token_ids), self.logprobs.get(index)
            outputs.append(CompletionOutput(index, text, ids, seq.finish_reason, seq.stop_reason, logprobs))
        usage = Usage(
            len(self.request.prompt_token_ids),
            sum([len(output.token_ids) for output in outputs]),
            sum([seq.num_preemptions for seq in self.samples.values()]),
        )
        prompt = self.request.prompt_token_ids
        prompt = list(prompt) if isinstance(prompt, list) else prompt  # what nobody can change need not be copied
        return RequestOutput(self.request.request_id, prompt, outputs, self.finished, usage, self.times)


def unserved_output(request: Request, now_s: float, reason: FinishReason, message: str | None = None) -> RequestOutput:
    """The answer to a request that ends before anybody queued it: it can never be served, or was taken back."""
    outputs = [CompletionOutput(index, finish_reason=reason) for index in range(request.params.n)]
    usage = Usage(len(request.prompt_token_ids), 0)
    times = Times(now_s, finished_s=now_s)
    return RequestOutput(request.request_id, request.prompt_token_ids, outputs, True, usage, times, error=message)
