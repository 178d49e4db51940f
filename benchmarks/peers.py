"""The same FedAvg by fedsilo and by what one would pick instead: time, processor, memory.

    python benchmarks/peers.py --data-dir DIR [--nvflare PYTHON] [--rounds 5] [--turns 1]
        [--only NAME ...] [--csv FILE]

Nine MNIST silos, one network, the same local steps, one thread a client: a bare loop and fedsilo's
inline engine one client after the other; fedsilo with processes and with Ray, plain Flower and
NVFlare's simulator two at once. Each is a process of its own. Final models are measured once, on
all clients' test images; fedsilo draws start and order by its seed, the others as ``peer_job.py``
does.
``--nvflare`` is the Python of an environment in which NVFlare is installed and fedsilo's packages
can be imported after NVFlare's own; without it that row is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from threading import Thread

import pandas as pd
import psutil
from rich.console import Console
from rich.table import Table

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.settings_schema import Value

HERE = Path(__file__).resolve().parent
_LOOK = 0.5  # seconds between looks at the processes
_VALUES: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "mnist",
    "silos": 9,
    "batch-size": 64,
    "local-epochs": 1,
    "dropout": 0.0,
    "mc-passes": 0,
    "evaluate-every": 0,
    "device": "cpu",
    "threads": 1,
}


class Watch(Thread):
    """Adds up what a process and all that it started take, until it ends.

    Attributes:
        cpu: processor seconds, as of each process's last look.
        peak: bytes, the most that all held at once; shared pages are counted by their share.
    """

    def __init__(self, root: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._seconds: dict[psutil.Process, float] = {}
        self.peak = 0

    @property
    def cpu(self) -> float:
        """Return the processor seconds of all processes seen."""
        return sum(self._seconds.values())

    def run(self) -> None:
        """Look until the process has ended."""
        while self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
            self.peak = max(self.peak, sum(self._look_at(p) for p in self._tree()))
            time.sleep(_LOOK)

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []

    def _look_at(self, process: psutil.Process) -> int:
        try:
            times = process.cpu_times()
            self._seconds[process] = times.user + times.system
            return int(process.memory_full_info().pss)
        except psutil.Error:
            return 0


def measured(command: list[str]) -> dict[str, float]:
    """Run a rival and return its figures with its wall time, processor seconds and peak memory."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watch = Watch(psutil.Process(process.pid))
    watch.start()
    said, errors = process.communicate()
    whole = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    figures: dict[str, float] = json.loads(said.strip().splitlines()[-1])
    return figures | {"whole": whole, "cpu": watch.cpu, "peak": watch.peak / 2**20}


def rivals(nvflare: str, settings: Path) -> dict[str, list[str]]:
    """Return each rival's command."""
    told = ["--settings", str(settings)]
    job = [sys.executable, str(HERE / "peer_job.py")]
    commands = {
        "bare loop": [*job, "bare", *told],
        "fedsilo inline": [*job, "inline", *told],
        "fedsilo processes": [*job, "processes", *told],
        "fedsilo ray": [*job, "ray", *told],
        "Flower": [sys.executable, str(HERE / "peer_flower.py"), *told],
    }
    if nvflare:
        commands["NVFlare"] = [nvflare, str(HERE / "peer_nvflare.py"), *told]
    return commands


def main() -> None:
    """Measure all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--nvflare", default="", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1, help="the rivals in turns; medians")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these rivals")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = pd.DataFrame(_rows(options))
    table = Table(title=f"{options.rounds} rounds, width {options.width}", title_justify="left")
    for name in map(str, rows):
        table.add_column(name, justify="left" if name == "rival" else "right")
    for row in rows.itertuples(index=False):
        table.add_row(*map(str, row))
    Console(width=120).print(table)
    if options.csv:
        write_atomically(options.csv, rows.to_csv(index=False))


def _rows(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Run all rivals, and yield each one's row."""
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Value] = {
            **_VALUES,
            "width": options.width,
            "data-dir": str(options.data_dir.resolve()),
            "rounds": options.rounds,
            "out": folder,
        }
        settings = Path(folder) / "settings.json"
        settings.write_text(json.dumps(values))
        commands = rivals(options.nvflare, settings)
        chosen = {name: c for name, c in commands.items() if name in (options.only or commands)}
        turns = [{name: measured(c) for name, c in chosen.items()} for _ in range(options.turns)]
        bare = 0.0
        for name in chosen:
            found = {key: median(turn[name][key] for turn in turns) for key in turns[0][name]}
            bare = bare or found["rounds"]
            yield {
                "rival": name,
                "rounds s": f"{found['rounds']:.1f}",
                "s a round": f"{found['rounds'] / options.rounds:.2f}",
                "rounds / bare": f"{found['rounds'] / bare:.3f}",
                "whole s": f"{found['whole']:.1f}",
                "CPU s": f"{found['cpu']:.1f}",
                "peak MiB": f"{found['peak']:.0f}",
                "accuracy": f"{found['accuracy']:.3f}",
            }


if __name__ == "__main__":
    main()
