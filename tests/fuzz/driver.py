"""The fuzzing driver: seeded trials of a kind, each watched, every failure told with its seed.

A trial hands mutated input to code that reads it. It may succeed or end by one of the project's own
errors; all else is a failure: another exception, more than ten seconds, more than 100 MB of memory
beyond what there was, a text that no console should show, or what the trial itself finds wrong.

    FUZZ_KIND=reply-fedavg FUZZ_SEED=17 python -m pytest tests/fuzz        one trial again
    make fuzz TRIALS=1000                                                  a thousand of each kind
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedsilo.core.errors import FedsiloError
from tests.fuzz.oracle import text_faults

SECONDS = 10.0
MEGABYTES = 100
_OURS = str(Path(__file__).resolve().parents[2])
_PATIENCE = 6  # seconds of the clock for each second of the process's own
_STUCK = 120.0  # seconds after which a trial that Python cannot interrupt ends the process
_SPACE = 4 * 2**30  # bytes of address space beyond the present that a trial may ask for

Random = random.Random


@dataclass
class Trial:
    """One trial as it goes on.

    Attributes:
        rng: its random numbers, all of them.
        folder: its own, empty at the start and removed at the end.
        done: what was mutated and how, told if it fails.
        shown: texts that were printed, logged or told.
        faults: what the trial itself finds wrong.
        refused: whether the input was refused.
        megabytes: more memory that the input openly asks for.
    """

    rng: Random
    folder: Path
    done: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    refused: bool = False
    megabytes: float = 0.0


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: what ``FUZZ_KIND`` calls it, and all whose names begin so.
        prepare: given a folder, makes what all trials share and returns what runs one.
        few: trials in ``make test``.
    """

    name: str
    prepare: Callable[[Path], Callable[[Trial], None]]
    few: int


@dataclass(frozen=True)
class Failure:
    """A trial that failed."""

    kind: str
    seed: int
    what: str
    done: str

    def __str__(self) -> str:
        """Return a line by which it can be run again."""
        again = f"FUZZ_KIND={self.kind} FUZZ_SEED={self.seed} python -m pytest tests/fuzz"
        return f"{again}\n    {self.what}\n    mutated: {self.done}"


@dataclass
class Campaign:
    """What came of the trials of a kind."""

    kind: str
    seeds: range
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0


class Hang(BaseException):
    """A trial has taken too long; no handler of ``Exception`` swallows it."""


def seeds_of(kind: Kind) -> range:
    """Return the seeds to try: that of ``FUZZ_SEED``, ``FUZZ_TRIALS`` from ``FUZZ_FIRST``, or few.

    The kinds are those whose names begin with ``FUZZ_KIND``; of others there are none.
    """
    if not kind.name.startswith(os.environ.get("FUZZ_KIND", "")):
        return range(0)
    if seed := os.environ.get("FUZZ_SEED", ""):
        return range(int(seed), int(seed) + 1)
    first = int(os.environ.get("FUZZ_FIRST", "0"))
    return range(first, first + int(os.environ.get("FUZZ_TRIALS", "") or kind.few))


def check(kind: Kind, folder: Path) -> None:
    """Run the trials that are asked for, in a test; skip it where none is.

    Raises:
        AssertionError: some failed.
    """
    seeds = seeds_of(kind)
    if not seeds:
        pytest.skip("not the kind asked for")
    failures = run_campaign(kind, seeds, folder).failures
    told = "\n".join(ascii_only(str(failure)) for failure in failures[:5])
    assert not failures, f"{len(failures)} of {len(seeds)} trials failed:\n{told}"


def run_campaign(kind: Kind, seeds: Sequence[int], folder: Path) -> Campaign:
    """Run a trial for each seed; failures are printed as they come."""
    campaign = Campaign(kind.name, range(seeds[0], seeds[-1] + 1))
    shared = folder / "shared"
    shared.mkdir(parents=True)
    run = kind.prepare(shared)
    began = time.monotonic()
    for seed in seeds:
        trial = Trial(Random(f"{kind.name} {seed}"), folder / "trial")
        what, took = _attempt(run, trial)
        campaign.refused += trial.refused
        campaign.slowest = max(campaign.slowest, took)
        if what:
            failure = Failure(kind.name, seed, what, "; ".join(trial.done)[:2000])
            campaign.failures.append(failure)
            print(ascii_only(str(failure)), file=sys.stderr, flush=True)
    campaign.seconds = time.monotonic() - began
    _note(campaign)
    return campaign


def _attempt(run: Callable[[Trial], None], trial: Trial) -> tuple[str, float]:
    """Return what is wrong with a trial, empty if nothing, and its seconds."""
    trial.folder.mkdir()
    began, before = time.monotonic(), _reset_peak()
    what = ""
    try:
        with _ended_after(SECONDS), _bounded_space():
            run(trial)
    except FedsiloError as error:
        trial.refused = True
        trial.shown.append(str(error))
    except Hang:
        what = f"hang: more than {SECONDS:g} s"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        last = next((f for f in reversed(where) if _OURS in f.filename), where[-1])
        what = f"traceback: {type(error).__name__}: {str(error)[:300]}"
        what += f" ({'/'.join(Path(last.filename).parts[-3:])}:{last.lineno})"
        if os.environ.get("FUZZ_SEED"):
            traceback.print_exc()
    took, grown = time.monotonic() - began, (_peak() - before) / 1e6
    shutil.rmtree(trial.folder, ignore_errors=True)
    if not what and grown > MEGABYTES + trial.megabytes:
        what = f"memory: {grown:.0f} MB more"
    faults = [*trial.faults, *(fault for text in trial.shown for fault in text_faults(text))]
    return what or "; ".join(faults[:3]), took


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the block by ``Hang``; where Python cannot, the whole process with all its stacks.

    The seconds are the process's own, or many times as many of the clock: other work on the
    machine makes no hang.
    """

    def end(number: int, frame: object) -> None:
        raise Hang

    timers = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, end) for number in timers.values()}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE * seconds)
    faulthandler.dump_traceback_later(_STUCK, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer, number in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextmanager
def _bounded_space() -> Iterator[None]:
    """Let the block ask for so much address space and no more: a bomb must not end the machine."""
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (present + _SPACE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _reset_peak() -> int:
    """Forget the largest memory so far and return the present one, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _note(campaign: Campaign) -> None:
    """Add a line of JSON to the file that ``FUZZ_NOTES`` names."""
    if path := os.environ.get("FUZZ_NOTES", ""):
        told = {
            "kind": campaign.kind,
            "seeds": [campaign.seeds.start, campaign.seeds.stop - 1],
            "trials": len(campaign.seeds),
            "refused": campaign.refused,
            "failures": [[f.seed, f.what] for f in campaign.failures],
            "seconds": round(campaign.seconds, 1),
            "slowest": round(campaign.slowest, 2),
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(told) + "\n")


def ascii_only(text: str) -> str:
    """Return a text that any console can print: a failure may quote what it is about."""
    return text.encode("ascii", "backslashreplace").decode().replace("\x1b", "\\x1b")
