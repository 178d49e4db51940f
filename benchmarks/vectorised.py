"""What 'vectorised' saves: CPU seconds of the same steps in a bare loop, by the loop, and as one.

    FEDSILO_DATA=DIR python benchmarks/vectorised.py [--csv FILE] [--jobs WORD...]

Methods of each kind over heart's four hospitals (the experiment's 10 steps of 16 rows a round) and
over digits that a Dirichlet distribution divides into 100 silos, and UEFL over these digits in ten
silos. Five silos of two steps show where it does not pay. Nothing is measured but the final model.
The time of a run of one round is subtracted, so that the start and the end do not count. MOON,
FedProto and FedDistill train in round 1 like FedAvg or alone, so this is their usual round. The
bare loop is FedAvg's only.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Split
from fedsilo.engines import together
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.build import build_classifier
from fedsilo.server_app.config.settings import resolve

_COMMON: dict[str, Value] = {
    "machine.device": "cpu",
    "train.mc-passes": 0,
    "seed": 7,
}
_COMMON |= {
    "network.dropout": 0.0,
    "server.evaluate-every": 0,
    "run.name": "run",
    "train.local-steps": 10,
}
_DIGITS: dict[str, Value] = {
    "dataset": "digits",
    "split.partition": "dirichlet",
    "split.silos": 100,
}
_HEART: dict[str, Value] = {
    "dataset": "heart",
    "network.name": "mlp",
    "network.width": 8,
    "train.batch-size": 16,
}
_SMALL = _DIGITS | {"network.width": 1, "train.batch-size": 8}
_CODES: dict[str, Value] = {
    "split.silos": 10,
    "network.width": 4,
    "train.batch-size": 32,
    "uefl.codes": 16,
    "uefl.segments": 2,
    "network.dropout": 0.1,  # UEFL measures uncertainty by it
    "train.mc-passes": 2,
    "uefl.max-iterations": 1,  # lets a run of one round begin
}
# Name -> sites, rounds and settings
JOBS: dict[str, tuple[int, int, dict[str, Value]]] = {}
_METHODS = ("fedavg", "fedprox", "ditto", "apfl", "moon", "fedproto", "feddistill", "fedpac", "cdl")
for _method in _METHODS:
    _own: dict[str, Value] = {"method": _method}
    if _method in ("fedproto", "feddistill", "fedpac"):
        # The silos are small, and a class's mean would stay at a site with few samples of it
        _own |= {"privacy.sums-min-count": 1, f"{_method}.class-min-count": 1}
    JOBS[f"{_method}, heart, mlp of width 8"] = 4, 30, _HEART | _own
    _silos = 100
    if _method == "cdl":
        _silos = 20  # the end of a run compares topologies, which takes minutes for 100 silos
    _name = f"{_method}, digits, {_silos} silos, conv of width 1"
    JOBS[_name] = _silos, 100 // _silos, _SMALL | _own | {"split.silos": _silos}
for _method in ("fedavg", "ditto", "apfl", "moon"):
    _few = _SMALL | {"method": _method, "split.silos": 5, "train.local-steps": 2}
    JOBS[f"{_method}, digits, 5 silos and 2 steps, conv of width 1"] = 5, 10, _few
JOBS["uefl, digits, 10 silos, conv of width 4"] = 10, 5, _DIGITS | _CODES | {"method": "uefl"}


def cpu_seconds(values: Mapping[str, Value], sites: int) -> tuple[float, float]:
    """Return the CPU seconds of a run by the inline engine, and of training sites as one."""
    spent = [0.0]
    train = together.train_together

    def timed(*arguments: Any, **named: Any) -> bool:
        began = time.process_time()
        all_stack = train(*arguments, **named)
        spent[0] += time.process_time() - began
        return all_stack

    with (
        tempfile.TemporaryDirectory() as out,
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(together, "train_together", timed),
    ):
        settings = resolve({**values, "run.out": out})
        began = time.process_time()
        run_inline(settings, sites)
        return time.process_time() - began, spent[0]


def of_rounds(values: Mapping[str, Value], sites: int, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds of ``rounds`` rounds, and those of training sites as one."""
    cpu_seconds({**values, "rounds": 1}, sites)  # imports, caches
    short = cpu_seconds({**values, "rounds": 1}, sites)
    long = cpu_seconds({**values, "rounds": 1 + rounds}, sites)
    return long[0] - short[0], long[1] - short[1]


def bare_seconds(common: CommonSettings) -> float:
    """Return the CPU seconds of the same steps and averages over all sites in plain PyTorch."""
    splits = [load_silo(name, common).train for name in silo_names(common)]
    splits = [Split(torch.nan_to_num(split.inputs), split.labels) for split in splits]
    network = build_classifier(common, load_silo(silo_names(common)[0], common).shape).train()
    weights = {name: array.clone() for name, array in network.state_dict().items()}
    began = time.process_time()
    for _ in range(common.rounds):
        trained = []
        for split in splits:
            network.load_state_dict(weights)
            optimiser = torch.optim.Adam(network.parameters(), lr=common.learning_rate)
            for batch in islice(_batches(len(split), common.batch_size), common.local_steps):
                optimiser.zero_grad()
                network.loss(split.inputs[batch], split.labels[batch]).backward()
                optimiser.step()
            trained.append({name: array.clone() for name, array in network.state_dict().items()})
        weights = {n: sum(own[n] / len(splits) for own in trained) for n in weights}
    return time.process_time() - began


def _batches(count: int, size: int) -> Iterator[torch.Tensor]:
    while True:
        yield from torch.randperm(count).split(size)


def measured(name: str) -> dict[str, object]:
    """Return a job's row."""
    sites, rounds, own = JOBS[name]
    values = {**_COMMON, **own}
    loop, _ = of_rounds({**values, "machine.vectorised": 1}, sites, rounds)
    one, training = of_rounds({**values, "machine.vectorised": sites}, sites, rounds)
    seconds = {"loop": loop, "vectorised": one, "of-it-training": training}
    if values["method"] == "fedavg":
        common = resolve({**values, "rounds": rounds}).common
        bare_seconds(common)  # imports
        seconds["bare"] = bare_seconds(common)
    row: dict[str, object] = {"job": name, "sites": sites, "rounds": rounds}
    for key in ("bare", "loop", "vectorised", "of-it-training"):
        if key in seconds:
            row[f"{key}-ms-a-round"] = round(1e3 * seconds[key] / rounds, 2)
        else:
            row[f"{key}-ms-a-round"] = ""
    return row | {"loop/vectorised": round(loop / one, 2)}


def main() -> None:
    """Measure, print, and write the rows as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), help="parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name in JOBS:
        if any(part in name for part in options.jobs):
            rows.append(measured(name))
            print(rows[-1], flush=True)
    if options.csv:
        write_atomically(options.csv, pd.DataFrame(rows).to_csv(index=False))


if __name__ == "__main__":
    main()
