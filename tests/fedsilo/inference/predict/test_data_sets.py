"""Predictions of every data set of the registry; real data are skipped where they are not here."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fedsilo import predict
from fedsilo.core.metric_names import CLASS, CONFIDENCE, UNCERTAINTY
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import DATA_SETS, data_set, silo_names
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.data_folders import write_images
from tests.support.made_data import MADE as MADE_DATA

SMALL: dict[str, Value] = {
    "method": "fedavg",
    "rounds": 1,
    "train.local-steps": 1,
    "train.batch-size": 8,
    "network.width": 4,
    "train.mc-passes": 2,
    "machine.device": "cpu",
}
SHIFTED: dict[str, Value] = {
    "split.silos": 2,
    "split.silo-train-size": 20,
    "split.silo-test-size": 8,
}
# What makes a run of a data set small, by its name; of others nothing is needed
SIZES: dict[str, dict[str, Value]] = {
    "digits": SHIFTED,
    "mnist": SHIFTED,
    "fmnist": SHIFTED,
    "cifar10": SHIFTED | {"split.silo-train-size": 10, "split.silo-test-size": 1},
    "cifar100": SHIFTED | {"split.silo-train-size": 10, "split.silo-test-size": 1},
    "gtsrb": SHIFTED | {"split.silo-train-size": 20, "split.silo-test-size": 1},
    "isic2019": {"split.sample-share": 0.03, "data.image-size": 32},
    "dermoscopy-phantom": {"split.sample-share": 0.001, "data.image-size": 32},
    "mammography-phantom": {"split.sample-share": 0.01, "data.image-size": 32},
    "angiogram-phantom": {"split.sample-share": 0.02, "data.image-size": 32},
    "mini-mias": {"split.sample-share": 0.1, "data.image-size": 32},
    "pneumoniamnist": {"split.sample-share": 0.01},
    "bloodmnist": SHIFTED,
    "octmnist": SHIFTED,
}
MADE: dict[str, Callable[[Path], object]] = {
    **{name: MADE_DATA[name] for name in ("cifar10", "cifar100", "gtsrb", "table", "arrays")},
    **{name: MADE_DATA[name] for name in ("folder", "bloodmnist", "octmnist")},
    "images": lambda folder: write_images(folder, "images.yaml"),
    "mammography": lambda folder: write_images(folder, "mammography.yaml", bits=16),
    "endovascular": lambda folder: write_images(folder, "endovascular.yaml"),
}


def data_for(name: str, folder: Path, request: pytest.FixtureRequest) -> str:
    """Return the data directory of a data set: made, real, or none needed."""
    if name in MADE:
        MADE[name](folder)
        return str(folder)
    if data_set(name).files is None and name not in ("isic2019", "mini-mias"):
        return ""
    real: Path = request.getfixturevalue("real_data")
    return str(real)


def run_of(name: str, folder: Path, data: str, **changes: Value) -> RunDirectory:
    values: dict[str, Value] = SMALL | SIZES.get(name, {}) | {"dataset": name, "data.dir": data}
    values |= {"run.name": name, "run.out": str(folder)} | changes
    settings = resolve(values)
    return run_inline(settings, len(silo_names(settings.common)))


def metrics_of(directory: RunDirectory, site: str) -> Mapping[str, float]:
    """Return the final test metrics of a site, but for counts, which are no prediction's."""
    counts = tuple(f"{family}." for family in (CLASS, CONFIDENCE, UNCERTAINTY))
    return {
        row["metric"]: float(row["value"])
        for row in directory.read_csv("metrics.csv")
        if (row["round"], row["site"], row["split"]) == ("1", site, "test")
        and not row["metric"].startswith(counts)
    }


# Of MedMNIST one set in colour and a grey one, which differ from the others in names alone
ALIKE = MEDMNIST.keys() - {"bloodmnist", "octmnist"}


@pytest.mark.parametrize("name", [name for name in DATA_SETS if name not in ALIKE])
def test_the_rows_of_a_test_split_have_the_metrics_of_metrics_csv(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = run_of(name, tmp_path / "runs", data_for(name, tmp_path / "data", request))
    for site in directory.read_json("silos.json"):
        told = metrics_of(directory, site)
        found = predict(directory.path, site=site, split="test")
        assert {metric: found.document["figures"][metric] for metric in told} == told
