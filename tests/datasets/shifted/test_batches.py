"""CIFAR's batches, hand-made in both forms and the real ones."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.datasets.shifted import batches
from fedsilo.datasets.shifted.batches import (
    CIFAR10,
    CIFAR100,
    Layout,
    decode_batches,
    list_batches,
)
from fedsilo.datasets.shifted.pools import open_pool
from fedsilo.datasets.shifted.sources import SOURCES
from tests.support.colour import (
    flat_planes,
    python2_batch,
    read_or_refused,
    write_binary,
    write_cifar10,
)
from tests.support.errors import refuses

Publish = Callable[[Path, bytes], None]


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Return a function that writes a file and makes it a published one."""
    published: dict[str, str] = {}
    monkeypatch.setattr(batches, "_published_digests", lambda layout: published)

    def write(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        published[path.name] = hashlib.md5(content, usedforsecurity=False).hexdigest()

    return write


def _write_python(folder: Path, publish: Publish) -> Path:
    publish(folder / "data_batch_2", python2_batch(flat_planes(5, 2), [3, 1]))
    publish(folder / "test_batch", python2_batch(flat_planes(9, 1), [0]))
    return folder


def test_binary_batches_follow_one_another_as_images_of_red_green_and_blue(tmp_path: Path) -> None:
    pool = decode_batches(CIFAR10, write_cifar10(tmp_path))
    assert pool.train_images.shape == (100, 32, 32, 3)
    assert pool.train_images[61, 4, 30].tolist() == [61, 62, 63]
    assert pool.train_labels.tolist() == [i % 10 for i in range(100)]
    assert pool.test_images[:, 31, 0, 2].tolist() == list(range(202, 222))
    assert pool.train_tracks is None


def test_rows_of_an_image_go_from_left_to_right_and_down(tmp_path: Path) -> None:
    planes = np.zeros((1, 3072), np.uint8)
    planes[0, [1, 32, 1024]] = (10, 20, 30)
    write_binary(tmp_path / "data_batch_1.bin", planes, [[0]])
    write_binary(tmp_path / "test_batch.bin", planes, [[0]])
    image = decode_batches(CIFAR10, tmp_path).train_images[0]
    assert (image[0, 1, 0], image[1, 0, 0], image[0, 0, 1]) == (10, 20, 30)


def test_python_batches_hold_the_same(tmp_path: Path, publish: Publish) -> None:
    pool = decode_batches(CIFAR10, _write_python(tmp_path / "cifar-10-batches-py", publish))
    assert pool.train_images[1, 9, 9].tolist() == [6, 7, 8]
    assert (pool.train_labels.tolist(), pool.test_labels.tolist()) == ([3, 1], [0])


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar100_is_labelled_finely(tmp_path: Path, form: str, publish: Publish) -> None:
    planes = flat_planes(0, 2)
    if form == "binary":
        for name in ("train.bin", "test.bin"):
            write_binary(tmp_path / name, planes, [[19, 99], [0, 40]])
    else:
        for name in ("train", "test"):
            publish(tmp_path / name, python2_batch(planes, [99, 40], b"fine_labels"))
    pool = decode_batches(CIFAR100, tmp_path)
    assert pool.train_labels.tolist() == pool.test_labels.tolist() == [99, 40]


def test_of_two_forms_the_one_with_more_batches_is_read(tmp_path: Path, publish: Publish) -> None:
    places = Places(tmp_path, tmp_path / "cache")
    _write_python(tmp_path / "cifar-10-batches-py", publish)
    assert open_pool(SOURCES["cifar10"], places)[0].train_labels.tolist() == [3, 1]
    write_cifar10(tmp_path)
    pool, key = open_pool(SOURCES["cifar10"], places)
    assert len(pool.train_labels) == 100
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    pool, other = open_pool(SOURCES["cifar10"], places)
    assert (len(pool.train_labels), key == other) == (60, False)


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with refuses(DataError, "cifar10"):
        open_pool(SOURCES["cifar10"], Places(tmp_path, tmp_path / "cache"))
    with refuses(DataError, "data.dir"):
        open_pool(SOURCES["cifar10"], Places(None, tmp_path / "cache"))
    folder = write_cifar10(tmp_path)
    (folder / "test_batch.bin").unlink()
    with refuses(DataError, "test_batch.bin"):
        open_pool(SOURCES["cifar10"], Places(tmp_path, tmp_path / "cache"))
    assert list_batches(CIFAR10, tmp_path / "none") == []
    assert list((tmp_path / "cache").glob("*")) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"\0" * 3072,
            [3072, 3073],
        ),
        (b"\0" * 3074, ["cifar10"]),
        (b"", [0]),
        (b"\0" * 3073 + b"\x0a" + b"\0" * 3072, [10, 1]),
    ],
)
def test_a_damaged_binary_batch_is_refused(
    tmp_path: Path, content: bytes, says: list[object]
) -> None:
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_2.bin").write_bytes(content)
    with refuses(DataError, *says) as caught:
        open_pool(SOURCES["cifar10"], Places(tmp_path, tmp_path / "cache"))
    assert "data_batch_2.bin" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").glob("*")) == []


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.folder),))


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)
def test_a_python_batch_that_was_not_published_is_refused_and_runs_nothing(
    layout: Layout, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    honest = python2_batch(flat_planes(0, 2), [3, 1], layout.label_key.encode())
    for content in (pickle.dumps({"labels": [1], "data": _Runs(made)}), honest, b""):
        for name in (layout.train[0], layout.test):
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="its MD5 differs"):
            decode_batches(layout, tmp_path)
        assert not made.exists()


def test_the_published_batches_are_those_of_both_sets() -> None:
    for layout in (CIFAR10, CIFAR100):
        digests = batches._published_digests(layout)
        assert digests.keys() == {*layout.train, layout.test}
        assert {len(digest) for digest in digests.values()} == {32}


@given(content=st.binary(max_size=40), repeat=st.integers(1, 200))
def test_any_bytes_are_a_batch_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, repeat: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    write_binary(folder / "test_batch.bin", flat_planes(0, 1), [[0]])
    (folder / "data_batch_1.bin").write_bytes(content * repeat)
    pool = read_or_refused(lambda: decode_batches(CIFAR10, folder))
    assert pool is None or pool.train_labels.max() < 10


def test_the_real_part_of_cifar10_has_the_published_figures(real_data: Path) -> None:
    source = SOURCES["cifar10"]
    pool, _ = open_pool(source, find_places(str(real_data), ""))
    assert (len(pool.train_labels), len(pool.test_labels)) == (10000, 1000)
    assert pool.train_labels[:5].tolist() == [6, 9, 9, 4, 1]  # a frog, lorries, a deer, a car
    pixels = pool.train_images[::4] / 255
    assert pixels.mean((0, 1, 2)).tolist() == pytest.approx(source.mean, abs=5e-3)
    assert pixels.std((0, 1, 2)).tolist() == pytest.approx(source.std, abs=5e-3)
