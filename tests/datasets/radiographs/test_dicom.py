import io
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from PIL import Image
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import Decoder
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)

from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.radiographs.dicom import is_dicom, read_dicom

LEVELS = np.array([[0, 1000], [2000, 4095]], dtype=np.uint16)
LOW_LEVELS = np.array([[0, 100], [200, 255]], dtype=np.uint8)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of a DICOM: pixels, 12 bits stored of 16, and changed or absent elements."""

    def made(
        pixels: npt.NDArray[Any] = LEVELS, syntax: str = ExplicitVRLittleEndian, **changes: Any
    ) -> Path:
        dataset = FileDataset("", {}, file_meta=FileMetaDataset(), preamble=b"\0" * 128)
        dataset.file_meta.TransferSyntaxUID = syntax
        dataset.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
        dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["fedsilo"])
        dataset.PatientName = "Meier^Anna"
        dataset.Rows, dataset.Columns = pixels.shape[-2:]
        dataset.SamplesPerPixel = 1
        dataset.PhotometricInterpretation = "MONOCHROME2"
        dataset.BitsAllocated = 8 * pixels.itemsize
        dataset.BitsStored = 12 if pixels.itemsize == 2 else 8
        dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
        dataset.PixelData = pixels.tobytes()
        for name, value in changes.items():
            if value is None:
                del dataset[name]
            else:
                setattr(dataset, name, value)
        dataset.HighBit = dataset.get("BitsStored", 1) - 1
        path = tmp_path / "Meier.dcm"
        dataset.save_as(path, implicit_vr=False, little_endian=True, enforce_file_format=True)
        return path

    return made


def lookup(entries: list[int], first: int, depth: int) -> list[Dataset]:
    item = Dataset()
    item.LUTDescriptor = [len(entries), first, depth]
    item.LUTData = np.array(entries, dtype="<u2").tobytes()
    return [item]


def reason(path: Path, bits: int = 16) -> str:
    with pytest.raises(BrokenImageError) as caught:
        read_dicom(path, bits)
    assert "Meier" not in str(caught.value)
    return str(caught.value)


def test_a_dicom_is_known_by_its_ending_or_its_content(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write()
    plain = path.rename(tmp_path / "IM0001")
    assert is_dicom(plain)
    assert is_dicom(tmp_path / "not-there.DCM")
    plain.write_bytes(b"\x89PNG" + bytes(200))
    assert not is_dicom(plain)
    plain.write_bytes(b"short")
    assert not is_dicom(plain)
    assert not is_dicom(tmp_path / "not-there.png")
    assert not is_dicom(tmp_path)


def test_without_a_window_the_range_of_the_stored_bits_is_shown(
    write: Callable[..., Path],
) -> None:
    found = read_dicom(write(), 16)
    assert found.dtype == np.float32
    assert found == pytest.approx(LEVELS / 4095)
    assert read_dicom(write(), 12) == pytest.approx(LEVELS / 4095)
    whole = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = read_dicom(write(whole, BitsStored=16), 16)
    assert (np.rint(found * np.float32(65535)) == whole).all(), "every level survives"
    assert read_dicom(write(LOW_LEVELS), 8) == pytest.approx(LOW_LEVELS / 255)


def test_monochrome1_is_inverted(write: Callable[..., Path]) -> None:
    found = read_dicom(write(PhotometricInterpretation="MONOCHROME1"), 16)
    assert found == pytest.approx(1 - LEVELS / 4095)
    windowed = {"WindowCenter": 1500.5, "WindowWidth": 1001}
    found = read_dicom(write(PhotometricInterpretation="MONOCHROME1", **windowed), 16)
    assert found == pytest.approx(np.array([[1, 1], [0, 0]]))


def test_the_first_window_is_applied(write: Callable[..., Path]) -> None:
    # Linear: centre - 0.5 = 2000 is the middle of 1000 to 3000
    found = read_dicom(write(WindowCenter=[2000.5, 9], WindowWidth=[2001, 9]), 16)
    assert found == pytest.approx(np.array([[0, 0], [0.5, 1]]))
    sigmoid = {"WindowCenter": 2000, "WindowWidth": 1000, "VOILUTFunction": "SIGMOID"}
    expected = 1 / (1 + np.exp(-4 * (LEVELS.astype(float) - 2000) / 1000))
    assert read_dicom(write(**sigmoid), 16) == pytest.approx(expected)
    assert read_dicom(write(WindowCenter=1000), 16) == pytest.approx(LEVELS / 4095), "no width"


def test_a_window_is_meant_in_rescaled_values(write: Callable[..., Path]) -> None:
    rescaled = {"RescaleSlope": 2, "RescaleIntercept": -100}
    assert read_dicom(write(**rescaled), 16) == pytest.approx(LEVELS / 4095)
    found = read_dicom(write(WindowCenter=3900.5, WindowWidth=4001, **rescaled), 16)
    assert found == pytest.approx(np.array([[0, 0], [0.5, 1]]))  # 1900 to 5900; 3900 is 2000


def test_signed_pixels_start_at_their_least_value(write: Callable[..., Path]) -> None:
    signed = np.array([[-2048, 0], [1000, 2047]], dtype=np.int16)
    assert read_dicom(write(signed), 16) == pytest.approx((signed + 2048) / 4095)


@pytest.mark.parametrize("rescaled", [{}, {"RescaleSlope": 1, "RescaleIntercept": 0}])
@pytest.mark.parametrize(("depth", "top"), [(8, 255), (10, 1023), (16, 65535)])
def test_a_lookup_table_goes_before_a_window(
    write: Callable[..., Path], depth: int, top: int, rescaled: dict[str, int]
) -> None:
    entries = (np.arange(4096) ** 2 / 4095**2 * top).astype(int)
    table = lookup(entries.tolist(), 0, depth)
    found = read_dicom(write(VOILUTSequence=table, WindowCenter=1, WindowWidth=2, **rescaled), 16)
    assert found == pytest.approx(entries[LEVELS] / top)


def test_a_lookup_table_holds_its_ends_beyond_itself(write: Callable[..., Path]) -> None:
    found = read_dicom(write(VOILUTSequence=lookup([100, 200, 255], 1000, 8)), 16)
    assert found * 255 == pytest.approx(np.array([[100, 100], [255, 255]]))


def test_a_modality_lookup_table_is_applied_first(write: Callable[..., Path]) -> None:
    entries = (np.arange(4096) // 16).tolist()
    found = read_dicom(write(ModalityLUTSequence=lookup(entries, 0, 8)), 16)
    assert found * 255 == pytest.approx(LEVELS // 16)


def test_padding_is_black(write: Callable[..., Path]) -> None:
    inverted = {"PhotometricInterpretation": "MONOCHROME1"}
    found = read_dicom(write(PixelPaddingValue=0, **inverted), 16)
    assert found == pytest.approx(np.where(LEVELS == 0, 0, 1 - LEVELS / 4095))
    ranged = {"PixelPaddingValue": 4095, "PixelPaddingRangeLimit": 2000}
    assert read_dicom(write(**ranged), 16) == pytest.approx(
        np.where(LEVELS < 2000, LEVELS, 0) / 4095
    )


def test_a_lossless_compression_that_pydicom_knows_is_read(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    from pydicom import dcmread

    dataset = dcmread(write())
    dataset.compress(RLELossless)
    dataset.save_as(tmp_path / "rle.dcm")
    assert read_dicom(tmp_path / "rle.dcm", 16) == pytest.approx(LEVELS / 4095)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"PixelData": None}, "is a DICOM without pixel data"),
        ({"Rows": None}, "is a DICOM that lacks Rows"),
        ({"SamplesPerPixel": 3}, "is not grey: it must be MONOCHROME1 or MONOCHROME2"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "is not grey"),
        ({"PhotometricInterpretation": None}, "is not grey"),
        ({"NumberOfFrames": 12}, "has 12 frames: save one image per file"),
        ({"BitsAllocated": 32}, "has 32 bits a pixel, but 16 are declared"),
        ({"PixelData": b"ab"}, "has pixel data that are truncated or damaged"),
        ({"WindowCenter": 5, "WindowWidth": 0}, "has a rescaling, window or lookup table"),
        ({"WindowCenter": 5, "WindowWidth": 9, "VOILUTFunction": "OTHER"}, "has a rescaling"),
        ({"VOILUTSequence": lookup([1, 2], 0, 32)}, "has a rescaling, window or lookup table"),
        ({"RescaleSlope": -1, "RescaleIntercept": 9}, "has a rescaling, window or lookup table"),
        ({"RescaleSlope": 0, "RescaleIntercept": 9}, "has a rescaling, window or lookup table"),
    ],
)
def test_what_is_no_single_grey_image_is_refused_with_its_reason(
    write: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    assert reason(write(**changes)).startswith(said)


def test_another_depth_than_the_declared_one_is_refused(write: Callable[..., Path]) -> None:
    assert reason(write(LOW_LEVELS)) == "has 8 bits a pixel, but 16 are declared"
    assert reason(write(), 8) == "has 16 bits a pixel, but 8 are declared"
    said = "has values above 1023, but 10 bits a pixel are declared"
    assert reason(write(), 10) == said


def test_a_compression_that_cannot_be_decoded_is_refused_by_its_name(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "is_available", property(lambda _: False))  # no plugin
    path = write(syntax=JPEGLosslessSV1, PixelData=encapsulate([b"abcd"]))
    assert reason(path).startswith("is compressed (JPEG Lossless, Non-Hierarchical")
    path = write(syntax="1.2.3.4.5.6.7", PixelData=encapsulate([b"abcd"]))
    assert reason(path) == "is a DICOM of an unknown transfer syntax: save it uncompressed"


def test_compressed_pixels_that_are_damaged_are_refused(write: Callable[..., Path]) -> None:
    path = write(syntax=RLELossless, PixelData=encapsulate([b"abcd"]))
    assert reason(path) == "has pixel data that are truncated or damaged"


OTHER_SIZE = "has pixel data of another size than its header says"
TOO_LARGE = "has more than 89478485 pixels, by its header: save it smaller"


@budget(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    itemsize=st.sampled_from([1, 2]),
    held=st.integers(0, 9 * 9 * 2 * 3),
)
def test_pixels_are_held_against_the_header(
    write: Callable[..., Path], shape: tuple[int, int], itemsize: int, held: int
) -> None:
    declared = shape[0] * shape[1] * itemsize
    depth = {"BitsAllocated": 8 * itemsize, "BitsStored": 8 * itemsize}
    held += held % 2  # as every element's length is even
    sizes = {"Rows": shape[0], "Columns": shape[1], "PixelData": bytes(held)}
    path = write(**sizes, **depth)
    if held == declared + declared % 2 or declared <= held < 2 * declared:  # with padding
        assert read_dicom(path, 8 * itemsize).shape == shape
    else:
        damaged = "has pixel data that are truncated or damaged"
        assert reason(path, 8 * itemsize) == (damaged if held < declared else OTHER_SIZE)


def test_padding_after_the_pixels_is_cut_off(write: Callable[..., Path]) -> None:
    plain = read_dicom(write(), 16)
    padded = read_dicom(write(PixelData=LEVELS.tobytes() + bytes(2)), 16)
    np.testing.assert_array_equal(padded, plain)


def test_more_than_padding_after_the_pixels_is_refused(write: Callable[..., Path]) -> None:
    assert reason(write(PixelData=LEVELS.tobytes() + b"\1\2")) == OTHER_SIZE


@pytest.mark.parametrize("frames", [2, 3, 10])
def test_whole_frames_beyond_the_header_are_refused(
    write: Callable[..., Path], frames: int
) -> None:
    assert reason(write(PixelData=LEVELS.tobytes() * frames)) == OTHER_SIZE


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        (0, 2, "has no pixels, by its header"),
        (2, 0, "has no pixels, by its header"),
        (1, 2, OTHER_SIZE),
        (65535, 65535, TOO_LARGE),
        (65535, 1366, TOO_LARGE),
        (65535, 1365, "has pixel data that are truncated or damaged"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(
    write: Callable[..., Path], rows: int, columns: int, said: str
) -> None:
    path = write(Rows=rows, Columns=columns)
    reason(write(Rows=1, Columns=1))  # imports what it needs
    path = write(Rows=rows, Columns=columns)
    tracemalloc.start()
    assert reason(path) == said
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("syntax", "form"), [(JPEGBaseline8Bit, "JPEG"), (JPEG2000Lossless, "JPEG2000")]
)
def test_a_compressed_picture_of_another_size_than_the_header_is_refused(
    write: Callable[..., Path], syntax: str, form: str
) -> None:
    def compressed(height: int, width: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.zeros((height, width), np.uint8)).save(file, form, no_jp2=True)
        return encapsulate([file.getvalue()])

    low = np.zeros((20, 30), np.uint8)
    found = read_dicom(write(low, syntax, PixelData=compressed(20, 30)), 8)
    assert found.shape == (20, 30)
    for height, width in ((30, 20), (20, 31), (40, 30), (4000, 4000)):
        path = write(low, syntax, PixelData=compressed(height, width))
        assert reason(path, 8) == OTHER_SIZE


def test_run_lengths_of_another_size_than_the_header_are_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    from pydicom import dcmread

    dataset = dcmread(write(np.zeros((8, 8), np.uint16)))
    dataset.compress(RLELossless)
    for rows in (1, 4, 9, 16):
        dataset.Rows = rows
        dataset.save_as(tmp_path / "rle.dcm")
        assert reason(tmp_path / "rle.dcm") == "has pixel data that are truncated or damaged"


def test_a_file_that_is_deflated_as_a_whole_is_refused_before_it_is_inflated(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    from pydicom import dcmread

    dataset = dcmread(write())
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.save_as(tmp_path / "deflated.dcm")
    said = "is deflated: save it uncompressed"
    assert reason(tmp_path / "deflated.dcm") == said


def test_files_that_are_no_dicom_are_told_without_their_name(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    assert reason(tmp_path / "Meier.dcm") == "is missing"
    os.mkfifo(tmp_path / "pipe.dcm")
    assert reason(tmp_path / "pipe.dcm") == "is not a file"
    path = write()
    path.write_bytes(path.read_bytes()[:-5])
    assert reason(path) == "has pixel data that are truncated or damaged"
    path.write_bytes(path.read_bytes()[:200])
    assert "DICOM" in reason(path) or "truncated" in reason(path)
    path.write_text("no image")
    assert reason(path) == "is not a DICOM file"
    path.unlink()
    path.mkdir()
    assert reason(path).startswith("cannot be read: ")


@pytest.mark.filterwarnings("ignore")
def test_a_file_damaged_anywhere_is_read_or_refused_and_raises_nothing_else(
    write: Callable[..., Path],
) -> None:
    tables = {"VOILUTSequence": lookup([1, 2, 3], 5, 16), "PixelPaddingValue": 0}
    path = write(WindowCenter="5", WindowWidth="9", NumberOfFrames="1", **tables)
    whole, draw = path.read_bytes(), np.random.default_rng(0)
    reasons: set[str] = set()
    for _ in range(400):
        damaged = bytearray(whole)
        for place in draw.integers(128, len(whole), draw.integers(1, 4)):
            damaged[place] = draw.integers(256)
        path.write_bytes(bytes(damaged[: draw.integers(130, 2 * len(whole))]))
        try:
            assert np.isfinite(read_dicom(path, 16)).all()
        except BrokenImageError as error:
            reasons.add(str(error))
    assert len(reasons) > 5
    assert not any("Meier" in reason for reason in reasons)


def test_pydicom_is_imported_only_when_a_dicom_is_met() -> None:
    code = (
        "import sys, datasets.radiographs.dicom, datasets.radiographs.mammography\n"
        "assert not [m for m in sys.modules if m.startswith('pydicom')]"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
