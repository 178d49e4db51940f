"""Arrays of a site's own, and what of them is refused."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.arrays import write_arrays
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.registry import image_reader, load_silo, silo_names
from fedsilo.datasets.silo.silos import SPLITS
from tests.support.errors import refuses

IMAGES = np.arange(12, dtype=np.uint8).repeat(256).reshape(12, 16, 16)
LABELS = np.arange(12) % 2
NAMES = np.array(["cat", "dog"])


def settings(folder: Path, **changes: Any) -> CommonSettings:
    cache = str(folder.parent / "cache")
    return CommonSettings(dataset="arrays", data_dir=str(folder), cache_dir=cache, **changes)


def save(folder: Path, **arrays: npt.NDArray[Any]) -> CommonSettings:
    folder.mkdir(exist_ok=True)
    whole: dict[str, Any] = {"x": IMAGES, "y": LABELS, "classes": NAMES} | arrays
    np.savez(folder / "north.npz", **whole)
    return settings(folder)


def test_a_file_is_a_silo_of_its_samples_and_the_classes_names(tmp_path: Path) -> None:
    own = save(tmp_path / "data")
    assert silo_names(own) == ["north"]
    silo = load_silo("north", own)
    assert silo.class_names() == ("cat", "dog")
    assert silo.shape.input_shape == (1, 16, 16)
    levels = {
        part: [(int(x[0, 0, 0]), int(y)) for x, y in zip(s.inputs, s.labels, strict=True)]
        for part, s in silo.splits().items()
    }
    assert [len(levels[part]) for part in SPLITS] == [9, 0, 3]
    assert sorted(pair for part in levels.values() for pair in part) == [
        (i, i % 2) for i in range(12)
    ]


def test_copies_of_a_sample_are_in_one_part_of_every_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = save(tmp_path / "data", x=np.concatenate([IMAGES] * 3), y=np.tile(LABELS, 3))
    for changes in ({}, {"test_folds": 3, "val_folds": 2}):
        silo = load_silo("north", dataclasses.replace(own, **changes))
        parts = [set(split.inputs[:, 0, 0, 0].tolist()) for split in silo.splits().values()]
        assert sum(map(len, parts)) == len(set().union(*parts)) == 12
    assert "24 of 36 samples are copies of another" in caplog.text


def test_floats_stay_as_they_are_and_a_new_file_is_read_like_them(tmp_path: Path) -> None:
    own = save(tmp_path / "data", x=np.linspace(-3, 3, 12 * 2 * 64).reshape(12, 2, 8, 8))
    silo = load_silo("north", own)
    assert silo.shape.input_shape == (2, 8, 8)
    assert float(silo.train.inputs.min()) < -1
    sample = silo.train.inputs[0].numpy()
    for kind in (np.float32, np.float64):  # x was written as the latter
        np.save(tmp_path / "new.npy", sample.astype(kind))
        assert np.array_equal(image_reader("north", own)(tmp_path / "new.npy"), sample)


def test_a_new_file_of_another_form_is_broken_and_no_crash(tmp_path: Path) -> None:
    own = save(tmp_path / "data", x=np.linspace(-3, 3, 12 * 2 * 64).reshape(12, 2, 8, 8))
    sample = np.zeros((2, 8, 8), np.float32)
    for name, array in (("fewer", sample[:1]), ("flat", sample[0]), ("whole", sample.astype(int))):
        np.save(tmp_path / f"{name}.npy", array)
    for name, value in (("nan", np.nan), ("large", 1e300)):  # the latter is none of float32
        np.save(tmp_path / f"{name}.npy", np.full((2, 8, 8), value))
    np.savez(tmp_path / "archive", x=sample)
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 cut short")
    os.mkfifo(tmp_path / "pipe.npy")
    for names, said in (
        (("fewer", "flat", "whole"), "but must be a sample"),
        (("archive", "text", "zip", "missing"), "is not a NumPy array"),
        (("nan", "large"), "contains non-finite numbers"),
        (("pipe",), "is not a file"),
    ):
        for name in names:
            with pytest.raises(BrokenImageError, match=said):
                image_reader("north", own)(tmp_path / f"{name}.npy")


def test_a_grey_file_may_lack_its_channel(tmp_path: Path) -> None:
    read = image_reader("north", save(tmp_path / "data"))
    np.save(tmp_path / "grey.npy", IMAGES[3])
    assert np.array_equal(read(tmp_path / "grey.npy"), IMAGES[3][None])


@pytest.mark.parametrize(
    ("array", "said"),
    [
        ({"x": IMAGES.astype(np.int64)}, "x must be 8-bit numbers or floats .* but is int64"),
        ({"x": IMAGES.reshape(12, 256)}, r"x must be .*, but is uint8 \(12, 256\)"),
        ({"x": np.full((12, 8, 8), np.nan)}, "x contains non-finite numbers"),
        ({"x": np.full((12, 8, 8), 1e300)}, "x contains non-finite numbers"),
        ({"y": LABELS[:11]}, "a whole number from 0 to 1 for each of 12 samples"),
        ({"y": LABELS + 1}, "a whole number from 0 to 1"),
        ({"y": LABELS / 2}, "a whole number from 0 to 1"),
        ({"classes": NAMES[:1]}, "must be 2 names or more"),
        ({"classes": np.arange(2)}, "must be 2 names or more"),
        ({"classes": np.array(["cat", "dog", "cat"])}, "must be 2 names or more, each once"),
    ],
)
def test_arrays_of_another_form_are_refused(
    array: dict[str, npt.NDArray[Any]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        load_silo("north", save(tmp_path / "data", **array))


@pytest.mark.parametrize(
    "odd",
    [
        {"x": IMAGES[:, None].repeat(3, axis=1)},
        {"x": IMAGES[:, :8]},
        {"x": IMAGES.astype(np.float32)},
        {"classes": NAMES[::-1]},
    ],
    ids=["channels", "height", "kind", "order of classes"],
)
def test_a_partition_does_not_mix_unlike_sites(
    odd: dict[str, npt.NDArray[Any]], tmp_path: Path
) -> None:
    save(tmp_path / "data", **odd)
    (tmp_path / "data" / "north.npz").rename(tmp_path / "data" / "south.npz")
    save(tmp_path / "data")
    cut = settings(tmp_path / "data", partition="dirichlet", silos=2, concentration=100.0)
    with refuses(DataError, "south"):
        load_silo("silo-1", cut)


def test_a_folder_without_arrays_says_what_to_write(tmp_path: Path) -> None:
    with refuses(DataError, "SITE.npz"):
        silo_names(settings(tmp_path))


def test_what_is_written_has_the_classes_of_all_sites_and_channels_first(tmp_path: Path) -> None:
    colour = np.arange(9, dtype=np.uint8).repeat(768).reshape(9, 16, 16, 3)
    names = np.array(["flu", "cold", "flu", "cold"] * 2 + ["well"])
    write_arrays(tmp_path, {"north": (colour, names), "south": (colour[:8], names[:8])})
    south = load_silo("south", settings(tmp_path))
    assert south.class_names() == ("cold", "flu", "well")
    assert south.shape.input_shape == (3, 16, 16)
