import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedsilo.client_app.privacy.declared_data import declared_data
from fedsilo.core.errors import SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, build, defaults
from fedsilo.core.tasks import REGRESSION, TASKS
from fedsilo.datasets.registry import (
    DATA_SETS,
    check_data_settings,
    data_fingerprint,
    data_set,
    load_silo,
    silo_count,
    silo_names,
)
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from fedsilo.datasets.silo.silos import DataSet, Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from tests.support.errors import refuses

TABLE = CommonSettings(dataset="table")
IMAGES = ("digits", "mnist", "fmnist", "cifar10", "cifar100", "gtsrb", *MEDMNIST)
HEARTS = ("heart", "heart-imputed", "heart-indicator")
TABLES = (*HEARTS, "heart-synthetic", "heart-synthetic-pulse", "table")
PICTURES = (
    "isic2019",
    "dermoscopy-phantom",
    "folder",
    "images",
    "mammography",
    "mini-mias",
    "mammography-phantom",
    "endovascular",
    "angiogram-phantom",
)


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_registered_data_set_is_loaded_under_its_own_name(name: str) -> None:
    found = data_set(name)
    assert isinstance(found, DataSet)
    assert found.name == name
    assert found.headline
    assert found.settings <= defaults(CommonSettings).keys()


def test_data_sets_with_public_files_can_be_fetched_and_the_others_have_none() -> None:
    files = {name: data_set(name).files for name in DATA_SETS}
    public = {"mnist", "fmnist", "cifar10", "cifar100", "gtsrb", *HEARTS, "pneumoniamnist"}
    public |= {"tcga-brca"}
    public |= MEDMNIST.keys()
    assert {name for name, found in files.items() if found} == public
    of = dict.fromkeys(HEARTS, "heart")  # the same patients
    assert all(found.name == of.get(n, n) and found.files for n, found in files.items() if found)
    assert all(found.licence and found.url.endswith("/") for found in files.values() if found)


@pytest.mark.parametrize(
    ("name", "near"), [("hart", "heart"), ("tabel", "table"), ("heart-syntetic", "heart-synthetic")]
)
def test_an_unknown_data_set_is_answered_with_the_nearest(name: str, near: str) -> None:
    said = f"unknown data set '{name}'; did you mean '{near}'"
    settings = dataclasses.replace(TABLE, dataset=name)
    with pytest.raises(SettingError, match=said):
        data_set(name)
    with pytest.raises(SettingError, match=said):
        silo_names(settings)
    with pytest.raises(SettingError, match=said):
        load_silo("s1a", settings)


def test_images_have_as_many_silos_as_the_settings_say_and_heart_has_four() -> None:
    assert silo_count(CommonSettings(dataset="digits", silos=5)) == 5
    for name in (*HEARTS, "heart-synthetic"):
        settings = CommonSettings(dataset=name)
        assert silo_names(settings) == ["cleveland", "hungary", "switzerland", "va"]
        assert silo_count(settings) == 4


def test_a_server_without_the_schema_does_not_know_how_many_sites_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    assert silo_count(TABLE) is None
    there = dataclasses.replace(TABLE, data_dir=str(tmp_path))
    assert silo_count(there) is None
    (tmp_path / "schema.yaml").write_text(
        "columns: [{name: age}]\n"
        "label: {column: sick, classes: {healthy: [0], ill: [1]}}\n"
        "sites: {b: b.csv, a: a.csv, c: c.csv}\n"
    )
    assert silo_count(there) == 3
    assert silo_names(there) == ["b", "a", "c"]


SCHEMA = """\
columns: [{name: age}, {name: stage, kind: categorical, levels: [1, 2]}]
label: {column: sick, classes: {healthy: [0], ill: [1]}}
sites: {b: b.csv, a: a.csv}
"""


@pytest.fixture
def two_sites(tmp_path: Path) -> CommonSettings:
    """Return the settings of two hospitals of twelve patients."""
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    for site, first in (("a", 30), ("b", 60)):
        rows = "".join(f"{first + i},{1 + i // 6},{i % 2}\n" for i in range(12))
        (tmp_path / f"{site}.csv").write_text("age,stage,sick\n" + rows)
    return dataclasses.replace(TABLE, data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))


