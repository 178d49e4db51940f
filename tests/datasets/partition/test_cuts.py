"""Cuts by a Dirichlet draw and by few labels: shares by hand, nothing twice, nothing lost."""

import dataclasses
import gc
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.partition import cuts
from fedsilo.datasets.partition.cuts import deal_rows, dirichlet_shares, label_shares
from fedsilo.datasets.partition.pool import CutPool, open_cut_pool
from fedsilo.datasets.registry import (
    DATA_SETS,
    check_data_settings,
    cut_of,
    data_set,
    load_silo,
    silo_count,
    silo_names,
)
from fedsilo.datasets.silo.silos import SPLITS
from tests.support.errors import refuses

SMALL = CommonSettings(dataset="mnist", partition="dirichlet", silos=3, concentration=2.0)


def _draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(
    classes=st.integers(2, 12),
    silos=st.integers(1, 12),
    concentration=st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 100.0, 1e300]),
)
def test_shares_of_a_label_are_one_in_all(classes: int, silos: int, concentration: float) -> None:
    shares = dirichlet_shares(classes, silos, concentration, _draw())
    assert shares.shape == (classes, silos)
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    if concentration == 1e-300:
        assert (shares.max(axis=1) == 1).all(), "one silo has all of a label"
    if concentration == 1e300:
        np.testing.assert_allclose(shares, 1 / silos)


def test_near_concentration_0_each_silo_is_as_likely_to_have_a_label() -> None:
    owners = dirichlet_shares(3000, 3, 1e-300, _draw()).argmax(axis=1)
    assert np.bincount(owners).min() > 900  # 1,000 expected, with a deviation of 26


@given(classes=st.integers(2, 12), silos=st.integers(1, 12), held=st.integers(1, 12))
def test_each_silo_holds_so_many_labels_and_no_label_is_left(
    classes: int, silos: int, held: int
) -> None:
    if held > classes or held * silos < classes:
        with pytest.raises(SettingError, match=f"must be {-(-classes // silos)} to {classes},"):
            label_shares(classes, silos, held, _draw())
        return
    shares = label_shares(classes, silos, held, _draw())
    assert ((shares > 0).sum(axis=0) == held).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    holders = (shares > 0).sum(axis=1)
    assert holders.max() - holders.min() <= 1


@given(labels=st.lists(st.integers(0, 3), max_size=60), silos=st.integers(1, 7))
def test_every_row_is_at_one_silo(labels: list[int], silos: int) -> None:
    part = np.array(labels, np.int64)
    shares = dirichlet_shares(4, silos, 0.5, _draw(1))
    found = deal_rows({"train": part}, shares, _draw(2))
    rows = np.concatenate([own["train"] for own in found])
    assert sorted(rows.tolist()) == list(range(len(labels)))
    for silo, own in enumerate(found):
        for label in range(4):
            count, whole = (part[own["train"]] == label).sum(), (part == label).sum()
            assert abs(count - shares[label, silo] * whole) <= 1


def test_a_silos_test_samples_follow_its_training_samples(small_places: Places) -> None:
    settings = dataclasses.replace(SMALL, partition="labels", concentration=0.5, labels_per_silo=4)
    silos = [load_silo(name, settings, small_places) for name in silo_names(settings)]
    assert [silo.distribution for silo in silos] == ["labels"] * 3
    for silo in silos:
        held = {
            part: {label for label, count in enumerate(counts) if count}
            for part, counts in silo.label_counts().items()
        }
        assert len(held["train"]) == 4
        assert held["test"] == held["train"] >= held["val"]
        sizes = [len(split) for split in silo.splits().values()]
        assert sizes[1] == (sizes[0] + sizes[1]) // 10
    assert sum(len(silo.train) + len(silo.val) for silo in silos) == 200


def test_the_cut_is_decided_by_fold_seed_and_no_run_seed(small_places: Places) -> None:
    first = load_silo("silo-2", SMALL, small_places).fingerprints
    for other, same in (({"seed": 9}, True), ({"fold_seed": 1}, False), ({"silos": 4}, False)):
        cut = dataclasses.replace(SMALL, **other)  # type: ignore[arg-type]  # of one key each
        assert (load_silo("silo-2", cut, small_places).fingerprints == first) == same


def test_all_silos_of_a_cut_are_dealt_at_once(
    small_places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Mock(side_effect=deal_rows)
    monkeypatch.setattr(cuts, "deal_rows", counted)
    cuts._last_rows.clear()
    for name, seed, deals in (("silo-1", 5, 1), ("silo-2", 5, 1), ("silo-1", 6, 2)):
        load_silo(name, dataclasses.replace(SMALL, fold_seed=seed), small_places)
        assert counted.call_count == deals


def test_no_sample_is_kept_once_a_cut_is_dealt(
    small_places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []

    def opened(*arguments: Any) -> CutPool:
        pool = open_cut_pool(*arguments)
        readers.append(weakref.ref(pool.inputs))
        return pool

    monkeypatch.setattr(cuts, "open_cut_pool", opened)
    for settings in (
        SMALL,
        build(CommonSettings, {"dataset": "digits", "split.partition": "unseen"}),
    ):
        load_silo(silo_names(settings)[0], settings, small_places)
        gc.collect()
        assert readers.pop()() is None


def test_a_silo_set_that_grew_meanwhile_is_dealt_again(
    small_places: Places, tmp_path: Path
) -> None:
    edges = tmp_path / "ring.csv"
    settings = dataclasses.replace(SMALL, silos=CommonSettings().silos, silo_set=str(edges))
    edges.write_text("site,neighbour\na,b\n")
    assert len(load_silo("b", settings, small_places).train)
    edges.write_text("site,neighbour\na,b\nb,c\n")
    assert len(load_silo("c", settings, small_places).train)


def test_sizes_are_at_most_those_asked_for(small_places: Places) -> None:
    settings = dataclasses.replace(SMALL, silo_train_size=20, silo_test_size=5)
    silos = [load_silo(name, settings, small_places) for name in silo_names(settings)]
    assert all(len(silo.train) + len(silo.val) <= 20 and len(silo.test) <= 5 for silo in silos)
    without = dataclasses.replace(settings, use_test=False)
    assert len(load_silo("silo-1", without, small_places).test) == 0


def test_a_silo_left_empty_is_told_in_a_line(small_places: Places) -> None:
    settings = dataclasses.replace(SMALL, concentration=0.001, silos=20)
    with pytest.raises(DataError, match=r"leaves [0-9]+ of 20 silos without 2 training") as told:
        load_silo("silo-01", settings, small_places)
    assert (
        "raise 'split.concentration', lower 'split.silos', or set another 'split.fold-seed'"
        in str(told.value)
    )
    assert "\n" not in str(told.value)
    with refuses(DataError, "silo-9"):
        load_silo("silo-9", SMALL, small_places)


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("nan")])
def test_a_concentration_must_be_above_0(concentration: float) -> None:
    with refuses(SettingError, "concentration", "0"):
        build(CommonSettings, {"split.concentration": concentration})


