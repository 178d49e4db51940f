import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fedsilo.core.errors import DataError
from fedsilo.datasets.images.decoding import (
    BrokenImageError,
    Decoded,
    Fault,
    check_faults,
    decode_each,
    decode_image,
    describe,
    shades_of_grey,
)


def saved(path: Path, pixels: npt.NDArray[np.uint8]) -> Path:
    """Save (height, width[, 3]) pixels in the form of the path's suffix."""
    Image.fromarray(pixels).save(path)
    return path


def decoded(folder: Path, names: list[str]) -> Decoded:
    return decode_each(names, (3, 16, 16), np.uint8, lambda name: decode_image(folder / name, 16))


def noise(height: int, width: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)


def reason(path: Path) -> str:
    with pytest.raises(BrokenImageError) as caught:
        decode_image(path, 16)
    return str(caught.value)


def test_an_image_of_the_right_size_is_read_pixel_by_pixel(tmp_path: Path) -> None:
    pixels = noise(16, 16)
    found = decode_image(saved(tmp_path / "a.png", pixels), 16)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert (found == pixels.transpose(2, 0, 1)).all()


@pytest.mark.parametrize("tall", [False, True])
def test_the_middle_of_the_longer_side_is_kept(tmp_path: Path, tall: bool) -> None:
    # Every pixel tells its place on the longer side: of 40 the middle are 12 to 27
    pixels = np.repeat(np.arange(40, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    if tall:
        pixels = pixels.transpose(1, 0, 2)
    found = decode_image(saved(tmp_path / "a.png", pixels), 16)
    line = found[1, :, 5] if tall else found[1, 5]
    assert line.tolist() == list(range(12, 28))


def test_a_finer_image_is_averaged_and_not_sampled(tmp_path: Path) -> None:
    chequers = np.indices((64, 64)).sum(axis=0) % 2 * np.uint8(200)
    found = decode_image(saved(tmp_path / "a.png", chequers.astype(np.uint8)), 16)
    assert found.shape == (3, 16, 16)
    assert abs(found[:, 2:-2, 2:-2].astype(int) - 100).max() <= 2


def test_a_smaller_image_is_enlarged(tmp_path: Path) -> None:
    pixels = np.full((4, 5, 3), (9, 80, 200), dtype=np.uint8)
    found = decode_image(saved(tmp_path / "a.png", pixels), 16)
    assert found.reshape(3, -1).T.tolist() == [[9, 80, 200]] * 256


def test_grey_and_palette_images_become_rgb(tmp_path: Path) -> None:
    grey = noise(16, 16)[..., 0]
    assert (decode_image(saved(tmp_path / "a.png", grey), 16) == grey).all()
    Image.fromarray(grey).convert("P").save(tmp_path / "b.png")
    assert (decode_image(tmp_path / "b.png", 16) == grey).all()


def test_a_large_jpeg_is_decoded_as_its_whole_would_be(tmp_path: Path) -> None:
    # The decoder could halve it (330 x 220) thrice; at an eighth the details would be lost
    soft = Image.fromarray(noise(20, 30)).resize((660, 440), Image.Resampling.BICUBIC)
    soft.save(tmp_path / "a.jpg", quality=95)
    soft.save(tmp_path / "a.png")
    small, whole = (decode_image(tmp_path / name, 64).astype(int) for name in ("a.jpg", "a.png"))
    assert abs(small - whole).mean() < 2


def test_an_image_is_turned_upright_as_its_exif_says(tmp_path: Path) -> None:
    pixels = noise(16, 16)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    upright = np.rot90(pixels, -1).transpose(2, 0, 1)
    assert (decode_image(tmp_path / "a.png", 16) == upright).all()


@pytest.mark.parametrize("form", ["jpg", "png", "bmp", "tiff", "webp"])
def test_a_file_cut_short_is_broken_in_every_form(tmp_path: Path, form: str) -> None:
    path = saved(tmp_path / f"a.{form}", noise(64, 64))
    content = path.read_bytes()
    assert decode_image(path, 16).shape == (3, 16, 16)
    path.write_bytes(content[: len(content) // 2])
    assert reason(path).startswith(("is truncated or damaged", "is not an image (JPEG, PNG"))


def test_files_that_are_no_images_are_told_without_their_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    assert reason(path) == "is missing"
    for content in (b"", b"patient Smith", b"\xff\xd8\xff patient Smith"):
        path.write_bytes(content)
        assert "Smith" not in reason(path)
        assert str(tmp_path) not in reason(path)
    path.unlink()
    path.mkdir()
    assert reason(path) == "cannot be read: Is a directory"


def test_a_form_for_which_pillow_starts_another_program_is_refused(tmp_path: Path) -> None:
    Image.fromarray(noise(16, 16)).save(tmp_path / "a.eps")
    assert reason(tmp_path / "a.eps") == "is not an image (JPEG, PNG, TIFF, BMP, WEBP)"


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_an_image_of_more_than_8_bits_is_refused_not_clipped(tmp_path: Path, kind: type) -> None:
    Image.fromarray(np.full((16, 16), 1000, dtype=kind)).save(tmp_path / "a.tiff")
    assert reason(tmp_path / "a.tiff") == "has more than 8 bits per channel: save it with 8"


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_colours_of_16_bits_are_refused_not_cut_to_their_upper_8(
    tmp_path: Path, kind: int, channels: int
) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    header = struct.pack(">IIBBBBB", 16, 16, 16, kind, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x0f\xa0" * 16 * channels) * 16)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    assert reason(tmp_path / "a.png") == "has more than 8 bits per channel: save it with 8"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(30000, 2983), (2**16, 2**16)])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    # One row more than Pillow's bound, which only warns up to twice as many; nothing is decoded
    path = saved(tmp_path / "a.png", noise(16, 16))
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">2I", shape[1], shape[0])
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    tracemalloc.start()
    assert reason(path) == "has more than 89478485 pixels, by its header: save it smaller"
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_shades_of_grey_by_hand() -> None:
    # Every power mean of a constant is that constant: (40, 80, 80) has the quadratic mean
    # sqrt((1600 + 6400 + 6400) / 3) = 69.28
    pixels = np.broadcast_to(np.array([40, 80, 80], np.uint8)[:, None, None], (3, 2, 2))
    assert shades_of_grey(pixels).reshape(3, 4).tolist() == [[69] * 4] * 3
    # One bright pixel: (v^6 / 4)^(1/6) = 0.7937 v, so (100, 50, 50) has the means 79.4, 39.7, 39.7
    # of quadratic mean 56.1: gains 0.7071 and 1.4142
    spot = np.zeros((3, 2, 2), np.uint8)
    spot[:, 0, 0] = 100, 50, 50
    assert shades_of_grey(spot)[:, 0, 0].tolist() == [71, 71, 71]


def test_shades_of_grey_leaves_grey_light_alone_and_clips() -> None:
    grey = np.repeat(noise(8, 8)[..., 0][None], 3, axis=0)
    assert (shades_of_grey(grey) == grey).all()
    assert not shades_of_grey(np.zeros((3, 2, 2), np.uint8)).any()
    # Means 255, 9 / 64^(1/6) = 4.5 and 0, their quadratic mean 147: green's gain is 33
    flat = np.zeros((3, 8, 8), np.uint8)
    flat[0] = 255
    flat[1, 0, 0] = 9
    assert shades_of_grey(flat)[1, 0, 0] == 255
    assert not shades_of_grey(flat)[2].any()


def test_colour_constancy_takes_a_cast_away(tmp_path: Path) -> None:
    pixels = noise(32, 32) // 2
    cast = (pixels * [1.8, 1.0, 0.6]).astype(np.uint8)
    path = saved(tmp_path / "a.png", cast)
    plain, corrected = (decode_image(path, 16, constancy) for constancy in (False, True))
    assert np.ptp(plain.mean(axis=(1, 2))) > 40
    assert np.ptp(corrected.mean(axis=(1, 2))) < 5
    assert (corrected == shades_of_grey(plain)).all()


def test_files_are_decoded_in_order_and_those_that_are_broken_left_out(tmp_path: Path) -> None:
    for level in (10, 30):
        saved(tmp_path / f"{level}.png", np.full((16, 16), level, np.uint8))
    (tmp_path / "20.png").write_bytes(b"no")
    found = decoded(tmp_path, ["10.png", "20.png", "30.png", "40.png"])
    assert found.images.shape == (2, 3, 16, 16)
    assert found.images[:, 0, 0, 0].tolist() == [10, 30]
    assert found.kept.tolist() == [0, 2]
    assert [fault.name for fault in found.faults] == ["20.png", "40.png"]
    assert found.faults[1].reason == "is missing"


def test_no_files_are_no_images(tmp_path: Path) -> None:
    found = decoded(tmp_path, [])
    assert found.images.shape == (0, 3, 16, 16)
    assert len(found.kept) == len(found.faults) == 0


def test_faults_are_counted_and_the_first_five_told_with_the_way_on(own_log: io.StringIO) -> None:
    faults = [Fault(f"{number}.jpg", "is missing") for number in range(7)]
    told = {fault.name: fault.name for fault in faults}
    with pytest.raises(DataError) as caught:
        check_faults(faults, 90, told, "refuse", "north")
    assert str(caught.value) == (
        "north: 7 of 90 images cannot be used: 0.jpg is missing; 1.jpg is missing; 2.jpg is "
        "missing; 3.jpg is missing; 4.jpg is missing; and 2 more: fix them, or set "
        "'data.broken-images' to 'skip'"
    )
    with pytest.raises(DataError, match=r"4\.jpg is missing: fix them"):
        check_faults(faults[:5], 90, told, "refuse", "north")
    check_faults(faults, 90, told, "skip", "north")
    check_faults([], 90, told, "refuse", "north")
    assert not own_log.getvalue(), "the error names the files itself"


def test_a_name_that_an_error_keeps_back_stands_in_this_machines_own_log(
    own_log: io.StringIO,
) -> None:
    faults = [Fault(f"smith-{number}.jpg", "is missing") for number in range(7)]
    told = {fault.name: f"line {2 + place}" for place, fault in enumerate(faults)}
    with pytest.raises(DataError) as caught:
        check_faults(faults, 90, told, "refuse", "north")
    said = str(caught.value)
    assert said.startswith("north: 7 of 90 images cannot be used: line 2 is missing; line 3 is")
    assert "smith" not in said
    (logged,) = own_log.getvalue().splitlines()
    assert logged.startswith("fedsilo: north: line 2 is smith-0.jpg, line 3 is smith-1.jpg, ")
    assert logged.endswith("line 6 is smith-4.jpg and 2 more")
    check_faults(faults, 90, told, "skip", "north")
    assert len(own_log.getvalue().splitlines()) == 1


def test_many_names_are_told_by_the_first() -> None:
    assert describe(["a", "b"]) == "a, b"
    assert describe(list(range(9))) == "0, 1, 2, 3, 4 and 4 more"


def test_a_damaged_png_chunk_is_no_crash(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(noise(32, 32)).save(stream, "png")
    content = stream.getvalue()
    reasons = set()
    for place in range(8, len(content), 97):
        (tmp_path / "a.png").write_bytes(content[:place] + b"\0\0\0\0" + content[place + 4 :])
        try:
            decode_image(tmp_path / "a.png", 16)
        except BrokenImageError as error:
            reasons.add(str(error))
    assert reasons
    assert reasons <= {
        "is truncated or damaged",
        "is not an image (JPEG, PNG, TIFF, BMP, WEBP)",
        "has more than 89478485 pixels, by its header: save it smaller",
    }