def test_the_fingerprint_of_the_data_is_the_same_whatever_is_trained_on_them(
    two_sites: CommonSettings, tmp_path: Path
) -> None:
    first = data_fingerprint(two_sites)
    assert len(first) == 64
    assert data_fingerprint(two_sites) == first, "from the cache"
    other = dataclasses.replace(
        two_sites, method="picsr", seed=99, standardise="site", cache_dir=str(tmp_path / "other")
    )
    assert data_fingerprint(other) == first


@pytest.mark.parametrize("site", ["a", "b"])
def test_a_changed_value_of_any_site_changes_the_fingerprint_of_the_data(
    two_sites: CommonSettings, tmp_path: Path, site: str
) -> None:
    first, path = data_fingerprint(two_sites), tmp_path / f"{site}.csv"
    path.write_text(path.read_text().replace("5,1,1\n", "5.5,1,1\n"))
    assert data_fingerprint(two_sites) != first


@pytest.mark.parametrize(
    ("old", "new"),
    [("{name: age}", "{name: age, mean: 40, std: 9}"), ("sites:", "policy: impute\nsites:")],
)
def test_a_changed_schema_changes_the_fingerprint_though_the_rows_are_the_same(
    two_sites: CommonSettings, tmp_path: Path, old: str, new: str
) -> None:
    first, silo = data_fingerprint(two_sites), load_silo("a", two_sites)
    (tmp_path / "schema.yaml").write_text(SCHEMA.replace(old, new))
    assert load_silo("a", two_sites).fingerprints == silo.fingerprints
    assert data_fingerprint(two_sites) != first


def test_other_folds_change_the_fingerprint_of_the_data(two_sites: CommonSettings) -> None:
    folds = dataclasses.replace(two_sites, test_folds=3)
    cuts = [
        two_sites,
        folds,
        dataclasses.replace(folds, test_fold=1),
        dataclasses.replace(folds, fold_seed=1),
        dataclasses.replace(folds, val_folds=2),
        dataclasses.replace(folds, use_test=False),
    ]
    assert len({data_fingerprint(cut) for cut in cuts}) == len(cuts)


def test_images_have_a_fingerprint_too() -> None:
    images = CommonSettings(dataset="digits", silos=3, silo_train_size=40, silo_test_size=10)
    first = data_fingerprint(images)
    assert data_fingerprint(dataclasses.replace(images, rounds=9)) == first
    assert data_fingerprint(dataclasses.replace(images, silos=2)) != first


@pytest.mark.parametrize("kind", ["test", "val"])
@pytest.mark.parametrize("dataset", TABLES)
def test_folds_that_are_not_there_are_refused(dataset: str, kind: str) -> None:
    def check(folds: int, fold: int) -> None:
        values: dict[str, Value] = {
            "dataset": dataset,
            f"split.{kind}-folds": folds,
            f"split.{kind}-fold": fold,
        }
        check_data_settings(build(CommonSettings, values))

    with refuses(SettingError, f"{kind}-folds", 1, 0, 2):
        check(1, 0)
    with refuses(SettingError, f"{kind}-fold", 3, 0, 2):
        check(3, 3)
    with refuses(SettingError, f"{kind}-fold", 1, f"{kind}-folds", 0):
        check(0, 1)
    check(0, 0)
    check(2, 1)
    check(3, 2)


def test_the_files_at_hand_decide_which_silos_there_are_where_nothing_declares_them() -> None:
    by_files = [name for name in DATA_SETS if data_set(name).silos_by_files]
    assert by_files == ["isic2019", "folder", "arrays"]


@pytest.mark.parametrize(
    ("name", "said"), [("medmnist", "is several data sets"), ("chestmnist", "is multi-label")]
)
def test_what_is_no_data_set_of_one_class_an_image_is_answered_with_those_that_are(
    name: str, said: str
) -> None:
    with pytest.raises(SettingError, match=f"'{name}' {said}.*: name one of pathmnist, dermamnist"):
        data_set(name)


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_a_floor_of_samples_behind_sums_and_means_is_a_setting_of_every_data_set(
    dataset: str,
) -> None:
    check_data_settings(build(CommonSettings, {"dataset": dataset, "privacy.sums-min-count": 11}))


OF_TABLES: dict[str, Value] = {
    "data.standardise": "site",
    "split.test-folds": 5,
    "split.test-fold": 1,
    "split.val-folds": 5,
    "split.val-fold": 1,
    "split.fold-seed": 1,
    "split.use-test": False,
}
OF_IMAGES: dict[str, Value] = {
    "split.silos": 4,
    "data.pixel-scale": "raw",
    "split.silo-train-size": 50,
    "split.silo-test-size": 50,
}


