"""The way of one FedAvg round or of one command: which of our functions it passes, at run time.

    python benchmarks/round_trace.py [--list] [--until-step]
    python benchmarks/round_trace.py [--list] --command report RUN --out page.html
    python benchmarks/round_trace.py --start [--list]

Without ``--command``: three silos of digits, a conv network, the in-process engine; counted from
the round's begin at the server to its end, with messages, checks, training, measuring, metrics,
traffic and checkpoint. ``--until-step`` counts only up to the first step of the first site's
optimiser. With it: the command line that follows, from its first word to its end.
Functions with a name are counted once each, however often they run; comprehensions and generated
methods are not, nor pages' templates, nor what runs while a module is imported.

``--start`` counts the way to that round instead: the functions that
``fedsilo simulate fedavg-digits`` passes from the command line's ``main`` until the first round
begins, for all nine silos. Their data are in the cache already, as at all runs but the first.
"""

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("fedsilo", "models", "datasets", "strategies", "client_app", "server_app")
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ROOMS)
ROUND = {"_run_round", "run_round"}  # what runs one round, by its name
FILL_CACHE = """
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.engines.experiments import find_experiment, simulation_file
from fedsilo.server_app.config.settings import resolve
common = resolve(find_experiment(simulation_file(None), "fedavg-digits").values).common
for name in silo_names(common):
    load_silo(name, common)
"""
INTERRUPTED = 130  # the exit code of an interrupted command
COMMAND = {"_invoke"}  # what runs one command
VALUES = {
    "method": "fedavg",
    "dataset": "digits",
    "split.silos": 3,
    "split.silo-train-size": 40,
    "split.silo-test-size": 10,
    "rounds": 1,
    "train.local-epochs": 1,
    "train.batch-size": 16,
    "network.width": 4,
    "train.mc-passes": 3,
    "machine.device": "cpu",
    "run.name": "run",
}


class Tracer:
    """Notes the functions of this project that are entered while one of ``outermost`` runs."""

    def __init__(self, outermost: set[str]) -> None:
        self.outermost = outermost
        self.inside = 0
        self.importing = 0
        self.passed: dict[tuple[str, str], int] = {}
        self.at_first_step = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call or a return."""
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGES) or not code.co_filename.endswith(".py"):
            return
        depth = {"call": 1, "return": -1}.get(event, 0)
        if code.co_name in self.outermost:
            self.inside += depth
        if code.co_name == "<module>":
            self.importing += depth
        counts = self.inside and not self.importing and not code.co_name.startswith("<")
        if event == "call" and counts:
            self.passed.setdefault((code.co_filename, code.co_qualname), len(self.passed))


class StartTracer:
    """Notes the functions of this project that are entered before the first round begins.

    It interrupts the run there, as Ctrl-C would, because the round itself is not counted.
    """

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], None] = {}
        self.importing = 0  # modules whose text runs now

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call."""
        code = frame.f_code
        if code.co_name == "<module>":
            self.importing += {"call": 1, "return": -1}.get(event, 0)
        is_ours = code.co_filename.startswith(PACKAGES)
        if event != "call" or not is_ours or self.importing:
            return
        if code.co_name in ROUND:
            sys.setprofile(None)
            raise KeyboardInterrupt
        # The body of a class also runs as a call, but without the flag of functions
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        if is_function and not code.co_name.startswith("<"):
            self.passed[(code.co_filename, code.co_qualname)] = None


@dataclass(frozen=True)
class Trace:
    """The functions that were passed, each once with its file, in the order of first calls.

    Attributes:
        passed: file and name of each.
        at_first_step: how many of them come before the first step of the first site's optimiser.
    """

    passed: tuple[tuple[str, str], ...]
    at_first_step: int = 0

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {file for file, _ in self.passed}


def trace_round() -> Trace:
    """Run a round and return what it passed; nothing of a run may have happened in this process."""
    from fedsilo.engines.inline_engine import run_inline
    from fedsilo.server_app.config.settings import resolve

    importlib.import_module("torch._dynamo")  # not while each call is looked at
    tracer = Tracer(ROUND)
    step = torch.optim.Adam.step

    def first_step(self: torch.optim.Adam, *args: Any, **options: Any) -> Any:
        tracer.at_first_step = tracer.at_first_step or len(tracer.passed)
        return step(self, *args, **options)

    torch.optim.Adam.step = first_step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        settings = resolve(VALUES | {"out": folder, "cache-dir": folder})
        return _traced(tracer, lambda: run_inline(settings, 3))


def trace_command(words: Sequence[str]) -> Trace:
    """Run a command line, such as ``report RUN``, and return what it passed."""
    from fedsilo.cli.main import main as run_command

    return _traced(Tracer(COMMAND), lambda: run_command(words))


def _traced(tracer: Tracer, work: Callable[[], Any]) -> Trace:
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    work()
    sys.setprofile(None)
    threading.setprofile(None)
    passed = tuple((file.removeprefix(f"{ROOT}/"), name) for file, name in tracer.passed)
    return Trace(passed, tracer.at_first_step)


def trace_start() -> Trace:
    """Start a run by its command and return the functions it passed before the first round.

    Nothing of a run may have happened in this process.
    """
    sys.path.insert(0, str(ROOT))
    from fedsilo.cli.main import main as run_command

    importlib.import_module("torch._dynamo")  # not while each call is looked at
    tracer = StartTracer()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDSILO_CACHE"] = folder
        subprocess.run([sys.executable, "-c", FILL_CACHE], check=True)
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        code = run_command(["simulate", "fedavg-digits", "--engine", "inline", "--out", folder])
        threading.setprofile(None)  # type: ignore[arg-type]
    if code != INTERRUPTED:
        raise SystemExit(f"the run ended before its first round, with exit code {code}")
    passed = tuple((file.removeprefix(f"{ROOT}/"), name) for file, name in tracer.passed)
    return Trace(passed, 0)


def main() -> None:
    """Trace a round, a run's start or a command, and print what it passed."""
    sys.path.insert(0, str(ROOT))
    if "--start" in sys.argv:
        trace = trace_start()
        if "--list" in sys.argv:
            print("\n".join(f"{file}: {name}" for file, name in trace.passed))
        print(f"{len(trace.passed)} functions in {len(trace.files)} files before the first round")
        return
    if "--command" in sys.argv:
        trace = trace_command(sys.argv[sys.argv.index("--command") + 1 :])
    else:
        trace = trace_round()
    if "--until-step" in sys.argv:
        trace = replace(trace, passed=trace.passed[: trace.at_first_step])
    if "--list" in sys.argv:
        print("\n".join(f"{file}: {name}" for file, name in trace.passed))
    print(f"{len(trace.passed)} functions in {len(trace.files)} files", end="; ")
    print(f"{trace.at_first_step} functions to the first optimiser step")


if __name__ == "__main__":
    main()
