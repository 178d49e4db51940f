"""The same FedAvg by fedsilo and by what one would pick instead: time, processor, memory.

    python benchmarks/peers.py --data-dir DIR [--nvflare PYTHON] [--job mnist] [--rounds 2]
        [--turns 1] [--only NAME ...] [--turns-csv FILE] [--csv FILE]

Every rival is a process of its own, on one network, with the same local steps and one thread a
client: a bare loop and fedsilo's inline engine one client after the other; fedsilo with processes
and with Ray, plain Flower and NVFlare's simulator two at once. fedsilo's rows are the command that
one types, pictures included. Final models are measured once, on all clients' test samples; fedsilo
draws start and order by its seed, the others as ``peer_job.py`` does.
``--nvflare`` is the Python of an environment in which NVFlare is installed and fedsilo's packages
can be imported after NVFlare's own; without it that row is left out.
Each measurement is appended to the file of ``--turns-csv``, and the table is of all that it holds:
medians over turns, what they are of the rivals', and whether the bars are met (``BARS``).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread

import pandas as pd
import psutil
import tomli_w
from rich.console import Console
from rich.table import Table

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import Value

HERE = Path(__file__).resolve().parent
_LOOK = 0.3  # seconds between looks at the processes
_COMMON: Mapping[str, Value] = {
    "method": "fedavg",
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "server.evaluate-every": 0,
    "machine.device": "cpu",
    "machine.threads": 1,
}
JOBS: Mapping[str, Mapping[str, Value]] = {
    # Nine silos of MNIST, a third of them rotated, a third with inverted colours
    "mnist": {
        "dataset": "mnist",
        "network.width": 16,
        "train.batch-size": 64,
        "train.local-epochs": 1,
    },
    # The four hospitals of FLamby's Fed-Heart-Disease
    "heart": {
        "dataset": "heart",
        "network.name": "mlp",
        "network.width": 8,
        "train.batch-size": 16,
        "train.local-steps": 10,
    },
    # MNIST shared out among 100 silos, each label by a Dirichlet distribution of 0.5
    "hundred": {
        "dataset": "mnist",
        "split.partition": "dirichlet",
        "split.silos": 100,
        "network.width": 4,
        "train.batch-size": 32,
        "train.local-steps": 10,
    },
}
OURS = "fedsilo processes"
BARS = {  # what is compared, with whom, and the most that OURS may take of it
    "all / Flower": ("all s", "Flower", 0.9),
    "all / NVFlare": ("all s", "NVFlare", 0.4),
    "MiB / Flower": ("peak MiB", "Flower", 0.8),
    "rounds / bare": ("rounds s", "bare loop", 0.7),
}
_KEY = ["job", "rounds", "rival"]
_MEASURED = {"rounds s": 2, "all s": 2, "CPU s": 2, "peak MiB": 0, "accuracy": 3}


class Watch(Thread):
    """Adds up what a process and all that it started take, until it ends.

    Attributes:
        cpu: processor seconds, as of each process's last look.
        peak: bytes, the most that all held at once; shared pages are counted by their share (PSS).
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


def measured(command: list[str], folder: Path) -> dict[str, float]:
    """Run a rival and return its seconds, processor seconds, peak memory and accuracy."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watch = Watch(psutil.Process(process.pid))
    watch.start()
    said, errors = process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    if (summary := folder / "run" / "summary.json").is_file():
        of_run = json.loads(summary.read_text())
        rounds, accuracy = of_run["seconds"]["rounds"], of_run["mean"]["accuracy"]
    else:
        metrics = json.loads(said.strip().splitlines()[-1])
        rounds, accuracy = metrics["rounds"], metrics["accuracy"]
    found = (rounds, seconds, watch.cpu, watch.peak / 2**20, accuracy)
    return {n: round(v, d) for (n, d), v in zip(_MEASURED.items(), found, strict=True)}


def rivals(nvflare: str, settings: Path) -> dict[str, list[str]]:
    """Return each rival's command."""
    options, python = ["--settings", str(settings)], sys.executable
    ours = [python, "-m", "fedsilo.cli", "simulate", "fedavg", "--config", str(settings)]
    commands = {
        "bare loop": [python, str(HERE / "peer_job.py"), *options],
        "fedsilo inline": [*ours, "--engine", "inline"],
        OURS: [*ours, "--engine", "processes"],
        "fedsilo ray": [*ours, "--engine", "ray"],
        "Flower": [python, str(HERE / "peer_flower.py"), *options],
    }
    if nvflare:
        commands["NVFlare"] = [nvflare, str(HERE / "peer_nvflare.py"), *options]
    return commands


def turn(options: argparse.Namespace) -> pd.DataFrame:
    """Run the rivals once, each in a folder of its own, and return their rows."""
    rows = []
    for rival in options.only or rivals(options.nvflare, Path(os.devnull)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            values = {
                **_COMMON,
                **JOBS[options.job],
                "data.dir": str(options.data_dir.resolve()),
                "rounds": options.rounds,
                "run.out": name,
                "run.name": "run",
            }
            settings = folder / "settings.toml"
            settings.write_text(tomli_w.dumps(values))
            found = measured(rivals(options.nvflare, settings)[rival], folder)
        rows.append({"job": options.job, "rounds": options.rounds, "rival": rival, **found})
        print(rows[-1], file=sys.stderr, flush=True)
    return pd.DataFrame(rows)


def table_of(turns: pd.DataFrame) -> pd.DataFrame:
    """Return the medians of each job, number of rounds and rival, their ratios, and the bars."""
    groups = turns.groupby(_KEY)
    table = groups[list(_MEASURED)].median().round(_MEASURED)
    table.insert(0, "turns", groups.size())
    for bar, (what, rival, most) in BARS.items():
        for job, rounds, name in table.index:
            if (job, rounds, rival) in table.index:
                ratio = table[what][job, rounds, name] / table[what][job, rounds, rival]
                table.loc[(job, rounds, name), bar] = round(ratio, 3)
                if name == OURS:
                    table.loc[(job, rounds, name), f"at most {most}"] = str(ratio <= most)
    return table.reset_index()


def main() -> None:
    """Measure, and print the table of all measurements so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--nvflare", default="", metavar="PYTHON")
    parser.add_argument("--job", choices=list(JOBS), default="mnist")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1, help="the rivals in turns; 0: table only")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these rivals")
    parser.add_argument("--turns-csv", type=Path, help="each measurement, those of before too")
    parser.add_argument("--csv", type=Path, help="the table")
    options = parser.parse_args()
    kept = options.turns_csv
    turns = pd.read_csv(kept) if kept and kept.is_file() else pd.DataFrame()
    for _ in range(options.turns):
        turns = pd.concat([turns, turn(options)], ignore_index=True)
        if kept:
            write_atomically(kept, turns.to_csv(index=False))
    rows = table_of(turns)
    table = Table()
    for name in map(str, rows):
        table.add_column(name, justify="left" if name in _KEY else "right")
    for row in rows.astype(object).fillna("").itertuples(index=False):
        table.add_row(*map(str, row))
    Console(width=180).print(table)
    if options.csv:
        write_atomically(options.csv, rows.to_csv(index=False))


if __name__ == "__main__":
    main()
