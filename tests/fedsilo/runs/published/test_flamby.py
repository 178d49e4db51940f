"""FLamby's result files: which runs have their numbers, and which keep PICSR's."""

from pathlib import Path

import pytest

from fedsilo.engines.experiments import read_experiments
from fedsilo.runs.published.published_numbers import Published, published_numbers
from fedsilo.server_app.config.settings import resolve

HOSPITALS = ("cleveland", "hungary", "switzerland", "va")
EXPERIMENTS = read_experiments(Path(__file__).resolve().parents[4] / "simulation.yaml")


def published(experiment: str, **changes: object) -> Published:
    values = resolve(EXPERIMENTS[experiment].values).as_mapping() | changes
    return published_numbers(values, HOSPITALS)


@pytest.mark.parametrize(
    ("method", "accuracies"),
    [
        ("fedavg", (0.7308, 0.7191, 0.65, 0.64)),
        ("fedprox", (0.7308, 0.7191, 0.65, 0.64)),
        ("scaffold", (0.7269, 0.7191, 0.65, 0.64)),
        ("fedadam", (0.7519, 0.7461, 0.7375, 0.6667)),
        ("fedyogi", (0.7596, 0.7528, 0.7375, 0.6756)),
        ("fedadagrad", (0.7596, 0.7528, 0.7375, 0.6756)),
        ("cyclic", (0.7577, 0.7618, 0.7125, 0.64)),
        ("local", (0.7462, 0.7461, 0.725, 0.7022)),
        ("mix", (0.7827, 0.764, 0.75, 0.6444)),
    ],
)
def test_each_experiment_of_flambys_protocol_has_its_numbers(
    method: str, accuracies: tuple[float, ...]
) -> None:
    numbers = published(f"flamby-heart-{method}").numbers
    assert tuple(numbers[site]["accuracy"] for site in HOSPITALS) == accuracies


def test_a_run_of_picsrs_setting_keeps_picsrs_numbers() -> None:
    assert published("fedavg-heart").numbers["cleveland"]["accuracy"] == 0.7577


def test_a_run_with_other_batches_has_no_number_of_flamby() -> None:
    found = published("flamby-heart-fedyogi", **{"train.batch-size": 16})
    assert found == Published(unlike="'train.batch-size' is 16, but must be 4")
