"""The command line: `cbserve ...` and, before anything is installed, `python -m cbserve ...`.

Only the standard library is imported at the top; each command imports what it needs. Exit codes: 0 done,
1 a test, linter or check found something, 2 a CBServeError or bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from cbserve import __version__, bootstrap
from cbserve.calibrating import cli as calibrating_cli
from cbserve.errors import CBServeError
from cbserve.sim import cli as sim_cli

#: Commands that make their environment first and pass unknown arguments on: name -> (profile, help).
WORKSHOP = {
    "lab": ("learn", "open the course in JupyterLab"),
    "demo": ("learn", "serve the same requests by static and by continuous batching, in the terminal"),
    "test": ("test", "run every test"),
    "test-fast": ("test", "run the unit tests that need no model, notebook or browser"),
    "lint": ("test", "run ruff and mypy"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = [argument for argument in rest if argument != "--"]
    try:
        if options.profile:
            python = bootstrap.ensure(options.profile)
            if not bootstrap.is_running(python):
                bootstrap.hand_over(python, ["-m", "cbserve", *arguments])
        code = options.run(options)
        sys.stdout.flush()  # here, where a reader that has gone away is expected
        return code
    except BrokenPipeError:  # `| head` has read enough
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # of a file, which whoever opened it should have said
            raise
        _drop_output()
        print(f"cbserve: cannot write the output ({error.strerror}); send it elsewhere", file=sys.stderr)
        return 2
    except CBServeError as error:
        print(f"cbserve: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # `python -m cbserve` by a Python outside the environment
        if (error.name or "cbserve").partition(".")[0] == "cbserve":
            raise
        print(
            f"cbserve: {sys.executable} has no package {error.name}. Activate the environment that `make lab` made "
            r"(source .venv/bin/activate; on Windows .venv\Scripts\activate), or pip install -r requirements.txt",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("cbserve: interrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """`>&-` leaves no stream behind: nothing could be written, and the next file that opens would be taken for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open as long as we run


def _drop_output() -> None:
    """What is still buffered has nowhere to go; Python itself would try once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cbserve", description="A course on LLM serving, with its engine.")
    parser.add_argument("--version", action="version", version=f"cbserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str, profile: str = "", passes_on: bool = False
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run, profile=profile, passes_on=passes_on)
        return sub

    for name, (profile, text) in WORKSHOP.items():
        workshop = command(name, _workshop, text, profile, passes_on=True)
        if name == "lab":
            workshop.epilog = "cbserve lab reset ID, with lab1.ex1 for ID, say, brings one exercise back to its start."
    command("clean", _clean, "remove .venv and caches; work/ and the model stay")

    setup = command("setup", _setup, "make .venv and install what the course needs")
    setup.add_argument("--test", action="store_true", help="also what the tests and linters need")

    notebooks = command("notebooks", _notebooks, "build every notebook from its source, or check them", "test")
    notebooks.add_argument("action", nargs="?", choices=["build", "check"], default="build")
    notebooks.add_argument("names", nargs="*", help="build only these, 01_static_waste for instance")

    command("doctor", _doctor, "say what this machine and its Python can run, and the cure for each fault")

    model = command("model", _model, "the language model behind the course")
    actions = model.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="bring it into the cache folder (CBSERVE_HOME)")
    fetch.add_argument("name", nargs="?", default="smollm2-135m")
    export = actions.add_parser("export", help="write a folder that transformers and vLLM load")
    export.add_argument("folder")
    export.add_argument("--model", default="smollm2-135m", dest="name", help="a name or a local folder")
    actions.add_parser("list", help="which models there are and where they lie")

    generate = command("generate", _generate, "continue a prompt with the engine")
    generate.add_argument("prompt")
    generate.add_argument("--model", default="smollm2-135m")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")

    sim = command("sim", sim_cli.run, sim_cli.SUMMARY)
    sim_cli.add_arguments(sim)

    calibrate = command("calibrate", calibrating_cli.run_calibrate, calibrating_cli.CALIBRATE)
    calibrating_cli.add_calibrate_arguments(calibrate)
    twin = command("twin", calibrating_cli.run_twin, calibrating_cli.TWIN)
    calibrating_cli.add_twin_arguments(twin)
    return parser


def _workshop(options: argparse.Namespace) -> int:
    from cbserve import targets

    if options.command == "lab" and options.rest[:1] == ["reset"]:
        if len(options.rest) != 2:
            raise CBServeError("name one exercise, `cbserve lab reset lab1.ex1` for instance")
        return targets.lab_reset(options.rest[1])
    if options.command == "lab":
        return targets.lab(options.rest)
    if options.command == "test":
        return targets.test(options.rest)
    if options.command == "test-fast":
        return targets.test_fast(options.rest)
    if options.command == "lint":
        return targets.lint()
    from cbserve.demo import main as demo

    return demo(options.rest)


def _clean(options: argparse.Namespace) -> int:
    from cbserve import targets

    return targets.clean()


def _setup(options: argparse.Namespace) -> int:
    python = bootstrap.ensure("test" if options.test else "learn")
    print(f"cbserve: ready, {python}")
    return 0


def _notebooks(options: argparse.Namespace) -> int:
    from cbserve.course import builder

    if options.action == "build":
        known = {target.path.stem for target in builder.targets(bootstrap.ROOT)}
        if unknown := sorted(set(options.names) - known):
            raise CBServeError(f"no notebook named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        for path in builder.build(bootstrap.ROOT, options.names or None):
            print(f"cbserve: built {path}")
        return 0
    faults = builder.check(bootstrap.ROOT)
    for fault in faults:
        print(f"cbserve: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _doctor(options: argparse.Namespace) -> int:
    from cbserve.course.doctor import doctor

    report = doctor()
    print(report)
    return 0 if report.ok else 1


def _model(options: argparse.Namespace) -> int:
    from cbserve.models.fetch import SOURCES, fetch_model, model_path

    if options.action == "fetch":
        print(fetch_model(options.name))
    elif options.action == "export":
        from cbserve.models.weights import export_model

        print(export_model(options.name, options.folder))
    else:
        for name in SOURCES:
            print(f"{name}  {model_path(name) or 'not fetched'}")
        print("tiny  built in code, needs no file")
    return 0


def _generate(options: argparse.Namespace) -> int:
    from cbserve import LLM, SamplingParams

    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    with redirect_stdout(sys.stderr):  # what is said while loading must not stand in a piped answer
        llm = LLM(options.model, device=options.device)
    shown = 0
    prompt = [{"role": "user", "content": options.prompt}] if options.chat else options.prompt
    for output in llm.stream(prompt, params):
        if output.error:
            raise CBServeError(output.error)
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
    return 0
