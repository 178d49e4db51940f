"""Run directories made by hand, in milliseconds: whole, unfinished, damaged."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.progress import FILE, Progress, SiteProgress
from fedsilo.server_app.records.run_directory import config_document

_COUNTS = {"train": [40, 40], "val": [0, 0], "test": [20, 20]}


def measured_run(
    path: Path, accuracies: Sequence[Sequence[float]], seed: int = 3, **changes: Any
) -> Path:
    """Write a run of two sites, north and south, on digits.

    Args:
        path: the run directory.
        accuracies: for each round from 0 on, the test accuracy of north and of south.
        seed: the run's seed.
        changes: fields of ``Progress`` that differ from those of a running run of this process.
    """
    path.mkdir(parents=True)
    moment = datetime.now(UTC)
    facts: dict[str, Any] = {
        "run": path.name,
        "title": "FedAvg on digits",
        "method": "fedavg",
        "dataset": "digits",
        "seed": seed,
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "started": moment,
        "updated": moment,
        "rounds": 5,
        "round": len(accuracies),
        "finished_rounds": len(accuracies) - 1,
        "asked": ["north", "south"],
        "answered": ["north"],
        "phase": "train",
        "sites": {"north": SiteProgress(bytes_up=5), "south": SiteProgress()},
    }
    (path / FILE).write_text(Progress(**(facts | changes)).model_dump_json())
    settings = resolve({"method": "fedavg", "dataset": "digits", "seed": seed})
    (path / "config.toml").write_text(config_document(settings, {}))
    (path / ".lock").touch()
    (path / "silos.json").write_text(json.dumps({"north": _facts(), "south": _facts()}))
    add_rows(path, accuracies)
    return path


def add_rows(path: Path, accuracies: Sequence[Sequence[float]]) -> None:
    """Write metrics.csv and traffic.csv of a run with these accuracies, and replace older ones."""
    metrics, traffic = (
        ["round,site,split,metric,value"],
        [
            "round,phase,site,bytes_down,bytes_up,seconds,steps,samples",
            "0,hello,north,9,9,0.0,0,0",
        ],
    )
    for number, values in enumerate(accuracies):
        for site, value in zip(("north", "south"), values, strict=True):
            metrics.append(f"{number},{site},test,accuracy,{value}")
            traffic.append(f"{number + 1},train,{site},1000000,500000,2.0,4,80")
    (path / "metrics.csv").write_text("\n".join(metrics) + "\n")
    (path / "traffic.csv").write_text("\n".join(traffic) + "\n")


def _facts() -> dict[str, Any]:
    """Return a site's facts in silos.json."""
    return {
        "distribution": "D1",
        "sizes": {split: sum(counts) for split, counts in _COUNTS.items()},
        "label_counts": _COUNTS,
        "fingerprints": {},
        "dropped": 0,
        "schema": "",
        "classes": ["no", "yes"],
        "backbone": "",
    }
