"""The content of a run's files, as small as every reader takes them."""

from typing import Any

SILO: dict[str, Any] = {
    "distribution": "D1",
    "sizes": {"train": 3, "val": 0, "test": 1},
    "label_counts": {"train": [1, 2], "val": [0, 0], "test": [1, 0]},
    "fingerprints": {"train": "a" * 64},
    "dropped": 0,
    "schema": "",
    "classes": ["ill", "well"],
    "backbone": "",
}
SUMMARY: dict[str, Any] = {
    "method": "fedavg",
    "title": "FedAvg",
    "dataset": "digits",
    "seed": 0,
    "rounds": 1,
    "sites": {"north": {"accuracy": 0.5}},
    "mean": {"accuracy": 0.5},
    "distributions": {"D1": {"accuracy": 0.5}},
    "validation": {"mean": {}, "distributions": {}},
    "stopped": None,
    "marks": {},
    "failures": [],
    "seconds": {"total": 1.0, "rounds": 0.5, "sites": {"north": 0.1}},
    "peak-memory-bytes": {"north": 1000},
    "unrepeatable-operations": [],
    "bytes": {"up": 1, "down": 1},
    "privacy": {
        "method": "fedavg",
        "trust": {"level": "server", "promise": "nothing is hidden"},
        "leaves each site": ["weights"],
        "bytes up": 1,
        "guarantee": "no differential-privacy guarantee",
        "epsilon": "none",
    },
}


def silo(**changes: Any) -> dict[str, Any]:
    """Return what silos.json has of one site, with other values of some keys."""
    return SILO | _keys(changes)


def summary(**changes: Any) -> dict[str, Any]:
    """Return the content of summary.json, with other values of some keys."""
    return SUMMARY | _keys(changes)


def _keys(changes: dict[str, Any]) -> dict[str, Any]:
    """Write names of arguments as keys; only ``label_counts`` has no hyphen in its file."""
    return {key if key in SILO else key.replace("_", "-"): value for key, value in changes.items()}
