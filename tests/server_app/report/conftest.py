"""Finished runs to report of, made once: hearts that are made up, by two methods and two seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.contract.settings_schema import Value
from server_app.config.settings import resolve
from server_app.run.inline_engine import run_inline

HEARTS: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "network": "mlp",
    "width": 4,
    "rounds": 2,
    "local-epochs": 1,
    "batch-size": 32,
    "mc-passes": 2,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def hearts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of four finished runs, named as ``fedsilo compare`` names them."""
    out = tmp_path_factory.mktemp("hearts")
    for method in ("fedavg", "local"):
        for seed in (0, 1):
            own: dict[str, Value] = {"method": method, "seed": seed, "out": str(out)}
            run_inline(resolve(HEARTS | own | {"run-name": f"{method}-seed{seed}"}), 4, False)
    return out


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with differential privacy."""
    out = tmp_path_factory.mktemp("private")
    own: dict[str, Value] = {
        "method": "fedavg",
        "standardise": "site",
        "clip-norm": 1.0,
        "noise-multiplier": 2.0,
        "out": str(out),
        "run-name": "private",
    }
    return run_inline(resolve(HEARTS | own), 4, False).path
