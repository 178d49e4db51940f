"""GTSRB's folders and CSVs, hand-made and the real ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.datasets.shifted.pools import open_pool
from fedsilo.datasets.shifted.signs import decode_signs, list_signs
from fedsilo.datasets.shifted.sources import SOURCES
from tests.support.colour import ppm, read_or_refused, write_gtsrb
from tests.support.errors import refuses

GTSRB = SOURCES["gtsrb"]
CLASS = Path("Final_Training") / "Images" / "00001"
CSV = CLASS / "GT-00001.csv"
TEST_CSV = Path("Final_Test") / "GT-final_test.csv"


def test_images_become_32_pixels_wide_and_high_with_their_class_and_track(tmp_path: Path) -> None:
    pool = decode_signs(write_gtsrb(tmp_path))
    assert pool.train_images.shape == (60, 32, 32, 3)
    assert pool.test_images.shape == (12, 32, 32, 3)
    assert pool.train_images[:, 9, 9, 0].tolist() == pool.train_labels.tolist()
    assert pool.test_images[:, 0, 31, 0].tolist() == pool.test_labels.tolist()
    assert not pool.train_images[..., 1:].any()
    assert pool.train_tracks is not None
    # Fifteen tracks of four frames, each of one class
    assert np.bincount(pool.train_tracks).tolist() == [4] * 15
    of_track = {(int(t), int(y)) for t, y in zip(pool.train_tracks, pool.train_labels, strict=True)}
    assert len(of_track) == 15


def test_the_whole_image_is_resized_whatever_its_shape(tmp_path: Path) -> None:
    root = write_gtsrb(tmp_path, classes=2, tracks=2, frames=1)
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 32:, 2] = 200  # the right half is blue
    for place in (0, 1):
        (root / CLASS / f"{place:05d}_00000.ppm").write_bytes(ppm(wide))
    pool = decode_signs(root)
    image = pool.train_images[pool.train_labels == 1][0]
    assert (image[:, :15, 2].max(), image[:, 17:, 2].min()) == (0, 200)


def test_the_order_is_shuffled_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = (decode_signs(write_gtsrb(tmp_path / name)) for name in ("one", "two"))
    assert first.train_labels.tolist() != sorted(first.train_labels.tolist())
    assert first.test_labels.tolist() != [i % 3 for i in range(12)]
    assert np.array_equal(first.train_images, second.train_images)
    assert np.array_equal(first.test_labels, second.test_labels)


def test_the_csv_of_the_test_classes_may_lie_beside_the_images(tmp_path: Path) -> None:
    root = write_gtsrb(tmp_path)
    (root / TEST_CSV).rename(root / "Final_Test" / "Images" / TEST_CSV.name)
    assert len(decode_signs(root).test_labels) == 12


def test_images_that_come_or_go_are_noticed(tmp_path: Path) -> None:
    root = write_gtsrb(tmp_path)
    before = list_signs(root)
    assert before == list_signs(root)
    (root / CLASS / "00009_00000.ppm").write_bytes(b"")
    assert list_signs(root) != before
    assert list_signs(tmp_path / "none") == []


def _edit(old: str, new: str, csv: Path = CSV) -> Callable[[Path], object]:
    def edit(root: Path) -> None:
        text = (root / csv).read_text()
        assert old in text
        (root / csv).write_text(text.replace(old, new))

    return edit


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda root: (root / CSV).unlink(), r"00001 has no GT-00001.csv, which names its images"),
    (lambda root: (root / TEST_CSV).unlink(), r"has no Final_Test/GT-final_test.csv, which"),
    (
        lambda root: (root / CLASS / "00000_00002.ppm").unlink(),
        r"GT-00001.csv, line 4: '00000_00002.ppm' is not in .*00001: put the image there",
    ),
    (_edit("00000_00001.ppm", "../00000/00000_00001.ppm"), r"line 3: '../00000/0.* is not in"),
    (_edit("00000_00001.ppm", "00000_00000.ppm"), r"line 3: '00000_00000.ppm' appears twice"),
    (_edit(";1\n", ";2\n"), r"line 2: ClassId must be 1, .* but is 2"),
    (_edit(";2\n", ";43\n", TEST_CSV), r"line 4: ClassId '43' is out of range 0..42"),
    (_edit(";2\n", ";-2\n", TEST_CSV), r"ClassId '-2' is out of range"),
    (_edit(";ClassId", "", TEST_CSV), r"line 1: the columns must be Filename, ClassId: missing"),
    (_edit(";24;20;", ";24;", CSV), r"line 2: 7 values, but line 1 names 8 columns"),
    (
        lambda root: (root / CSV).write_text("Filename;ClassId\n"),
        r"GT-00001.csv names no image",
    ),
    (
        lambda root: (root / CLASS / "00000_00002.ppm").write_bytes(
            ppm(np.zeros((9, 9), np.uint8))
        ),
        r"line 4: .*00000_00002.ppm is of mode L, but must be in colour",
    ),
    (
        lambda root: (root / CLASS / "00000_00002.ppm").write_bytes(b"P6\n9 9\n255\n123"),
        r"00000_00002.ppm is truncated or damaged: replace the image",
    ),
    (
        lambda root: (root / CLASS / "00000_00002.ppm").write_bytes(b"P6\n99999 99999\n255\n1"),
        r"00000_00002.ppm has more than \d+ pixels",
    ),
    (
        lambda root: (root / CLASS / "00000_00002.ppm").write_bytes(b"GIF89a"),
        r"is not an image \(PPM",
    ),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_a_damaged_folder_is_refused_in_a_line_and_leaves_nothing(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(write_gtsrb(tmp_path))
    with pytest.raises(DataError, match=says) as caught:
        open_pool(GTSRB, Places(tmp_path, tmp_path / "cache"))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").glob("*")) == []


def test_a_folder_without_any_class_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "GTSRB").mkdir()
    with refuses(DataError, "gtsrb"):
        open_pool(GTSRB, Places(tmp_path, tmp_path / "cache"))


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gtsrb(tmp_path_factory.mktemp("signs"), classes=2, tracks=2, frames=2)


@given(data=st.data())
def test_an_altered_csv_is_read_or_refused_and_nothing_else(
    signs: Path, data: st.DataObject
) -> None:
    path, whole = signs / CSV, (signs / CSV).read_bytes()
    places = st.integers(0, len(whole) - 1)
    changes = data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=3))
    content = bytearray(whole)
    for place, value in changes:
        content[place] = value
    path.write_bytes(bytes(content))
    pool = read_or_refused(lambda: decode_signs(signs))
    path.write_bytes(whole)
    assert pool is None or len(pool.train_labels) <= 8


@pytest.mark.soak
def test_the_real_half_of_gtsrb_has_all_classes_and_tracks(real_data: Path) -> None:
    pool, _ = open_pool(GTSRB, find_places(str(real_data), ""))
    assert (pool.train_images.shape, len(pool.test_labels)) == ((19605, 32, 32, 3), 4500)
    assert len(np.unique(pool.train_labels)) == len(np.unique(pool.test_labels)) == 43
    assert pool.train_tracks is not None
    assert len(np.unique(pool.train_tracks)) == 1307
    pixels = pool.train_images[::4] / 255
    assert pixels.mean((0, 1, 2)).tolist() == pytest.approx(GTSRB.mean, abs=5e-3)
    assert pixels.std((0, 1, 2)).tolist() == pytest.approx(GTSRB.std, abs=5e-3)
