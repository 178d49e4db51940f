"""Six methods by each engine on one GPU, in one call: seconds, memory and how busy the GPU is.

    python benchmarks/gpu_engines.py --csv FILE [--device cuda] [--data-dir DIR] [--seconds 540]
        [--only fedavg picsr] [--small]

A row is a process of its own, the command that one types or plain Flower's (``peer_flower.py``,
which has only FedAvg): ``inline`` trains one site after another, ``vectorised`` all sites as one
batch, ``processes`` and ``Flower`` have as many processes as shares of the GPU. ``all s`` includes
the start of the process, ``rounds s`` does not. ``GPU %`` is the mean and ``GPU MiB`` the peak
above what was used before, both by nvidia-smi twice a second and empty without it; ``peak MiB`` is
the machine's memory of all processes (PSS). A row that is refused or fails has its reason in
``note``, and so has one for which ``--seconds`` left no time.

Without ``--data-dir`` the images are scikit-learn's digits; with it, those of ``mnist/`` there. The
other data are synthetic. ``--device cpu --small`` tries the script where there is no GPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pandas as pd
import psutil
import tomli_w
import yaml
from peers import Watch

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import Value

HERE = Path(__file__).resolve().parent
ENGINES = ("inline", "vectorised", "processes", "Flower")
SITES = 9
_SHARE = 0.33  # each site's process gets this share of the GPU
_LEAST = 20.0  # seconds that a row must have left to be started
_COMMON: Mapping[str, Value] = {
    "dataset": "digits",
    "rounds": 3,
    "network.width": 16,
    "train.batch-size": 64,
    "train.mc-passes": 0,
    "server.evaluate-every": 0,
    "seed": 7,
}
JOBS: Mapping[str, Mapping[str, Value]] = {
    "fedavg": {"train.local-epochs": 2, "network.dropout": 0.0},
    "uefl": {
        "train.local-epochs": 2,
        "uefl.iteration-rounds": 1,
        "uefl.extension-rounds": 1,
        "uefl.codes": 16,
        "uefl.centroid-min-count": 1,
        "train.mc-passes": 3,
    },
    "fedefm": {"train.local-steps": 10},
    # A batch is the samples divided by the steps of an epoch
    "fedaligncl": {
        "train.epoch-steps": 4,
        "train.pace": 4,
        "train.batch-size": 32,
        "fedaligncl.warmup-epochs": 0,
    },
    "fedevprompt": {
        "dataset": "dermoscopy-phantom",
        "network.name": "vit",
        "vit.backbone-weights": "random",
        "split.sample-share": 0.1,
        "train.local-epochs": 1,
        "train.batch-size": 32,
    },
    "picsr": {
        "dataset": "heart-synthetic",
        "rounds": 12,
        "network.width": 8,
        "picsr.warmup-rounds": 3,
        "picsr.expert-rounds": 6,
    },
}
_SMALL: Mapping[str, Value] = {"rounds": 2, "network.width": 4}
_SMALL_OF: Mapping[str, Mapping[str, Value]] = {
    "fedevprompt": {
        "split.sample-share": 0.01,
        "data.image-size": 32,
        "vit.backbone-width": 16,
        "vit.backbone-depth": 2,
        "vit.backbone-heads": 2,
        "vit.prompt-length": 3,
        "vit.basic-layers": 1,
    },
    "picsr": {"picsr.warmup-rounds": 1, "picsr.expert-rounds": 1},
}
_SMALL_DIGITS: Mapping[str, Value] = {"split.silo-train-size": 40, "split.silo-test-size": 10}


class GpuWatch(Thread):
    """Reads how busy the GPU is, and its memory, twice a second until ``end``.

    Attributes:
        seen: (seconds by the monotonic clock, per cent, MiB) of each reading; empty without
            nvidia-smi.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int, int]] = []
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            asked = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                ["nvidia-smi", *asked, "-lms", "500"], stdout=subprocess.PIPE, text=True
            )
            self.start()

    def run(self) -> None:
        """Keep each reading, until the program ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            busy, _, used = line.partition(",")
            if busy.strip().isdigit() and used.strip().isdigit():
                self.seen.append((time.monotonic(), int(busy), int(used)))

    def between(self, began: float, ended: float) -> dict[str, object]:
        """Return the mean per cent and the peak MiB above the least before; blank if not seen."""
        inside = [one for one in self.seen if began <= one[0] <= ended]
        before = [used for at, _, used in self.seen if at < began]
        if not inside or not before:
            return {"GPU %": "", "GPU MiB": ""}
        busy = sum(one[1] for one in inside) / len(inside)
        return {"GPU %": round(busy), "GPU MiB": max(one[2] for one in inside) - min(before)}

    def end(self) -> None:
        """End nvidia-smi."""
        if self._process:
            self._process.terminate()


def settings_of(method: str, given: argparse.Namespace, out: Path) -> dict[str, Value]:
    """Return the settings of a method's runs."""
    values: dict[str, Value] = {**_COMMON, **JOBS[method], "method": method}
    images = values["dataset"] == "digits"
    if given.small:
        values |= {**_SMALL, **_SMALL_OF.get(method, {})}
        values |= _SMALL_DIGITS if images else {}
    if given.data_dir and images:
        values |= {"dataset": "mnist", "data.dir": str(given.data_dir.resolve())}
    return values | {"machine.device": given.device, "run.out": str(out), "run.name": "run"}


