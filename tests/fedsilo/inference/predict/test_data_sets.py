"""Predictions of every data set of the registry; real data are skipped where they are not here."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedsilo import predict
from fedsilo.core.files.locations import find_places
from fedsilo.core.metric_names import (
    CLASS,
    CONFIDENCE,
    FINDING,
    OUTCOME,
    SURVIVAL_CURVE,
    UNCERTAINTY,
)
from fedsilo.core.settings_schema import Value
from fedsilo.core.tasks import SEGMENTATION
from fedsilo.datasets.registry import DATA_SETS, data_set, load_silo, silo_names
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.measures.mask_metrics import overall_metrics
from fedsilo.runs.finished_run import FinishedRun
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
    "masks": {"data.image-size": 16},
    "vessels-synthetic": {"split.sample-share": 0.15, "data.image-size": 16},
}
MADE: dict[str, Callable[[Path], object]] = {
    **{name: MADE_DATA[name] for name in ("cifar10", "cifar100", "gtsrb", "table", "arrays")},
    **{name: MADE_DATA[name] for name in ("folder", "bloodmnist", "octmnist", "masks")},
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
    if not data_set(name).found(find_places(str(real), "")):
        pytest.skip(f"no file of {name} is here")
    return str(real)


def run_of(name: str, folder: Path, data: str, **changes: Value) -> RunDirectory:
    values: dict[str, Value] = SMALL | SIZES.get(name, {}) | {"dataset": name, "data.dir": data}
    values |= {"task": data_set(name).tasks[0], "run.name": name, "run.out": str(folder)} | changes
    settings = resolve(values)
    return run_inline(settings, len(silo_names(settings.common)))


def metrics_of(directory: RunDirectory, site: str) -> Mapping[str, float]:
    """Return the final test metrics of a site, but for counts, which are no prediction's."""
    families = (CLASS, CONFIDENCE, UNCERTAINTY, FINDING, OUTCOME, SURVIVAL_CURVE)
    counts = tuple(f"{family}." for family in families)
    return {
        row["metric"]: float(row["value"])
        for row in directory.read_csv("metrics.csv")
        if (row["round"], row["site"], row["split"]) == ("1", site, "test")
        and not row["metric"].startswith(counts)
    }


def measured(directory: RunDirectory, site: str, masks: Path) -> dict[str, float]:
    """Measure the masks that were written for a site's test images."""
    silo = load_silo(site, FinishedRun(directory.path).settings.common)
    rows = pd.read_csv(masks / "masks.csv")["mask"]
    predicted = torch.from_numpy(np.stack([np.asarray(Image.open(masks / row)) for row in rows]))
    found = overall_metrics(predicted.long(), silo.test.labels, silo.shape.outputs)
    return {key: found[key] for key in ("dice", "iou")}


# Of MedMNIST one set in colour and a grey one, which differ from the others in names alone
ALIKE = MEDMNIST.keys() - {"bloodmnist", "octmnist"}


@pytest.mark.parametrize("name", [name for name in DATA_SETS if name not in ALIKE])
def test_the_rows_of_a_test_split_have_the_metrics_of_metrics_csv(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = run_of(name, tmp_path / "runs", data_for(name, tmp_path / "data", request))
    for site in directory.read_json("silos.json"):
        told = metrics_of(directory, site)
        if data_set(name).tasks[0] == SEGMENTATION:
            masks = tmp_path / site
            predict(directory.path, site=site, split="test", out=masks)
            assert measured(directory, site, masks) == {key: told[key] for key in ("dice", "iou")}
            continue
        found = predict(directory.path, site=site, split="test")
        assert {metric: found.document["figures"][metric] for metric in told} == told
