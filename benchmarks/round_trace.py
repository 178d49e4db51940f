"""The way of one FedAvg round: which of our functions it passes, traced at run time.

    python benchmarks/round_trace.py [--list] [--until-step]

Three silos of digits, a conv network, the in-process engine; counted from the round's begin at the
server to its end, with messages, checks, training, measuring, metrics, traffic and checkpoint.
Functions with a name are counted once each, however often they run; comprehensions and generated
methods are not. ``--until-step`` counts only up to the first step of the first site's optimiser.
"""

import importlib
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(
    f"{ROOT}/{name}/" for name in ("models", "datasets", "strategies", "client_app", "server_app")
)
ROUND = {"_run_round", "run_round"}  # what runs one round, by its name
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
    """Notes the functions of this project that are entered while a round runs."""

    def __init__(self) -> None:
        self.inside = 0
        self.passed: dict[tuple[str, str], int] = {}
        self.at_first_step = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call or a return."""
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGES):
            return
        if code.co_name in ROUND:
            self.inside += {"call": 1, "return": -1}.get(event, 0)
        counts = self.inside and not code.co_name.startswith("<")
        if event == "call" and counts:
            self.passed.setdefault((code.co_filename, code.co_qualname), len(self.passed))


@dataclass(frozen=True)
class Trace:
    """The functions that a round passes, each once with its file, in the order of first calls.

    Attributes:
        passed: file and name of each.
        at_first_step: how many of them come before the first step of the first site's optimiser.
    """

    passed: tuple[tuple[str, str], ...]
    at_first_step: int

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {file for file, _ in self.passed}


def trace_round() -> Trace:
    """Run a round and return what it passed; nothing of a run may have happened in this process."""
    sys.path.insert(0, str(ROOT))
    from fedsilo.server_app.config.settings import resolve
    from fedsilo.server_app.run.inline_engine import run_inline

    importlib.import_module("torch._dynamo")  # not while each call is looked at
    tracer = Tracer()
    step = torch.optim.Adam.step

    def first_step(self: torch.optim.Adam, *args: Any, **options: Any) -> Any:
        tracer.at_first_step = tracer.at_first_step or len(tracer.passed)
        return step(self, *args, **options)

    torch.optim.Adam.step = first_step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        settings = resolve(VALUES | {"run.out": folder, "data.cache-dir": folder})
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        run_inline(settings, 3)
        sys.setprofile(None)
    passed = tuple((file.removeprefix(f"{ROOT}/"), name) for file, name in tracer.passed)
    return Trace(passed, tracer.at_first_step)


def main() -> None:
    """Trace a round and print what it passed."""
    trace = trace_round()
    if "--until-step" in sys.argv:
        trace = replace(trace, passed=trace.passed[: trace.at_first_step])
    if "--list" in sys.argv:
        print("\n".join(f"{file}: {name}" for file, name in trace.passed))
    print(f"{len(trace.passed)} functions in {len(trace.files)} files", end="; ")
    print(f"{trace.at_first_step} functions to the first optimiser step")


if __name__ == "__main__":
    main()
