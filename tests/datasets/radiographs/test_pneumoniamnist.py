import dataclasses
import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.pneumoniamnist import PNEUMONIAMNIST, read_parts
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from tests.fuzz.reply_mutations import npy
from tests.support.errors import refuses

OWN = CommonSettings(dataset="pneumoniamnist", intensity_profiles=False)
SITES = ["vendor-a", "vendor-b", "vendor-c"]
SIZES = {"train": (21, 42), "val": (6, 9), "test": (6, 12)}  # normal, pneumonia


def arrays() -> dict[str, npt.NDArray[Any]]:
    """Return images whose first pixel is their number in their part, lighter than the rest."""
    made: dict[str, npt.NDArray[Any]] = {}
    for part, (normal, ill) in SIZES.items():
        numbers = np.arange(normal + ill)
        images = np.zeros((len(numbers), 28, 28), dtype=np.uint8)
        images[:, 0, 0], images[:, 27, 27] = numbers + 1, 255
        made |= {f"{part}_images": images, f"{part}_labels": (numbers >= normal)[:, None] * 1}
    return made


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "data" / "pneumoniamnist").mkdir(parents=True)
    found = Places(tmp_path / "data", tmp_path / "cache")
    np.savez(the_file(found), **arrays())
    return found


def the_file(places: Places) -> Path:
    assert places.data is not None
    return places.data / "pneumoniamnist" / "pneumoniamnist.npz"


def load(places: Places, site: str = "vendor-a", **changes: Any) -> Silo:
    return load_silo(site, dataclasses.replace(OWN, **changes), places)


def numbers(silo: Silo) -> dict[str, list[int]]:
    return {
        part: [(int(image[0, 0, 0]) + 32768) // 257 - 1 for image in split.inputs]
        for part, split in silo.splits().items()
    }


def test_each_part_is_dealt_out_class_by_class_and_stays_that_part(places: Places) -> None:
    assert silo_names(OWN) == SITES
    silos = [load(places, site) for site in SITES]
    for silo in silos:
        assert (silo.classes, silo.shape.input_shape) == (("normal", "pneumonia"), (1, 28, 28))
        assert silo.train.inputs.dtype == torch.int16
        assert silo.label_counts() == {"train": [7, 14], "val": [2, 3], "test": [2, 4]}
        for part, found in numbers(silo).items():
            labels = silo.splits()[part].labels.tolist()
            assert labels == [int(number >= SIZES[part][0]) for number in found]
            assert found == sorted(found)
    for part, sizes in SIZES.items():
        dealt = [number for silo in silos for number in numbers(silo)[part]]
        assert sorted(dealt) == list(range(sum(sizes))), "each image is at one site"
    with refuses(DataError, "vendor-d", "3"):
        load(places, "vendor-d")


def test_only_the_fold_seed_draws_another_deal(places: Places) -> None:
    first = numbers(load(places))
    assert numbers(load(places, seed=9)) == first
    assert numbers(load(places, fold_seed=1)) != first
    kept = load(places, use_test=False)
    assert numbers(kept) == first | {"test": []}


def test_a_share_is_a_part_of_a_larger_one_with_both_classes(places: Places) -> None:
    before: set[int] = set()
    for share, counts in ((0.001, [1, 1]), (0.3, [2, 4]), (1.0, [7, 14])):
        silo = load(places, sample_share=share)
        assert silo.label_counts()["train"] == counts
        found = set(numbers(silo)["train"])
        assert before < found
        before = found


def test_images_are_enlarged_bilinearly(places: Places) -> None:
    silo = load(places, image_size=56)
    assert silo.shape.input_shape == (1, 56, 56)
    corner = silo.train.inputs[0, 0, -4:, -4:].int() + 32768
    assert corner[3, 3] == 65535
    assert corner[1, 3] == round(65535 / 4)  # the corner's pixel is 255, its neighbours 0
    assert corner[2, 3] == round(65535 * 3 / 4)
    assert load(places).schema != silo.schema
    check_data_settings(dataclasses.replace(OWN, image_size=16))
    with refuses(SettingError, "data.image-size", "15", "0", "16"):
        check_data_settings(dataclasses.replace(OWN, image_size=15))


def test_each_vendor_renders_in_a_way_of_its_own_and_always_alike(places: Places) -> None:
    content = arrays()
    content["train_images"][:, 5:20, 5:20] = 128
    np.savez(the_file(places), **content)
    middles = []
    for site in SITES:
        silo = load(places, site, intensity_profiles=True)
        middles.append(silo.train.inputs[:, 0, 8:16, 8:16].float().mean().item())
        elsewhere = dataclasses.replace(places, cache=places.cache / "b")
        again = load(elsewhere, site, seed=3, intensity_profiles=True)
        assert again.fingerprints == silo.fingerprints
    assert middles == sorted(middles, reverse=True)
    assert middles[0] - middles[2] > 10000


def test_a_missing_file_is_told_with_where_it_comes_from(places: Places) -> None:
    the_file(places).unlink()
    with refuses(DataError, "pneumoniamnist.npz"):
        load(places)
    files = PNEUMONIAMNIST.files
    assert files is not None
    assert files.url + files.files[0].name == (
        "https://zenodo.org/records/10519652/files/pneumoniamnist.npz"
    )


def test_a_damaged_file_is_refused(places: Places) -> None:
    path, whole = the_file(places), the_file(places).read_bytes()
    for content in (b"", b"no npz", whole[:2000], whole[:100] + bytes(900) + whole[1000:]):
        path.write_bytes(content)
        with refuses(DataError, "pneumoniamnist.npz"):
            load(places)
    np.save(path.with_suffix(".npy"), np.zeros(3))
    path.write_bytes(path.with_suffix(".npy").read_bytes())
    with refuses(DataError, "pneumoniamnist.npz"):
        load(places)


def test_pickled_arrays_are_never_opened(places: Places) -> None:
    content = arrays() | {"train_labels": np.array([{}] * 63, dtype=object)}
    np.savez(the_file(places), **content)
    with pytest.raises(DataError, match="is damaged or not an npz file"):
        load(places)


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("val_images", np.zeros((15, 28, 28)), "val_images must be .*, but is float64"),
        ("val_images", np.zeros((15, 64, 64), np.uint8), "must be uint8"),
        ("test_images", np.zeros((17, 28, 28), np.uint8), "test_labels must be .*, but is int64"),
        ("val_labels", np.zeros((15, 2), int), "a whole number for each of 15 images"),
        ("val_labels", np.zeros(15), "val_labels must be .*, but is float64"),
        ("val_labels", np.arange(15) % 3, "val_labels must be 0 to 1, but some are not"),
        ("val_labels", np.zeros(15, int), r"there are \[15, 0\] of 15"),
    ],
)
def test_arrays_of_another_kind_are_refused(
    places: Places, name: str, array: npt.NDArray[Any], said: str
) -> None:
    np.savez(the_file(places), **(arrays() | {name: array}))
    with pytest.raises(DataError, match=said):
        load(places)


