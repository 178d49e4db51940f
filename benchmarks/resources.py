"""Measure the memory, CPU, bytes and disk that a method needs at a hospital and at the server.

    python benchmarks/resources.py [--methods fedavg uefl] [--csv FILE]

A server and hospitals run as processes of this machine, over TLS on the loopback, with one thread
for training each. Memory is the largest sum over a member's processes of their proportional share
(PSS), read four times a second from the start of the run to its end. CPU seconds and bytes are
those of a round, the mean over all rounds but the first, which also loads the code and the data.
Bytes are counted by the server (traffic.csv). Disk is what a run left: its directory and its part
of the server's database, and at the hospital its private state and log.

An existing CSV keeps the rows of methods that are not measured again.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import pandas as pd
import psutil
from deployment import cpu_seconds

from fedsilo.core.arguments import RunSources
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.deployment import commands
from fedsilo.deployment import deployed_run as run
from fedsilo.deployment.deployment import SERVER, Deployment, read_deployment
from fedsilo.deployment.options import DeploymentOptions

_LOOK = 0.25  # seconds
_MEGABYTE = 1e6
_SETTINGS = ("machine.device=cpu", "machine.threads=1")
_NODE = (
    "minimum-batch=1",
    "minimum-steps-per-reply=1",
    "minimum-measured=1",
    "sums-min-count=1",
    "allow-folds=true",
    "allow-embeddings=true",
)


@dataclass(frozen=True)
class Job:
    """The experiment that stands for a method, with the changes that make it small."""

    experiment: str
    changes: tuple[str, ...] = ("dataset=digits", "split.silos=3", "rounds=6")
    names: str = "fedavg-digits"  # the experiment whose silos are the sites
    sites: tuple[str, ...] = ()  # named ones of them; empty for the first three


JOBS: Mapping[str, Job] = {
    "fedavg": Job("fedavg-digits"),
    "uefl": Job("uefl-digits", (*Job("").changes, "uefl.iteration-rounds=3")),
    "fedaligncl": Job(
        "fedaligncl",
        (*Job("").changes, "train.epoch-steps=20", "train.pace=20"),
    ),
    "fedefm": Job("fedefm"),
    "picsr": Job(
        "picsr",
        (*Job("").changes, "picsr.warmup-rounds=2", "picsr.expert-rounds=2"),
    ),
    # Its network reads images of at least a patch; these are two of its own six hospitals
    "fedevprompt": Job(
        "fedevprompt-phantom",
        ("rounds=4", "run.min-sites=2", "run.away-timeout=5"),
        "fedevprompt-phantom",
        ("bcn", "rosendahl"),
    ),
}


@dataclass
class Watched:
    """The largest memory of each member in bytes, and its CPU seconds after each round."""

    memory: dict[str, int]
    cpu: dict[str, list[float]] = field(default_factory=dict)


def measured(method: str, job: Job) -> dict[str, str | float]:
    """Bring a deployment up, run a method on it, and return what a round and the run took."""
    with tempfile.TemporaryDirectory() as scratch, _started(job, Path(scratch)) as deployment:
        site = deployment.sites[0]
        before = _size(deployment.home(SERVER)), _size(deployment.home(site))
        with _watching(deployment, (site, SERVER), deployment.runs / "measured") as watched:
            sources = RunSources(out=deployment.runs, changes=(*job.changes, *_SETTINGS))
            directory = run.run(job.experiment, deployment.folder, sources, print, name="measured")
        after = _size(deployment.home(SERVER)), _size(deployment.home(site))
        traffic = pd.read_csv(directory / "traffic.csv")
        rounds = traffic["round"].max()
        own = traffic[(traffic["site"] == site) & (traffic["round"] > 1)]
        summary = pd.read_json(directory / "summary.json", typ="series")
        return {
            "method": method,
            "dataset": str(summary["dataset"]),
            "hospitals": len(deployment.sites),
            "rounds": int(rounds),
            "hospital memory MB": round(watched.memory[site] / _MEGABYTE),
            "server memory MB": round(watched.memory[SERVER] / _MEGABYTE),
            "hospital CPU s": round(_of_a_round(watched.cpu[site]), 2),
            "server CPU s": round(_of_a_round(watched.cpu[SERVER]), 2),
            "down MB": round(own["bytes_down"].sum() / (rounds - 1) / _MEGABYTE, 3),
            "up MB": round(own["bytes_up"].sum() / (rounds - 1) / _MEGABYTE, 3),
            "server disk MB": round((after[0] - before[0]) / _MEGABYTE, 1),
            "hospital disk MB": round((after[1] - before[1]) / _MEGABYTE, 2),
        }


@contextmanager
def _started(job: Job, folder: Path) -> Iterator[Deployment]:
    """Bring up a server and the hospitals of a job, which allow small batches."""
    options: DeploymentOptions = {"node_config": _NODE, "sites": 3}
    if job.sites:
        options = {"node_config": _NODE, "site": job.sites}
    commands.up(folder, job.names, options, print)
    try:
        yield read_deployment(folder)
    finally:
        commands.down(folder)


@contextmanager
def _watching(
    deployment: Deployment, members: tuple[str, ...], directory: Path
) -> Iterator[Watched]:
    """Read the memory of members again and again, and their CPU seconds when a round ends."""
    watched = Watched(dict.fromkeys(members, 0), {member: [] for member in members})
    ended = Event()

    def watch() -> None:
        rounds = 0
        while not ended.wait(_LOOK):
            for member in members:
                watched.memory[member] = max(watched.memory[member], _memory(deployment, member))
            if (reached := _rounds(directory / "traffic.csv")) > rounds:
                rounds = reached
                for member in members:
                    watched.cpu[member].append(cpu_seconds(deployment, member))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        ended.set()
        thread.join()


def _rounds(path: Path) -> int:
    """Return the newest round in traffic.csv, or 0 before the first."""
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text(encoding="utf-8").splitlines()[-1].split(",")[0])
    return 0


def _memory(deployment: Deployment, member: str) -> int:
    """Return the bytes of a member's processes; pages that they share count once."""
    process = deployment.process(member)
    total = 0
    for one in [process, *process.children(recursive=True)] if process else []:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += one.memory_full_info().pss
    return total


def _of_a_round(seconds: list[float]) -> float:
    """Return the CPU seconds of a round, from those at the end of each."""
    return (seconds[-1] - seconds[0]) / (len(seconds) - 1)


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure the methods, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    for method in given.methods:
        table = pd.DataFrame([measured(method, JOBS[method])])
        if given.csv and given.csv.exists():
            both = pd.concat([pd.read_csv(given.csv), table])
            table = both.drop_duplicates("method", keep="last")
            table = table.sort_values("method", key=lambda names: names.map(list(JOBS).index))
        print(table.to_string(index=False))
        if given.csv:
            write_atomically(given.csv, table.to_csv(index=False, lineterminator="\n"))


if __name__ == "__main__":
    main()