OF_PICTURES: dict[str, Value] = {
    "data.image-size": 64,
    "data.colour-constancy": True,
    "data.broken-images": "skip",
    "data.target": "diagnosis",
    "split.sample-share": 0.5,
    "split.public-share": 0.1,
    "data.intensity-profiles": False,
}
FOLDS = {key: value for key, value in OF_TABLES.items() if "standard" not in key}
NOT_OF = {  # of pictures
    "isic2019": {"data.intensity-profiles"},
    "dermoscopy-phantom": {"data.broken-images", "data.intensity-profiles"},
    "folder": {"data.target", "data.intensity-profiles"},
    "images": {"data.target", "data.intensity-profiles"},
    "endovascular": {"data.target", "data.colour-constancy", "data.intensity-profiles"},
    "angiogram-phantom": {
        "data.target",
        "data.colour-constancy",
        "data.broken-images",
        "data.intensity-profiles",
    },
    "mammography": {"data.target", "data.colour-constancy", "data.intensity-profiles"},
    "mini-mias": {"data.target", "data.colour-constancy"},
    "mammography-phantom": {"data.target", "data.colour-constancy", "data.broken-images"},
    "pneumoniamnist": {
        "data.target",
        "data.colour-constancy",
        "data.broken-images",
        "split.public-share",
    },
}


@pytest.mark.parametrize(
    ("dataset", "key", "value"),
    [
        *((name, key, value) for name in IMAGES for key, value in OF_TABLES.items()),
        *((name, key, value) for name in TABLES for key, value in OF_IMAGES.items()),
        *((name, key, value) for name in PICTURES for key, value in OF_IMAGES.items()),
        *(
            (name, key, OF_TABLES[key])
            for name in PICTURES
            for key in OF_TABLES
            if key not in FOLDS
        ),
        *((name, key, value) for name in ("digits", "heart") for key, value in OF_PICTURES.items()),
        *((name, key, OF_PICTURES[key]) for name, keys in NOT_OF.items() for key in sorted(keys)),
        *(
            ("pneumoniamnist", key, value)
            for key, value in (OF_TABLES | OF_IMAGES).items()
            if key not in ("split.fold-seed", "split.use-test")
        ),
    ],
)
def test_a_setting_that_only_other_data_sets_read_is_refused_by_its_key(
    dataset: str, key: str, value: Value
) -> None:
    settings = build(CommonSettings, {"dataset": dataset, key: value})
    said = f"'{key}' has no effect with data set '{dataset}': remove it"
    with pytest.raises(SettingError, match=said):
        check_data_settings(settings)


@pytest.mark.parametrize("dataset", TABLES)
def test_a_tables_own_settings_pass(dataset: str) -> None:
    check_data_settings(build(CommonSettings, {"dataset": dataset, **OF_TABLES}))


@pytest.mark.parametrize("dataset", IMAGES)
def test_the_images_own_settings_pass(dataset: str) -> None:
    check_data_settings(build(CommonSettings, {"dataset": dataset, **OF_IMAGES}))


@pytest.mark.parametrize("dataset", PICTURES)
def test_the_pictures_own_settings_pass(dataset: str) -> None:
    own = {k: v for k, v in OF_PICTURES.items() if k not in NOT_OF.get(dataset, ())}
    check_data_settings(build(CommonSettings, {"dataset": dataset, **own, **FOLDS}))


OF_THE_PARTITION: dict[str, Value] = {
    "split.silos": 2,
    "split.silo-train-size": 50,
    "split.silo-test-size": 50,
    "split.unseen": 0.0,
}


