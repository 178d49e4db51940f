import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.datasets.shifted.pools import Pool, locate, open_pool, source_key
from fedsilo.datasets.shifted.sources import SOURCES
from tests.support.errors import refuses

MNIST = SOURCES["mnist"]
TEST_LABELS = "t10k-labels-idx1-ubyte.gz"


def test_without_a_data_directory_the_message_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_pool(MNIST, Places(None, tmp_path))
    assert all(
        part in str(caught.value) for part in ("'data.dir'", "$FEDSILO_DATA", MNIST.public.url)
    )


def test_files_are_decoded_once_and_mapped_from_the_cache_after(small_places: Places) -> None:
    decoded = []

    def decode(folder: Path) -> Pool:
        decoded.append(folder)
        return MNIST.decode(folder)

    counting = dataclasses.replace(MNIST, decode=decode)
    first, key = open_pool(counting, small_places)
    second, again = open_pool(counting, small_places)
    assert len(decoded) == 1
    assert key == again
    for pool in (first, second):
        assert isinstance(pool.train_images, np.memmap)
        assert pool.train_images.mode == "r"
        assert pool.train_images[:, 7, 3].tolist() == list(range(200))
        assert pool.test_images[:, 0, 0].tolist() == list(range(200, 250))
        assert pool.train_labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_files_that_change_are_decoded_anew(small_places: Places) -> None:
    assert small_places.data is not None
    folder = small_places.data / "mnist"

    def key(name: str) -> str:
        return source_key(SOURCES[name], *locate(SOURCES[name], small_places))

    before = key("mnist")
    assert key("mnist") == before
    assert key("fmnist") != before
    stat = (folder / TEST_LABELS).stat()
    os.utime(folder / TEST_LABELS, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert key("mnist") != before


def test_a_damaged_file_leaves_no_pool_in_the_cache(small_places: Places) -> None:
    assert small_places.data is not None
    damaged = small_places.data / "mnist" / TEST_LABELS
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with refuses(DataError, TEST_LABELS):
        open_pool(MNIST, small_places)
    assert list(small_places.cache.iterdir()) == []


@pytest.mark.parametrize("keep", [3, 60, -1])
def test_a_damaged_decoded_pool_is_made_anew(small_places: Places, keep: int) -> None:
    _, key = open_pool(MNIST, small_places)
    array = small_places.cache / f"mnist-{key}" / "test_images.npy"
    array.write_bytes(array.read_bytes()[:keep])
    after, _ = open_pool(MNIST, small_places)
    assert after.test_images[:, 0, 0].tolist() == list(range(200, 250))


def test_a_decoded_pool_that_lacks_an_array_is_made_anew(small_places: Places) -> None:
    _, key = open_pool(MNIST, small_places)
    (small_places.cache / f"mnist-{key}" / "train_labels.npy").unlink()
    pool, _ = open_pool(MNIST, small_places)
    assert pool.train_labels[:3].tolist() == [0, 1, 2]


def test_training_and_test_images_of_different_size_are_refused(
    small_places: Places, write_idx: Callable[..., Path]
) -> None:
    assert small_places.data is not None
    images = np.zeros((50, 16, 18), np.uint8)
    write_idx(small_places.data / "mnist" / "t10k-images-idx3-ubyte.gz", images)
    with refuses(DataError, 16, 18):
        open_pool(MNIST, small_places)


def _statistics(pool: Pool) -> tuple[tuple[float], tuple[float]]:
    pixels = pool.train_images / 255
    return (float(pixels.mean()),), (float(pixels.std()),)


def _stated(name: str) -> object:
    of_source = SOURCES[name].mean, SOURCES[name].std
    return tuple(pytest.approx(figure, abs=1e-4) for figure in of_source)


def test_digits_are_all_1797_doubled_in_size_and_grey_from_0_to_255() -> None:
    pool, _ = open_pool(SOURCES["digits"], find_places("", ""))
    assert pool.train_images.shape == (1437, 16, 16)
    assert pool.test_images.shape == (360, 16, 16)
    assert (pool.train_images.min(), pool.train_images.max()) == (0, 255)
    everything = np.concatenate([pool.train_labels, pool.test_labels])
    assert np.bincount(everything).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_standardised_by_the_statistics_of_their_training_part() -> None:
    pool, _ = open_pool(SOURCES["digits"], find_places("", ""))
    assert _statistics(pool) == _stated("digits")


def test_the_real_mnist_has_the_published_counts_mean_and_deviation(real_data: Path) -> None:
    pool, _ = open_pool(MNIST, find_places(str(real_data), ""))
    assert pool.train_images.shape == (60000, 28, 28)
    counts = np.bincount(pool.test_labels).tolist()
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert pool.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert _statistics(pool) == _stated("mnist")
