import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.shifted.pools import cut_by_track
from fedsilo.datasets.shifted.shifted import distributions, shift, silo_names
from fedsilo.datasets.shifted.signs import decode_signs
from fedsilo.datasets.shifted.sources import SOURCES
from fedsilo.datasets.silo.silos import SPLITS, Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from tests.support.colour import write_cifar10, write_gtsrb
from tests.support.errors import refuses

SMALL = CommonSettings(
    dataset="mnist", silos=5, silo_train_size=29, silo_test_size=4, pixel_scale="raw"
)
NOISY = dataclasses.replace(SMALL, dataset="fmnist")


def _centres(split: Split) -> list[int]:
    """Return the middle pixel of each image, which no rotation of a flat image changes."""
    return [round(value) for value in split.inputs[:, 0, 8, 8].tolist()]


def test_nine_silos_are_three_of_each_distribution_with_the_names_of_the_paper() -> None:
    assert distributions(9) == ["D1"] * 3 + ["D2"] * 3 + ["D3"] * 3
    assert silo_names(9) == ["s1a", "s1b", "s1c", "s2a", "s2b", "s2c", "s3a", "s3b", "s3c"]


def test_five_silos_are_unbalanced_as_in_the_paper_and_other_counts_take_turns() -> None:
    assert distributions(5) == ["D1", "D1", "D1", "D2", "D3"]
    assert silo_names(5) == ["s1a", "s1b", "s1c", "s2a", "s3a"]
    assert distributions(4) == ["D1", "D2", "D3", "D1"]
    assert silo_names(4) == ["s1a", "s2a", "s3a", "s1b"]


def test_names_stay_distinct_beyond_the_alphabet() -> None:
    names = silo_names(3 * 30)
    assert len(set(names)) == 90
    assert [names[3 * 25], names[3 * 26], names[3 * 27]] == ["s1z", "s1aa", "s1ab"]


def test_silos_take_disjoint_slices_in_file_order_and_the_last_tenth_validates(
    small_places: Places,
) -> None:
    for index, name in enumerate(silo_names(5)):
        silo = load_silo(name, SMALL, small_places)
        first = index * 29
        assert _centres(silo.train) == list(range(first, first + 27))
        assert _centres(silo.val) == [first + 27, first + 28]
        assert _centres(silo.test) == list(range(200 + 4 * index, 204 + 4 * index))
        assert silo.train.labels.tolist() == [i % 10 for i in range(first, first + 27)]


def test_a_silo_says_what_it_holds(small_places: Places) -> None:
    silo = load_silo("s2a", SMALL, small_places)
    assert (silo.name, silo.distribution) == ("s2a", "D2")
    assert (silo.shape.input_shape, silo.shape.outputs) == ((1, 16, 16), 10)
    assert (silo.train.inputs.dtype, silo.train.labels.dtype) == (torch.float32, torch.int64)
    # s2a is the fourth of five: its validation images are 114 and 115.
    assert silo.label_counts()["val"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert sum(silo.label_counts()["train"]) == 27


def test_standardised_pixels_have_the_published_mean_taken_off(small_places: Places) -> None:
    settings = dataclasses.replace(SMALL, pixel_scale="standard")
    pixel = load_silo("s1a", settings, small_places).train.inputs[20, 0, 3, 3].item()
    assert pixel == pytest.approx((20 / 255 - 0.1307) / 0.3081, rel=1e-5)


def _blob(row: int, column: int) -> npt.NDArray[np.uint8]:
    image = np.zeros((1, 29, 29), np.uint8)
    image[0, row - 1 : row + 2, column - 1 : column + 2] = 200
    return image


def _centroid(image: Tensor) -> tuple[float, float]:
    rows, columns = torch.meshgrid(torch.arange(29.0), torch.arange(29.0), indexing="ij")
    weight = image / image.sum()
    return (rows * weight).sum().item(), (columns * weight).sum().item()


@pytest.mark.parametrize(
    ("distribution", "direction"),  # degrees from the right, counter-clockwise; straight up is 90
    [("D1", 90.0), ("D2", 90.0 - 50.0), ("D3", 90.0 + 120.0)],
)
def test_a_spot_at_the_top_goes_50_degrees_clockwise_or_120_counter_clockwise(
    distribution: str, direction: float
) -> None:
    rotated = shift(_blob(row=4, column=14), distribution, noise=False, key="k")
    assert rotated.shape == (1, 1, 29, 29)
    row, column = _centroid(rotated[0, 0])
    assert row == pytest.approx(14 - 10 * math.sin(math.radians(direction)), abs=0.3)
    assert column == pytest.approx(14 + 10 * math.cos(math.radians(direction)), abs=0.3)


@pytest.mark.parametrize(("distribution", "angle"), [("D2", -50.0), ("D3", 120.0)])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 29, 18, 3)])
def test_rotated_pixels_are_torchvisions_to_the_bit(
    shape: tuple[int, ...], distribution: str, angle: float
) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    pixels = torch.from_numpy(images).float().reshape(*shape[:3], -1).permute(0, 3, 1, 2)
    expected = rotate(pixels, angle, InterpolationMode.BILINEAR)
    assert torch.equal(shift(images, distribution, noise=False, key="k"), expected)


