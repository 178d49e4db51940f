from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.radiographs.radiograph_decoding import as_int16, fit_square, read_grey, resize

Pixels = npt.NDArray[Any]
ALL_LEVELS = np.random.default_rng(0).permutation(65536).astype(np.uint16).reshape(256, 256)


def grey(values: Any) -> Pixels:
    return np.array(values, dtype=np.float32)


def reason(call: Callable[[], Any]) -> str:
    with pytest.raises(BrokenImageError) as caught:
        call()
    return str(caught.value)


def test_empty_rows_and_columns_at_the_edges_are_cut_off() -> None:
    picture = np.zeros((6, 7), dtype=np.float32)
    picture[1:4, 2:5] = [[0.1, 0.2, 0.3], [0, 0, 0], [0.4, 0.5, 1]]  # an empty row within stays
    assert fit_square(picture, 3) == pytest.approx(picture[1:4, 2:5])


def test_a_narrow_picture_is_padded_on_the_right_and_a_wide_one_below() -> None:
    narrow = grey([[1, 2], [3, 4], [5, 6], [7, 8]]) / 8
    expected = np.full((4, 4), 1 / 8)
    expected[:, :2] = narrow
    assert fit_square(np.pad(narrow, ((0, 0), (0, 3)), constant_values=1 / 8), 4) == pytest.approx(
        expected
    )
    wide = narrow[::-1].T
    fitted = fit_square(np.concatenate([wide, wide]), 4)
    assert fitted == pytest.approx(np.concatenate([wide, wide]))
    fitted = fit_square(wide, 4)
    assert fitted[:2] == pytest.approx(wide)
    assert (fitted[2:] == np.float32(1 / 8)).all()


def test_air_up_to_a_256th_of_the_span_is_empty() -> None:
    dark = [[10, 10, 10, 10], [11, 10, 11, 10]]  # of a span of 256, so that 11 is still air
    picture = grey([*dark, [11, 266, 12, 11], [11, 12, 10, 11], *dark])
    assert fit_square(picture, 2).tolist() == [[266, 12], [12, 10]]


def test_a_picture_is_resized_to_the_height_with_its_aspect() -> None:
    ones = np.ones((8, 4), dtype=np.float32)
    ones[:, 1] = 0.5
    fitted = fit_square(np.pad(ones, ((0, 0), (0, 9))), 4)
    assert fitted[:, 2:] == pytest.approx(np.zeros((4, 2)))
    assert (fitted[:, :2] > 0.5).all()
    assert fit_square(np.eye(5, dtype=np.float32), 40).shape == (40, 40)


def test_resizing_is_antialiased() -> None:
    stripes = np.tile(grey([0, 1]), (64, 32))
    assert resize(stripes, 8, 8)[:, 1:-1] == pytest.approx(np.full((8, 6), 0.5), abs=0.02)


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(2, 12), st.integers(2, 12)),
        elements=st.floats(0, 1, width=32),
    ),
    st.integers(16, 40),
    st.tuples(*[st.integers(0, 5)] * 4),
)
def test_a_picture_fits_its_square_wherever_it_lay_in_the_dark(
    picture: Pixels, size: int, edges: tuple[int, int, int, int]
) -> None:
    picture = picture.copy()
    picture[0, 0], picture[-1, -1], picture[0, -1] = 1, 1, 0.5
    top, bottom, left, right = edges
    padded = np.pad(picture, ((top + 1, bottom + 1), (left, right)))
    fitted = fit_square(padded, size)
    assert fitted.shape == (size, size)
    assert 0 <= fitted.min() < fitted.max() <= 1
    assert (fitted == fit_square(np.pad(picture, 1), size)).all()


@pytest.mark.parametrize("level", [0, 0.5, 1])
def test_an_empty_picture_is_refused(level: float) -> None:
    picture = np.full((5, 5), level, dtype=np.float32)
    assert reason(lambda: fit_square(picture, 4)) == "is empty: all its pixels are equal"


def test_a_picture_of_a_single_bright_point_is_refused() -> None:
    picture = np.zeros((5, 5), dtype=np.float32)
    picture[2, 2] = 1
    assert "but for its edges" in reason(lambda: fit_square(picture, 4))


def test_every_16_bit_level_survives_exactly(tmp_path: Path) -> None:
    path = tmp_path / "levels.png"
    Image.fromarray(ALL_LEVELS).save(path)
    made = as_int16(fit_square(read_grey(path, 16), 256))
    assert made.dtype == np.int16
    assert (made.astype(int) + 32768 == ALL_LEVELS).all()


