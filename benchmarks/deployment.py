"""What a phase costs over two hospitals as processes: by Flower's own executor and by the worker.

    python benchmarks/deployment.py [--rounds 10] [--ways worker] [--checkout NAME] [--csv FILE]

The same run twice, FedAvg on digits over TLS on the loopback: once under a bare
``flower-supernode``, which starts a process for each message, once under the worker, which forks
one. A phase is the time from one train message at the first hospital to the next: a round. CPU
seconds are of a hospital's or the server's whole tree of processes between the first and the last
of them; ``own`` is what the hospital itself says that training and measuring took.

An existing CSV keeps its other lines, so that a second checkout can add its own: run its copy of
this file, one after the other on the same machine.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from unittest import mock

import numpy as np
import numpy.typing as npt
import pandas as pd
import psutil

from fedsilo.core.arguments import RunSources
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.processes import tool
from fedsilo.deployment import commands
from fedsilo.deployment import deployed_run as run
from fedsilo.deployment.deployment import SERVER, Deployment, read_deployment

SITES = 2
Seen = tuple[float, npt.NDArray[np.float64]]  # when, and CPU seconds of a hospital and the server
WAYS = ("flower-supernode", "worker")
_LOOK = 0.01  # seconds
_SETTINGS = (
    "train.local-epochs=1",
    "train.mc-passes=0",
    "server.evaluate-every=0",
    "machine.device=cpu",
    "machine.threads=1",
)


def measured(way: str, rounds: int) -> dict[str, str | float]:
    """Bring a deployment up, run FedAvg on it, and return what it cost."""
    with tempfile.TemporaryDirectory() as scratch, _started(way, Path(scratch)) as deployment:
        site = deployment.sites[0]
        with _watched(deployment, site) as received:
            sources = RunSources(
                out=deployment.runs,
                changes=(f"split.silos={SITES}", f"rounds={rounds}", *_SETTINGS),
            )
            directory = run.run("fedavg-digits", deployment.folder, sources, print, name="timed")
        phases = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(received)]
        at_site, at_server = received[-1][1] - received[0][1]
        traffic = pd.read_csv(directory / "traffic.csv")
        own = traffic[(traffic["site"] == site) & (traffic["phase"] == "train")]["seconds"]
        return {
            "way": way,
            "phases": len(phases),
            "phase median s": round(statistics.median(phases), 2),
            "phase worst s": round(max(phases), 2),
            "own median s": round(float(own.median()), 2),
            "CPU s a message": round(at_site / len(phases), 2),
            "server CPU s": round(at_server / len(phases), 2),
        }


@contextmanager
def _started(way: str, folder: Path) -> Iterator[Deployment]:
    """Bring up a server and hospitals, whose nodes are started in one way or the other."""
    command = Deployment.supernode_command

    def bare(deployment: Deployment, site: str) -> list[str]:
        return [tool("flower-supernode"), *command(deployment, site)[3:]]

    chosen = bare if way == WAYS[0] else command
    low = ("minimum-batch=1", "minimum-steps-per-reply=1")
    with mock.patch.object(Deployment, "supernode_command", chosen):
        commands.up(folder, "fedavg-digits", {"sites": SITES, "node_config": low}, print)
        try:
            yield read_deployment(folder)
        finally:
            commands.down(folder)


@contextmanager
def _watched(deployment: Deployment, site: str) -> Iterator[list[Seen]]:
    """Note when each train message comes, by the SuperNode's log, and the CPU spent till then."""
    seen: list[Seen] = []
    ended = Event()
    log = deployment.log(site)
    start = log.stat().st_size

    def watch() -> None:
        while not ended.wait(_LOOK):
            with log.open("rb") as file:
                file.seek(start)
                count = file.read().count(b"Receiving: train")
            if count > len(seen):
                spent = np.array([cpu_seconds(deployment, member) for member in (site, SERVER)])
                seen.extend([(time.monotonic(), spent)] * (count - len(seen)))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def cpu_seconds(deployment: Deployment, member: str) -> float:
    """Return the CPU seconds of a member's processes, those that have ended too."""
    process = deployment.process(member)
    total = 0.0
    for one in [process, *process.children(recursive=True)] if process else []:
        with suppress(psutil.NoSuchProcess):
            total += sum(one.cpu_times()[:4])  # user, system, and the same of collected children
    return total


def main() -> None:
    """Measure both ways, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--checkout", default="after", help="its name in the table")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    table = pd.DataFrame([measured(way, given.rounds) for way in given.ways])
    table.insert(0, "checkout", given.checkout)
    print(table.to_string(index=False))
    if given.csv:
        if given.csv.exists():
            both = pd.concat([pd.read_csv(given.csv), table])
            table = both.drop_duplicates(["checkout", "way"], keep="last")
        write_atomically(given.csv, table.to_csv(index=False, lineterminator="\n"))


if __name__ == "__main__":
    main()