def test_settings_of_another_partition_are_refused() -> None:
    for values in ({"split.concentration": 1.0}, {"split.labels-per-silo": 3}):
        (key,) = values
        settings = build(CommonSettings, {"dataset": "digits", **values})
        with refuses(SettingError, key):
            check_data_settings(settings)


@pytest.mark.parametrize("dataset", DATA_SETS)
@pytest.mark.parametrize("partition", ["dirichlet", "labels"])
def test_every_data_set_takes_it(dataset: str, partition: str) -> None:
    settings = CommonSettings(dataset=dataset, partition=partition, silos=7)
    check_data_settings(settings)
    assert silo_count(settings) == 7
    assert silo_names(settings)[-1] == "silo-7"


def test_a_table_is_cut_with_its_features(tmp_path: Path) -> None:
    settings = CommonSettings(
        dataset="heart-synthetic",
        partition="dirichlet",
        silos=3,
        concentration=5.0,
        cache_dir=str(tmp_path),
    )
    own = dataclasses.replace(settings, partition="own", concentration=0.5, silos=9)
    sites = [load_silo(name, own) for name in silo_names(own)]
    silos = [load_silo(name, settings) for name in silo_names(settings)]
    assert data_set("heart-synthetic").is_table
    for silo in silos:
        assert (silo.features, silo.schema) == (sites[0].features, sites[0].schema)
    for part in ("train", "test"):
        held = sum(len(silo.splits()[part]) for silo in silos)
        held += sum(len(silo.val) for silo in silos) if part == "train" else 0
        assert held == sum(len(site.splits()[part]) for site in sites)


def test_a_cut_is_told_with_its_digest(tmp_path: Path) -> None:
    settings = CommonSettings(
        dataset="digits", partition="dirichlet", silos=3, cache_dir=str(tmp_path)
    )
    cut = cut_of(settings)
    assert cut is not None
    assert cut["sha256"] == json_digest(cut["silos"])
    assert cut["decided-by"]["split.concentration"] == 0.5
    for name, own in cut["silos"].items():
        sizes = {part: len(split) for part, split in load_silo(name, settings).splits().items()}
        assert {part: len(own[part]) for part in SPLITS} == sizes
    assert cut_of(CommonSettings(dataset="digits")) is None


def _in_turn(labels: dict[str, Any], silos: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    return [{p: np.arange(len(of))[s::silos] for p, of in labels.items()} for s in range(silos)]


def _plugged(monkeypatch: pytest.MonkeyPatch, partitioner: Any) -> CommonSettings:
    module = ModuleType("ward_cuts")
    module.cut = partitioner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ward_cuts", module)
    return CommonSettings(dataset="heart-synthetic", partition="ward_cuts:cut", silos=3)


def test_a_plug_cuts_silos_in_which_each_row_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _plugged(monkeypatch, _in_turn)
    check_data_settings(settings)
    document = cut_of(settings)
    assert document
    assert document["silos"]["silo-2"]["test"][:3] == [1, 4, 7]
    silos = [load_silo(name, settings) for name in silo_names(settings)]
    assert [len(silo.train) + len(silo.val) for silo in silos] == sorted(
        (len(silo.train) + len(silo.val) for silo in silos), reverse=True
    )
    assert {silo.distribution for silo in silos} == {"ward_cuts:cut"}


@pytest.mark.parametrize(
    ("partitioner", "told"),
    [
        (3, "'ward_cuts:cut' must be a function"),
        (lambda *_: [], "must return, for each of 3 silos"),
        (lambda *_: 1 / 0, "fails .ZeroDivisionError"),
        (lambda labels, silos, _: [3] * silos, "fails .AttributeError"),
        (lambda labels, silos, _: [{p: [0] for p in labels}] * silos, "no row at two silos"),
        (lambda labels, silos, _: [{p: [-1] for p in labels}] * silos, "no row at two silos"),
        (lambda labels, silos, _: [{p: [0.5] for p in labels}] * silos, "no row at two silos"),
    ],
)
def test_a_plug_that_cuts_nothing_or_twice_is_refused(
    monkeypatch: pytest.MonkeyPatch, partitioner: Any, told: str
) -> None:
    with pytest.raises(SettingError, match=told):
        cut_of(_plugged(monkeypatch, partitioner))