def archive(places: Places, name: str, content: bytes) -> Path:
    """Write the file with other bytes in place of an array."""
    path = the_file(places)
    with zipfile.ZipFile(path) as whole:
        members = {member: whole.read(member) for member in whole.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for member, own in (members | {f"{name}.npy": content}).items():
            made.writestr(member, own)
    return path


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (npy("<i8", "(2000000000000,)", b""), "is damaged or not an npz file"),
        (npy("|O", "(1,)", b"\x80\x04N."), "is damaged or not an npz file"),
        (npy("<i8", "(2,)", bytes(8)), "is damaged or not an npz file"),
        (b"no array", "val_labels is not an array"),
        (b"", "val_labels is not an array"),
        (bytes(10**8), "val_labels.npy is larger than 16777216 bytes"),
    ],
    ids=["too long", "pickle", "cut short", "no array", "empty", "large"],
)
def test_a_member_of_another_kind_is_refused(content: bytes, told: str, places: Places) -> None:
    with pytest.raises(DataError, match=told):
        read_parts(archive(places, "val_labels", content))


@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_any_header_that_is_damaged_is_read_or_refused(places: Places) -> None:
    """Of some, numpy's own reader lets errors of Python's tokenizer through."""
    file = io.BytesIO()
    np.save(file, arrays()["val_labels"])
    whole, refused = file.getvalue(), list[str]()
    for at in range(128):
        for damage in (b"\0", b"{", b"'", b"\n ", b'"""'):
            path = archive(places, "val_labels", whole[:at] + damage + whole[at + len(damage) :])
            try:
                assert read_parts(path)["val"][1].dtype == np.int64
            except DataError as error:  # nothing else
                refused.append(str(error))
    assert len(refused) > 128
    assert all("pneumoniamnist.npz" in told and told.isprintable() for told in refused)


def test_an_array_that_is_not_there_is_named(places: Places) -> None:
    content = arrays()
    del content["val_labels"]
    np.savez(the_file(places), **content)
    with pytest.raises(DataError, match=r"array .*val_labels.* is missing"):
        load(places)


def test_the_real_images_are_dealt_out_whole(real_data: Path, tmp_path: Path) -> None:
    places = Places(real_data, tmp_path)
    parts = read_parts(real_data / "pneumoniamnist" / "pneumoniamnist.npz")
    silos = [load(places, site) for site in SITES]
    for part, (normal, ill) in {
        "train": (1214, 3494),
        "val": (135, 389),
        "test": (234, 390),
    }.items():
        counts = np.array([silo.label_counts()[part] for silo in silos])
        assert counts.sum(axis=0).tolist() == [normal, ill]
        assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
        held = [image.numpy().tobytes() for s in silos for image in s.splits()[part].inputs]
        levels = parts[part][0].astype(np.int32) * 257 - 32768
        assert sorted(held) == sorted(image.tobytes() for image in levels.astype(np.int16))
    for one, other in itertools.combinations(silos, 2):
        assert one.schema == other.schema
        assert one.fingerprints["train"] != other.fingerprints["train"]
