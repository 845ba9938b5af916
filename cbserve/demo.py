"""`make demo`: the same requests served by static and by continuous batching, on the real model, in a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.bounds import continuous_steps_bound, static_steps
from cbserve.core.summary import Summary, summarize
from cbserve.core.trace import Trace
from cbserve.serving import serve
from cbserve.viz.table import table
from cbserve.viz.text import timeline_text
from cbserve.workloads.lengths import lognormal

PROMPT_TOKENS = 16


def main(args: Sequence[str] = ()) -> int:
    """Serve, draw, compare. Returns 0."""
    parser = argparse.ArgumentParser(prog="cbserve demo", description=__doc__)
    parser.add_argument("--requests", type=_positive, default=20, help="how many requests (default 20)")
    parser.add_argument("--slots", type=_positive, default=4, help="how many at a time (default 4)")
    parser.add_argument(
        "--median", type=_positive, default=14, help="median answer in tokens; lengths are lognormal (14)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m, tiny, or a Hugging Face folder")
    parser.add_argument("--width", type=_positive, default=100, help="columns of the timeline")
    options = parser.parse_args(list(args))
    return run(options)


def _positive(text: str) -> int:
    value = int(text) if text.lstrip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return value


def run(options: argparse.Namespace) -> int:
    from cbserve.llm import LLM  # torch: only now, so that --help is instant
    from cbserve.replay import measure_step_times

    slots = options.slots
    lengths = lognormal(options.median, 0.9, options.requests, options.seed)
    print(f"{len(lengths)} requests, {slots} slots, {PROMPT_TOKENS} prompt tokens each; answers of {lengths} tokens.")
    print(f"Loading {options.model} ...", flush=True)
    batchings: dict[str, Batching] = {
        "static": StaticBatching(slots),
        "continuous": ContinuousBatching(max_num_seqs=slots),
    }
    blocks = slots * -(-(PROMPT_TOKENS + max(lengths)) // 16)
    llms = {}
    for name, batching in batchings.items():
        llms[name] = LLM(options.model, batching=batching, num_blocks=blocks, verbose=False)
    print("Measuring what a step costs on this machine ...", flush=True)
    sizes = sorted({1, max(1, slots // 2), slots, PROMPT_TOKENS, PROMPT_TOKENS * slots})
    times = measure_step_times(llms["continuous"], sizes)
    measured: dict[str, Trace] = {}
    predicted: dict[str, Summary] = {}
    for name, batching in batchings.items():
        print(f"Serving with {name} batching ...", flush=True)
        measured[name] = serve(lengths, llm=llms[name], prompt_tokens=PROMPT_TOKENS)
        predicted[name] = summarize(serve(lengths, batching, prompt_tokens=PROMPT_TOKENS, step_time_s=times))
    found = {name: summarize(trace) for name, trace in measured.items()}
    for trace in measured.values():
        print(f"\n{timeline_text(trace, width=options.width)}")
    print()
    print(table(["", "static", "continuous"], _rows(lengths, slots, found, predicted)))
    gain = found["static"].makespan_s / found["continuous"].makespan_s
    foreseen = predicted["static"].makespan_s / predicted["continuous"].makespan_s
    steps = static_steps(lengths, slots) / continuous_steps_bound(lengths, slots)
    print(
        f"\nContinuous batching is {gain:.2f} times as fast (measured here; predicted {foreseen:.2f}; in steps it "
        f"cannot exceed {steps:.2f})."
    )
    return 0


def _rows(
    lengths: Sequence[int], slots: int, found: dict[str, Summary], predicted: dict[str, Summary]
) -> list[list[str]]:
    names = ("static", "continuous")
    fewest = {"static": static_steps(lengths, slots), "continuous": continuous_steps_bound(lengths, slots)}
    return [
        ["steps, fewest possible", *(str(fewest[name]) for name in names)],
        ["steps, predicted", *(str(predicted[name].num_steps) for name in names)],
        ["steps, measured", *(str(found[name].num_steps) for name in names)],
        [f"utilisation of {slots} slots, predicted", *(f"{predicted[name].slot_utilisation:.1%}" for name in names)],
        [f"utilisation of {slots} slots, measured", *(f"{found[name].slot_utilisation:.1%}" for name in names)],
        ["seconds, predicted", *(f"{predicted[name].makespan_s:.1f}" for name in names)],
        ["seconds, measured", *(f"{found[name].makespan_s:.1f}" for name in names)],
        ["tokens per second, measured", *(f"{found[name].tokens_per_s:.1f}" for name in names)],
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
