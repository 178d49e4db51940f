"""Methods, data, networks and settings that do not suit the run's task, and their fixes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.tasks import CLASSIFICATION, REGRESSION, SEGMENTATION, SURVIVAL
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.kinds import SEGMENTATION_NETWORKS, NetworkShape
from fedsilo.models.networks.segmentation.pixel_classifier import build_pixel_classifier
from fedsilo.server_app.config.settings import resolve
from tests.support.data_folders import save_picture, write_tables
from tests.support.fixes import Case, Values, changed, check, refused
from tests.support.tiny import VIT_FIELDS

# Parts of the errors that the functions below try
TRIED = (
    "which classifies whole images, but",
    "takes each folder for a class: set",
    "which only numbers have: remove them",
    "but the labels of data set",
)
PULSE: Values = {"method": "fedavg", "task": REGRESSION, "dataset": "heart-synthetic-pulse"}
VESSELS: Values = {"method": "fedavg", "task": SEGMENTATION, "dataset": "vessels-synthetic"}
ARRAYS: Values = {"method": "fedavg", "dataset": "arrays"}
TABLE: Values = {"method": "fedavg", "dataset": "table"}
PRIVATE: Values = {
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 1.0,
    "data.standardise": "declared",
}
CASES = [
    Case(
        ", so it suits task",
        {**PULSE, "method": "uefl"},
        {"choose another method, such as 'fedavg'": {"method": "fedavg"}},
    ),
    Case(
        "has labels for task",
        {**PULSE, "task": CLASSIFICATION},
        {
            "set 'task' to one of these": {"task": REGRESSION},
            "or choose another data set": {"dataset": "heart-synthetic"},
        },
    ),
    Case(
        "trains with one of",
        {**ARRAYS, "task": REGRESSION, "train.loss": "cross-entropy"},
        {
            "auto, squared, huber: set one of these": {"train.loss": "huber"},
            "or another 'task'": {"task": CLASSIFICATION},
        },
    ),
    Case(
        "has no classes: set it to",
        {**PULSE, "train.class-weights": "balanced"},
        {"set it to 'none'": {"train.class-weights": "none"}},
    ),
    Case(
        "'privacy.sample-clip-norm' is set, but task",
        {**TABLE, **PRIVATE, "task": SURVIVAL},
        {
            "set it and 'privacy.noise-multiplier' to 0": {
                "privacy.sample-clip-norm": 0.0,
                "privacy.noise-multiplier": 0.0,
            },
            "or choose another 'task'": {"task": CLASSIFICATION},
        },
    ),
    Case(
        "but task 'segmentation' measures",
        {**VESSELS, "server.early-stopping-metric": "accuracy"},
        {
            "choose one of these": {"server.early-stopping-metric": "dice"},
            "or 'none'": {"server.early-stopping-metric": "none"},
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_settings_that_do_not_suit_the_task_with_fix_pass(case: Case) -> None:
    check(case, resolve)


def test_segmentation_with_each_named_network_is_built() -> None:
    shape = NetworkShape((1, 32, 32), 2)

    def build(network: str) -> None:
        fields = {**VIT_FIELDS, "task": SEGMENTATION, "width": 4, "network": network}
        build_pixel_classifier(CommonSettings(**fields), shape)

    for classifier in ("conv", "vgg16-bn"):
        said = refused(lambda name=classifier: build(name))
        assert "which classifies whole images, but 'task' is 'segmentation'" in said
        assert f"set 'network.name' to one of {', '.join(SEGMENTATION_NETWORKS)}" in said
    assert not any(refused(lambda name=name: build(name)) for name in SEGMENTATION_NETWORKS)


def test_images_beside_their_masks_load_as_masks_or_sorted_by_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (tmp_path / "north" / folder).mkdir(parents=True)
    for number in range(8):
        save_picture(tmp_path / "north" / "images" / f"{number}.png", rng)
        mask = np.zeros((36, 40), np.uint8)
        mask[:, number : number + 9] = 255
        Image.fromarray(mask).save(tmp_path / "north" / "masks" / f"{number}.png")

    def attempt(**more: Value) -> str:
        values = {"method": "fedavg", "dataset": "folder", "data.dir": str(tmp_path), **more}
        values |= {"data.image-size": 16}
        return refused(lambda: load_silo("north", resolve(values).common))

    said = attempt()
    assert "masks, but data set 'folder' takes each folder for a class" in said
    assert "set 'dataset' to 'masks' and 'task' to 'segmentation', or keep only images" in said
    assert not attempt(dataset="masks", task=SEGMENTATION)
    for old, new in (("images", "ill"), ("masks", "healthy")):
        (tmp_path / "north" / old).rename(tmp_path / "north" / new)
    assert not attempt()


def test_a_unit_of_classes_is_removed_or_belongs_to_a_number(tmp_path: Path) -> None:
    schema = write_tables(tmp_path) / "schema.yaml"
    classes = "{column: ill, classes: {healthy: [0], disease: [1]}"
    text = schema.read_text()
    assert classes in text

    def attempt(label: str, task: str = CLASSIFICATION) -> str:
        schema.write_text(text.replace(classes, label))
        values: Values = {**TABLE, "task": task, "data.dir": str(tmp_path)}
        return refused(lambda: load_silo("north", resolve(values).common))

    said = attempt(f"{classes}, unit: days")
    assert "which only numbers have: remove them, or set its 'task' to 'regression'" in said
    assert not attempt(classes)
    again = attempt(f"{classes}, unit: days, task: regression", REGRESSION)
    assert "has 'classes', but task 'regression' predicts a number: remove one" in again
    assert not attempt("{column: ill, unit: days, task: regression", REGRESSION)


def test_a_run_with_the_task_of_the_schemas_label_ends(tmp_path: Path) -> None:
    schema = write_tables(tmp_path) / "schema.yaml"
    text = schema.read_text()
    names = iter(range(3))

    def attempt(task: str) -> str:
        named: Values = {
            "task": task,
            "rounds": 1,
            "train.local-epochs": 1,
            "train.mc-passes": 0,
            "network.name": "logistic",
            "machine.device": "cpu",
            "data.dir": str(tmp_path),
            "run.out": str(tmp_path / "runs"),
            "run.name": f"run{next(names)}",
        }
        settings = resolve(changed(TABLE, named))
        return refused(lambda: run_inline(settings, len(silo_names(settings.common))))

    said = attempt(REGRESSION)
    assert "but the labels of data set 'table' are for 'classification'" in said
    assert said.count("set 'task' to 'classification', or correct the schema") == 1, "joined"
    assert not attempt(CLASSIFICATION)
    label = "{column: ill, classes: {healthy: [0], disease: [1]}}"
    assert label in text
    schema.write_text(text.replace(label, "{column: ill, task: regression}"))
    assert not attempt(REGRESSION)