@pytest.mark.parametrize(("bits", "step"), [(8, 257), (10, 65535 / 1023), (12, 65535 / 4095)])
def test_levels_of_other_depths_span_the_same_range(tmp_path: Path, bits: int, step: float) -> None:
    values = np.linspace(0, 2**bits - 1, 64).round().astype(np.uint8 if bits == 8 else np.uint16)
    Image.fromarray(values.reshape(8, 8)).save(tmp_path / "a.png")
    made = as_int16(read_grey(tmp_path / "a.png", bits)).ravel().astype(int) + 32768
    assert (made == np.rint(values.astype(float) * step)).all()


@pytest.mark.parametrize(
    ("kind", "ending"),
    [*((k, e) for k in (np.uint8, np.uint16) for e in ("png", "tif")), (np.int32, "tif")],
)
def test_grey_png_and_tiff_are_read_alike(tmp_path: Path, kind: Any, ending: str) -> None:
    values = np.array([[0, 5], [100, 255]], dtype=kind)
    Image.fromarray(values).save(tmp_path / f"a.{ending}")
    top = 255 if kind is np.uint8 else 65535
    found = read_grey(tmp_path / f"a.{ending}", 8 if kind is np.uint8 else 16)
    assert found == pytest.approx(values / top)


def test_a_tiff_whose_zero_is_white_is_inverted(tmp_path: Path) -> None:
    stored = np.array([[0, 5], [100, 65535]], dtype=np.uint16)
    Image.fromarray(stored).save(tmp_path / "16.tif", tiffinfo={262: 0})  # written as it is
    found = read_grey(tmp_path / "16.tif", 16)
    assert (np.rint(found * 65535) == 65535 - stored.astype(int)).all()
    shown = np.array([[0, 5], [100, 250]], dtype=np.uint8)
    Image.fromarray(shown).save(tmp_path / "8.tif", tiffinfo={262: 0})
    assert (tmp_path / "8.tif").read_bytes().endswith(bytes(255 - shown.ravel()))
    assert read_grey(tmp_path / "8.tif", 8) == pytest.approx(shown / 255)


@pytest.mark.parametrize(
    ("kind", "largest", "bits", "said"),
    [
        (np.uint8, 255, 16, "has 8 bits a pixel, but 16 are declared"),
        (np.uint8, 255, 12, "has 8 bits a pixel, but 12 are declared"),
        (np.uint16, 255, 8, "has 16 bits a pixel, but 8 are declared"),
        (np.uint16, 4096, 12, "has values above 4095, but 12 bits a pixel are declared"),
        (np.int32, 65536, 16, "has values that need more than 16 bits a pixel"),
    ],
)
def test_another_depth_than_the_declared_one_is_refused(
    tmp_path: Path, kind: Any, largest: int, bits: int, said: str
) -> None:
    path = tmp_path / "Meier.tif"
    Image.fromarray(np.array([[0, largest]], dtype=kind)).save(path)
    assert reason(lambda: read_grey(path, bits)) == said


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "LA", "1"])
def test_an_image_that_is_not_grey_is_refused(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (4, 4)).save(tmp_path / "Meier.png")
    said = f"is not grey of 8 or 16 bits (it has Pillow's mode {mode}): convert it"
    assert reason(lambda: read_grey(tmp_path / "Meier.png", 8)) == said


def test_an_image_of_several_pages_is_refused(tmp_path: Path) -> None:
    page = Image.new("L", (4, 4))
    page.save(tmp_path / "a.tif", save_all=True, append_images=[page])
    assert (
        reason(lambda: read_grey(tmp_path / "a.tif", 8)) == "has 2 pages: save one image per file"
    )


def test_files_that_cannot_be_decoded_are_told_without_their_name(tmp_path: Path) -> None:
    path = tmp_path / "Meier.png"
    assert reason(lambda: read_grey(path, 16)) == "is missing"
    path.write_text("no image")
    assert reason(lambda: read_grey(path, 16)) == "is not an image (PNG, TIFF)"
    Image.fromarray(ALL_LEVELS).save(path)
    path.write_bytes(path.read_bytes()[:300])
    assert reason(lambda: read_grey(path, 16)) == "is truncated or damaged"
    Image.new("RGB", (8, 8)).save(tmp_path / "Meier.jpg")
    assert reason(lambda: read_grey(tmp_path / "Meier.jpg", 8)) == "is not an image (PNG, TIFF)"