def command_of(engine: str, values: Mapping[str, Value], folder: Path, gpu: bool) -> list[str]:
    """Return the command of a row; its settings and experiment are written to ``folder``."""
    share = _SHARE * gpu
    settings, experiment = dict(values), folder / "simulation.yaml"
    if engine == "Flower":
        path = folder / "settings.toml"
        path.write_text(tomli_w.dumps(settings))
        script = str(HERE / "peer_flower.py")
        return [sys.executable, script, "--settings", str(path), "--gpus", str(share)]
    settings["machine.vectorised"] = 1
    if engine == "vectorised":
        settings["machine.vectorised"] = SITES
    resources = {"client-resources-num-cpus": 1, "client-resources-num-gpus": share}
    content: dict[str, Any] = {"experiments": {"row": {"config": settings, "resources": resources}}}
    experiment.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "fedsilo.cli", "simulate", "row", "--no-pictures"]
    chosen = "processes" if engine == "processes" else "inline"
    return [*command, "--file", str(experiment), "--engine", chosen]


def measured(
    method: str, engine: str, given: argparse.Namespace, left: float, gpu: GpuWatch
) -> dict[str, object]:
    """Run a row and return what it took, or its reason in ``note``."""
    row: dict[str, object] = {"method": method, "engine": engine, "note": ""}
    if engine == "Flower" and method != "fedavg":
        return row | {"note": "plain Flower has no such method"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = settings_of(method, given, folder)
        command = command_of(engine, values, folder, given.device != "cpu")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watch = Watch(psutil.Process(process.pid))
        watch.start()
        try:
            said, errors = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return row | {"note": f"not finished in {left:.0f} s"}
        ended = time.monotonic()
        if process.returncode:
            return row | {"note": (errors.strip() or "failed").splitlines()[-1][:300]}
        of_run = result_of(folder, said)
    took = {"all s": round(ended - began, 1), "CPU s": round(watch.cpu, 1)}
    took |= {"peak MiB": round(watch.peak / 2**20)}
    return row | of_run | took | gpu.between(began, ended)


def result_of(folder: Path, said: str) -> dict[str, object]:
    """Return the seconds of a run's rounds and its final accuracy."""
    summary = folder / "run" / "summary.json"
    if not summary.is_file():
        found = json.loads(said.strip().splitlines()[-1])
        return {"rounds s": round(found["rounds"], 2), "accuracy": round(found["accuracy"], 4)}
    of_run = json.loads(summary.read_text())
    seconds = round(of_run["seconds"]["rounds"], 2)
    return {"rounds s": seconds, "accuracy": round(of_run["mean"]["accuracy"], 4)}


def main() -> None:
    """Measure the rows one after another, print each, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all rows together")
    parser.add_argument("--only", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    end, gpu = time.monotonic() + given.seconds, GpuWatch()
    time.sleep(1.5 if gpu.is_alive() else 0)  # what is used before the first row
    columns = ["method", "engine", "all s", "rounds s", "CPU s", "peak MiB"]
    columns += ["GPU %", "GPU MiB", "accuracy", "note"]
    rows: list[dict[str, object]] = []
    for method in given.only:
        for engine in given.engines:
            left = end - time.monotonic()
            if left < _LEAST:
                rows.append({"method": method, "engine": engine, "note": "no time left"})
            else:
                rows.append(measured(method, engine, given, left, gpu))
            print(*(f"{rows[-1].get(name, '')}" for name in columns), sep="\t", flush=True)
            table = pd.DataFrame(rows).reindex(columns=columns)
            write_atomically(given.csv, table.to_csv(index=False))
    gpu.end()


if __name__ == "__main__":
    main()