def test_digits_are_those_of_scikit_learn() -> None:
    pool = SOURCES["digits"].decode(Path())
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(np.concatenate([pool.train_labels, pool.test_labels]), labels)
    # A corner of an enlarged image is the corner of the image
    corners = np.concatenate([pool.train_images, pool.test_images])[:, ::15, ::15].reshape(-1, 4)
    assert np.array_equal(corners, (images[:, [0, 7, 56, 63]] * (255 / 16)).astype(np.float32))


def test_noise_has_deviation_ten_and_comes_on_d3_alone() -> None:
    images = np.full((40, 28, 28), 100, np.uint8)
    for distribution in ("D1", "D2"):
        plain = shift(images, distribution, noise=False, key="k")
        assert torch.equal(shift(images, distribution, noise=True, key="k"), plain)
    noise = shift(images, "D3", noise=True, key="k") - shift(images, "D3", noise=False, key="k")
    assert noise.mean().item() == pytest.approx(0.0, abs=0.2)
    assert noise.std().item() == pytest.approx(10.0, abs=0.2)
    assert not torch.equal(noise[0], noise[1])


def test_mnist_gets_no_noise_and_fashion_mnist_does_on_test_images_too(
    small_places: Places,
) -> None:
    mnist, fashion = (load_silo("s3a", s, small_places) for s in (SMALL, NOISY))
    for split in SPLITS:
        quiet = getattr(mnist, split).inputs
        noise = getattr(fashion, split).inputs - quiet
        assert torch.equal(quiet[:, :, 0, 0], torch.zeros(len(quiet), 1))
        assert noise.std().item() == pytest.approx(10.0, abs=1.0)
    unrotated = [load_silo("s1a", s, small_places).train.inputs for s in (SMALL, NOISY)]
    assert torch.equal(*unrotated)


def test_the_noise_of_a_silo_does_not_depend_on_the_seed_of_the_run(small_places: Places) -> None:
    other = dataclasses.replace(small_places, cache=small_places.cache / "other")
    first = load_silo("s3a", NOISY, small_places)
    second = load_silo("s3a", dataclasses.replace(NOISY, seed=99), other)
    assert first.fingerprints == second.fingerprints
    assert torch.equal(first.train.inputs, second.train.inputs)


def test_a_fingerprint_is_the_sha256_of_images_and_labels(small_places: Places) -> None:
    silo = load_silo("s2a", SMALL, small_places)
    for name in SPLITS:
        split = getattr(silo, name)
        content = split.inputs.numpy().tobytes() + split.labels.numpy().tobytes()
        assert silo.fingerprints[name] == hashlib.sha256(content).hexdigest()
    assert len(set(silo.fingerprints.values())) == 3


def _same(one: Silo, two: Silo) -> bool:
    pairs = [(getattr(one, name), getattr(two, name)) for name in SPLITS]
    return one.fingerprints == two.fingerprints and all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels) for a, b in pairs
    )