@pytest.mark.parametrize("dataset", [*IMAGES, *PICTURES, "pneumoniamnist"])
def test_the_keys_of_a_partition_by_label_pass_with_all_images(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    values = {"dataset": dataset, "split.partition": "unseen", **OF_THE_PARTITION}
    settings = build(CommonSettings, values)
    check_data_settings(settings)
    assert silo_names(settings) == ["silo-1", "silo-2"]
    assert silo_count(settings) == 2, "whatever files are here"


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_a_share_of_unseen_labels_means_nothing_without_its_partition(dataset: str) -> None:
    settings = build(CommonSettings, {"dataset": dataset, "split.unseen": 0.5})
    with refuses(SettingError, "unseen"):
        check_data_settings(settings)


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_a_silo_set_may_name_the_links_of_any_data_set(dataset: str) -> None:
    settings = build(CommonSettings, {"dataset": dataset, "split.silo-set": "gaia"})
    check_data_settings(settings)
    if dataset in IMAGES:
        assert silo_names(settings) == silo_names(CommonSettings(dataset=dataset))


def test_silos_by_label_have_a_fingerprint_that_their_share_decides() -> None:
    halves = CommonSettings(dataset="digits", partition="unseen", silos=2, silo_train_size=40)
    first = data_fingerprint(halves)
    assert data_fingerprint(dataclasses.replace(halves, seed=9)) == first
    assert data_fingerprint(dataclasses.replace(halves, unseen=0.0)) != first
    assert data_fingerprint(dataclasses.replace(halves, partition="own")) != first


# These are computed, so they are always here, and keep cholesterols of 0 as 'heart' does
ALWAYS_HERE = {"heart-synthetic", "heart-synthetic-pulse"}


@pytest.mark.parametrize("name", sorted(DATA_SETS.keys() - ALWAYS_HERE))
def test_a_data_set_says_nothing_of_data_that_are_not_here(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    assert data_set(name).notices(CommonSettings(dataset=name)) == []


SURVIVAL = ("survival-synthetic", "tcga-brca")


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_tables_and_numeric_outcomes_and_no_others_are_standardised(dataset: str) -> None:
    data = data_set(dataset)
    has_numbers = data.is_table or REGRESSION in data.tasks
    assert has_numbers == ("data.standardise" in data.settings)
    assert data.is_table == (dataset in (*TABLES, *SURVIVAL))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dataset", ["images", "mammography", "arrays"])
def test_of_images_only_a_numeric_outcome_is_standardised(dataset: str, task: str) -> None:
    values: dict[str, Value] = {"dataset": dataset, "task": task, "data.standardise": "site"}
    settings = build(CommonSettings, values)
    if task == REGRESSION:
        check_data_settings(settings)
        return
    with refuses(SettingError, "data.standardise", dataset):
        check_data_settings(settings)


class _Ward(DataSet):
    """Two wards with six rows each."""

    name = "wards"

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        return ["east", "west"]

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        split = Split(torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1] * 3))
        facts = {"train": "", "val": "", "test": ""}
        return Silo(name, name, NetworkShape((2,), 2), split, split, split, facts)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module ``ward_data``, in which data sets can be plugs."""
    module = ModuleType("ward_data")
    module.Ward, module.WARD, module.number = _Ward, _Ward(), 3  # type: ignore[attr-defined]
    module.digits = type("Digits", (_Ward,), {"name": "digits"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ward_data", module)
    return module


@pytest.mark.parametrize("name", ["Ward", "WARD"])
def test_a_plug_is_a_data_set_or_its_class(plugged: ModuleType, name: str) -> None:
    settings = CommonSettings(dataset=f"ward_data:{name}")
    assert silo_names(settings) == ["east", "west"]
    assert len(load_silo("west", settings).train) == 6
    check_data_settings(settings)


def test_a_plug_that_lists_settings_by_their_former_names_reads_them(
    plugged: ModuleType, tmp_path: Path
) -> None:
    former = {"settings": frozenset({"data-dir", "image-size"})}
    plugged.Former = type("Former", (_Ward,), former)  # type: ignore[attr-defined]
    data = data_set("ward_data:Former")
    assert data.settings == {"data.dir", "data.image-size"}
    settings = CommonSettings(dataset="ward_data:Former", image_size=24)
    check_data_settings(settings)
    assert declared_data(tmp_path, settings, lambda: load_silo("east", settings)).classes == 2


def test_a_plug_that_lists_an_unknown_setting_is_refused(plugged: ModuleType) -> None:
    unknown = {"settings": frozenset({"data.color"})}
    plugged.Unknown = type("Unknown", (_Ward,), unknown)  # type: ignore[attr-defined]
    with refuses(SettingError, "ward_data:Unknown", "data.color"):
        data_set("ward_data:Unknown")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ward_data:number", []),
        ("ward_data:digits", ["digits"]),
        ("ward_data:none", ["none"]),
        ("digitz", ["digitz", "digits"]),
    ],
)
def test_a_plug_that_is_no_data_set_or_has_a_name_of_ours_is_refused(
    plugged: ModuleType, name: str, told: list[object]
) -> None:
    with refuses(SettingError, *told):
        data_set(name)
