"""Finished runs, for the tests of what is drawn and written of them."""

from pathlib import Path

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.setting_keys import as_keys
from tests.support.tiny import TINY, VIT

DIGITS: dict[str, Value] = TINY | {"split.silo-test-size": 15, "train.mc-passes": 1}
RUNS: dict[str, dict[str, Value]] = {
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox", "fedprox.proximal-mu": 0.5},
    "local": {"method": "local"},
    "fedavg-ft": {"method": "fedavg-ft", "fedavg-ft.finetune-rounds": 1},
    "ensemble": {"method": "ensemble"},
    "picsr": {"method": "picsr", "picsr.expert-rounds": 1},
    "vit": {"method": "local", **VIT},
    "table": {"method": "fedavg"},
}
TABLE: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "train.local-steps": 2,
    "network.width": 16,
}
_OF_DIGITS = ("split.silos", "split.silo-train-size", "split.silo-test-size", "train.local-epochs")
HEARTS: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "network.name": "mlp",
    "network.width": 4,
    "rounds": 2,
    "train.local-epochs": 1,
    "train.batch-size": 32,
    "train.mc-passes": 2,
    "machine.device": "cpu",
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run of each kind in RUNS; nothing may be written to it."""
    out = tmp_path_factory.mktemp("finished")
    for name, own in RUNS.items():
        values = DIGITS | own | {"run.name": name, "run.out": str(out)}
        if name == "table":
            values = {k: v for k, v in values.items() if k not in _OF_DIGITS} | TABLE
        run_inline(resolve(values), 4 if name == "table" else 3)
    return out


@pytest.fixture(scope="session")
def hearts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of four finished runs, named as ``fedsilo compare`` names them."""
    out = tmp_path_factory.mktemp("hearts")
    for method in ("fedavg", "local"):
        for seed in (0, 1):
            own: dict[str, Value] = {"method": method, "seed": seed, "out": str(out)}
            run_inline(resolve(as_keys(HEARTS | own) | {"run.name": f"{method}-seed{seed}"}), 4)
    return out


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with differential privacy."""
    out = tmp_path_factory.mktemp("private")
    own: dict[str, Value] = {
        "method": "fedavg",
        "data.standardise": "declared",
        "privacy.sample-clip-norm": 1.0,
        "privacy.noise-multiplier": 2.0,
        "run.out": str(out),
        "run.name": "private",
    }
    return run_inline(resolve(as_keys(HEARTS | own)), 4).path