def test_a_second_load_reads_the_same_silo_from_the_cache(small_places: Places) -> None:
    first = load_silo("s1b", SMALL, small_places)
    files = {p: p.stat().st_mtime_ns for p in small_places.cache.rglob("*") if p.is_file()}
    assert _same(first, load_silo("s1b", SMALL, small_places))
    assert files == {p: p.stat().st_mtime_ns for p in files}
    assert {p for p in small_places.cache.rglob("*") if p.is_file()} == files.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_arrays_of_a_silo_are_mapped_from_its_files_and_not_copied(
    small_places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsilo.datasets.silo.silos._READ", 0)  # no array is small
    silo = load_silo("s1b", SMALL, small_places)
    mapped = Path("/proc/self/maps").read_text()
    files = list(small_places.cache.rglob("s1b-*/*.npy"))
    assert len(files) == 6
    assert all(str(path) in mapped for path in files)
    assert len(silo.train) == 27


@pytest.mark.parametrize(
    "change",
    [
        {"silo_train_size": 30},
        {"silo_test_size": 5},
        {"pixel_scale": "standard"},
        {"dataset": "fmnist"},
        {"silos": 6},  # s3a is the third of six, the last of five
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_make_another_silo_beside_the_first(
    small_places: Places, change: dict[str, int | str]
) -> None:
    first = load_silo("s3a", SMALL, small_places)
    other = load_silo("s3a", dataclasses.replace(SMALL, **change), small_places)  # type: ignore[arg-type]
    assert not _same(first, other)
    assert _same(first, load_silo("s3a", SMALL, small_places))


def test_an_unknown_silo_is_answered_with_the_known_ones(small_places: Places) -> None:
    with refuses(DataError, "s9z", "5", "s1a", "s1b", "s1c", "s2a", "s3a"):
        load_silo("s9z", SMALL, small_places)
    with refuses(SettingError, "mnits"):
        load_silo("s1a", dataclasses.replace(SMALL, dataset="mnits"), small_places)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"silo_train_size": 41}, [5, 41, 205, "mnist", 200]),
        ({"silo_test_size": 11}, [5, 11, 55, "mnist", 50]),
        ({"silos": 51, "silo_train_size": 0}, [2000]),
        (  # a tenth of nine is no validation data
            {"silo_train_size": 9},
            [9, "split.silo-train-size", 10],
        ),
    ],
)
def test_data_too_few_for_the_silos_are_refused(
    small_places: Places, change: dict[str, int], says: list[object]
) -> None:
    with refuses(DataError, *says):
        load_silo("s1a", dataclasses.replace(SMALL, **change), small_places)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (
            {"silo_train_size": 41, "silo_test_size": 11},
            "'mnist' has 50: what fits is 'split.silo-train-size' 40 and 'split.silo-test-size' "
            "10 for 5 silos, or 'split.silos' 4 of that size",
        ),
        (
            {"silos": 30, "silo_train_size": 10, "silo_test_size": 1},
            "what fits is 'split.silos' 20 of that size",
        ),
        ({"silo_train_size": 201}, "what fits is 'split.silo-train-size' 40 for 5 silos"),
        ({"silos": 60, "silo_train_size": 201}, "lower 'split.silos' or take more data"),
    ],
)
def test_a_refusal_of_too_few_data_names_what_would_fit(
    small_places: Places, change: dict[str, int], fits: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_silo("s1a", dataclasses.replace(SMALL, **change), small_places)  # type: ignore[arg-type]
    assert str(caught.value).endswith(fits)
    assert "\n" not in str(caught.value)


def test_a_silo_without_test_data_is_refused(
    small_places: Places, write_idx: Callable[[Path, npt.NDArray[np.uint8]], Path]
) -> None:
    assert small_places.data is not None
    folder = small_places.data / "mnist"
    write_idx(folder / "t10k-images-idx3-ubyte.gz", np.empty((0, 16, 16), np.uint8))
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.empty(0, np.uint8))
    with refuses(DataError, "mnist", "0"):
        load_silo("s1a", SMALL, small_places)
    assert not list(small_places.cache.rglob("s1a-*"))


def test_nine_silos_of_the_real_mnist_have_the_sizes_of_the_paper(real_data: Path) -> None:
    settings = CommonSettings(dataset="mnist", silos=9, data_dir=str(real_data))
    silos = [load_silo(name, settings) for name in silo_names(9)]
    assert {silo.shape.input_shape for silo in silos} == {(1, 28, 28)}
    assert {tuple(len(getattr(s, name)) for name in SPLITS) for s in silos} == {(1800, 200, 500)}
    assert silos[0].train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert silos[0].train.inputs.mean().item() == pytest.approx(0.0, abs=0.02)
    assert len({silo.fingerprints["train"] for silo in silos}) == 9


COLOUR = CommonSettings(
    dataset="cifar10", silos=5, silo_train_size=20, silo_test_size=4, pixel_scale="raw"
)


