"""An exercise is one object: its card, hints, random cases, reference, comparison and diagnosis.

The notebook's check, the grader and the tests all read it. A process that holds the learner's answer calls `obtain`,
and a process that holds the truth calls `judge`; only plain values pass between them.
"""

from __future__ import annotations

import copy
import dis
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cbserve.course.values import close, plain, rounded, shape_fault, shown
from cbserve.errors import CBServeError

#: One case: the arguments of one call of the answer. An exercise whose answer is a value has the single case ().
Case = tuple[Any, ...]


class BrokenRuleError(CBServeError):
    """An answer broke a rule before there was a value to judge. The message is that rule, for the learner."""


def call(answer: Any, args: Case) -> Any:
    """The usual way to get a value from an answer: call it; a value is taken as it is.

    Raises BrokenRuleError if a list or a tensor that was handed over is another one afterwards.
    """
    if not callable(answer):
        return answer
    before = [_image(arg) for arg in args]
    value = answer(*args)
    for index, (arg, was) in enumerate(zip(args, before, strict=True)):
        if (now := _image(arg)) != was:
            change = f": {was} became {now}" if len(was + now) <= 120 else ""
            cure = "take a copy, list(...)" if isinstance(arg, list) else "take a copy, .clone()"
            raise BrokenRuleError(
                f"your function changed {_argument(answer, args, index)}{change}. It belongs to the caller, who goes "
                f"on using it: {cure}, and change that"
            )
    return value


def _image(arg: Any) -> str:
    """What tells a value from another one, NaN included; a tensor's own text leaves numbers out."""
    return repr(arg.tolist() if hasattr(arg, "tolist") else arg)


def _argument(answer: Any, args: Case, index: int) -> str:
    try:
        names = getattr(args, "_fields", None) or tuple(inspect.signature(answer).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        names = ()
    return f"`{names[index]}`" if index < len(names) else f"argument {index + 1}"


def call_shown(answer: Any, args: Case) -> str:
    """The usual words for what was run: `utilisation([10, 100, 500])`."""
    if not callable(answer):
        return "your answer"
    return f"{getattr(answer, '__name__', 'answer')}({', '.join(shown(arg, 80) for arg in args)})"


def is_written(answer: Any) -> bool:
    """False for a stub: a value None or `...`, or a function or class whose own methods only return that.

    Decided by the compiled code, so that renaming, comments and a docstring change nothing.
    """
    if isinstance(answer, dict):
        return any(is_written(item) for item in answer.values())
    if isinstance(answer, tuple | list):
        return any(is_written(item) for item in answer)
    if inspect.isclass(answer):
        # Properties, class and static methods wrap the function that was written.
        own = [getattr(item, "fget", None) or getattr(item, "__func__", item) for item in vars(answer).values()]
        return any(is_written(item) for item in own if isinstance(item, types.FunctionType))
    if isinstance(answer, types.FunctionType):
        return not _only_returns_none(answer)
    return not (answer is None or answer is ...)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One graded exercise.

    id: `<lab>.<name>` such as "lab1.ex1"; the part before the dot names the module that defines it.
    difficulty, importance: 1 (low) to 5 (high). minutes: a learner's time. points: what it counts.
    hints: three, from a nudge to nearly the way; none contains the answer.
    cases(seed): arguments to try, the simplest first, the same for the same seed; plain values, unless `run` makes
        them into something else.
    reference(*args): the right value, computed by the engine's own functions wherever there is one.
    compare(value, expected): on plain values; used when kinds agree. diagnose(args, value, expected): the rule that a
        wrong value breaks, in one sentence, without the right value.
    run(answer, args): how a value is obtained from an answer: an exercise whose answer is a class hands it to the
        engine here and returns plain values of the trace. written(answer): False for a stub.
    words(answer, args): what was run, in one line. gave(value): what came of it, in one line.
    figure(args, value, expected): SVG of the first wrong step.
    """

    id: str
    title: str
    difficulty: int
    importance: int
    minutes: int
    points: int
    hints: tuple[str, str, str]
    cases: Callable[[int], list[Case]]
    reference: Callable[..., Any]
    diagnose: Callable[[Case, Any, Any], str]
    compare: Callable[[Any, Any], bool] = close
    run: Callable[[Any, Case], Any] = call
    written: Callable[[Any], bool] = is_written
    words: Callable[[Any, Case], str] = call_shown
    gave: Callable[[Any], str] = shown
    figure: Callable[[Case, Any, Any], str] | None = None

    def __post_init__(self) -> None:
        for name in ("difficulty", "importance"):
            if not 1 <= getattr(self, name) <= 5:
                raise ValueError(f"{self.id}: {name} is {getattr(self, name)}, and it goes from 1 to 5")
        if "." not in self.id:
            raise ValueError(f"exercise id {self.id!r} has no dot; it is <lab>.<name>, lab1.ex1 for instance")
        if len(self.hints) != 3:
            raise ValueError(f"{self.id} has {len(self.hints)} hints and needs 3")

    def obtain(self, answer: Any, args: Case) -> Any:
        """The plain value that `answer` gives for `args`. The answer works on copies of them.

        Raises whatever the answer raises, BrokenRuleError, and NotPlainError for a value that is not plain.
        """
        return plain(self.run(answer, copy.deepcopy(args)))

    def judge(self, args: Case, value: Any) -> str:
        """The rule that the plain `value` breaks for `args`, "" if it is right. Never says the right value."""
        expected = plain(self.reference(*copy.deepcopy(args)))
        if fault := shape_fault(value, expected):
            return fault
        if self.compare(value, expected):
            return ""
        if rounded(value, expected):
            return "this is rounded: return the full number"
        return self.diagnose(args, value, expected) or "this is not the value that the rules above give"

    def markdown(self) -> str:
        """The card that stands above the stub."""
        return (
            f"**Exercise {self.id} · {self.title}**\n\n"
            "| difficulty | importance | minutes | points |\n|---|---|---|---|\n"
            f"| {self.difficulty} of 5 | {self.importance} of 5 | {self.minutes} | {self.points} |\n\n"
            f'Stuck? `hint("{self.id}")` gives three hints, one a call.'
        )


#: What `...`, `pass`, `return None` and `raise NotImplementedError("...")` compile to, Python 3.11 to 3.14.
_IDLE = {
    *("RESUME", "NOP", "CACHE", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "POP_TOP"),
    *("PUSH_NULL", "PRECALL", "CALL", "RAISE_VARARGS", "COPY_FREE_VARS", "LOAD_COMMON_CONSTANT"),
}


def _only_returns_none(function: types.FunctionType) -> bool:
    instructions = list(dis.get_instructions(function))
    raises = any(step.opname == "RAISE_VARARGS" for step in instructions)

    def is_idle(step: dis.Instruction) -> bool:
        if step.opname == "LOAD_GLOBAL":
            return bool(step.argval == "NotImplementedError")
        if "CONST" in step.opname and not raises:
            return step.argval is None or step.argval is ...
        return step.opname in _IDLE

    return all(map(is_idle, instructions))