def test_images_in_colour_are_cut_shifted_and_noised_as_grey_ones(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    places = Places(tmp_path, tmp_path / "cache")
    plain, rotated, noisy = (load_silo(name, COLOUR, places) for name in ("s1b", "s2a", "s3a"))
    assert plain.shape == NetworkShape((3, 32, 32), 10)
    assert [len(split) for split in plain.splits().values()] == [18, 2, 4]
    assert plain.train.inputs[1, :, 5, 6].tolist() == [21, 22, 23]
    assert plain.val.inputs[:, 0, 0, 0].tolist() == [38, 39]
    assert plain.test.labels.tolist() == [4, 5, 6, 7]
    # The middle stays, a corner is filled with zero in each colour
    assert rotated.train.inputs[0, :, 16, 16].tolist() == pytest.approx([60, 61, 62])
    assert rotated.train.inputs[0, :, 0, 0].tolist() == [0, 0, 0]
    noise = noisy.train.inputs[:, :, 16, 16] - torch.arange(80.0, 98)[:, None] - torch.arange(3)
    assert noise.std().item() == pytest.approx(10, abs=3)
    assert not torch.equal(noise[:, 0], noise[:, 1])


def test_each_channel_is_standardised_by_its_own_published_figures(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    settings = dataclasses.replace(COLOUR, pixel_scale="standard")
    silo = load_silo("s1b", settings, Places(tmp_path, tmp_path / "cache"))
    expected = [(21 / 255 - 0.4914) / 0.2470, (22 / 255 - 0.4822) / 0.2435]
    assert silo.train.inputs[1, :2, 5, 6].tolist() == pytest.approx(expected, rel=1e-5)
    assert silo.train.inputs[1, 2, 5, 6].item() == pytest.approx((23 / 255 - 0.4465) / 0.2616)


def test_a_spot_turns_alike_in_all_colours() -> None:
    grey = _blob(row=4, column=14)
    colour = np.stack([grey, grey // 2, grey], axis=-1)
    turned, alone = (shift(images, "D2", noise=False, key="k") for images in (colour, grey))
    assert turned.shape == (1, 3, 29, 29)
    assert torch.equal(turned[:, :1], alone)
    assert torch.allclose(turned[:, 1], alone[:, 0] / 2)


def test_frames_of_a_track_are_on_one_side_of_a_silos_validation_cut(tmp_path: Path) -> None:
    root = write_gtsrb(tmp_path, tracks=10, frames=4)
    places = Places(tmp_path, tmp_path / "cache")
    settings = CommonSettings(dataset="gtsrb", silos=3, silo_train_size=40, silo_test_size=4)
    pool = decode_signs(root)
    assert pool.train_tracks is not None
    seen = 0
    for index, name in enumerate(silo_names(3)):
        tracks = pool.train_tracks[40 * index : 40 * index + 40]
        train, val = cut_by_track(tracks, 4, name)
        silo = load_silo(name, settings, places)
        labels = pool.train_labels[40 * index : 40 * index + 40]
        assert silo.train.labels.tolist() == labels[train].tolist()
        assert silo.val.labels.tolist() == labels[val].tolist()
        assert 1 <= len(val) <= 4
        seen += len(silo.train) + len(silo.val)
    assert seen == 120


@pytest.mark.soak  # nineteen thousand pictures; those of other tests are a few
def test_nine_silos_of_the_real_signs_have_the_sizes_of_the_paper(real_data: Path) -> None:
    settings = CommonSettings(dataset="gtsrb", silos=9, data_dir=str(real_data))
    silos = [load_silo(name, settings) for name in silo_names(9)[::4]]
    assert {tuple(len(getattr(s, name)) for name in SPLITS) for s in silos} == {(1800, 200, 500)}
    assert silos[0].shape == NetworkShape((3, 32, 32), 43)
    assert silos[0].train.inputs.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=0.1)


def test_nine_silos_that_the_real_part_of_cifar10_is_too_small_for_are_told_what_fits(
    real_data: Path,
) -> None:
    settings = CommonSettings(dataset="cifar10", silos=9, data_dir=str(real_data))
    with refuses(DataError, "split.silo-train-size", "1111", "split.silo-test-size", "111", "9"):
        load_silo("s1a", settings)
    fitting = dataclasses.replace(settings, silo_train_size=1000, silo_test_size=111)
    assert len(load_silo("s3c", fitting).train) == 900
