"""Decode DICOM radiographs as they are displayed: lookup table or first window, black background.

pydicom is imported only when a DICOM is read. Errors have fixed texts and never quote pydicom's,
because a DICOM header is full of the patient's data.
"""

from __future__ import annotations

import math
import struct
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.files.text_files import file_fault
from fedsilo.datasets.images.decoding import (
    BrokenImageError,
    ImageHeader,
    check_file,
    check_pixels,
    picture_header,
    read_fault,
)
from fedsilo.datasets.radiographs.radiograph_decoding import check_depth, read_grey
from fedsilo.datasets.radiographs.vendor_profiles import Grey

if TYPE_CHECKING:
    from pydicom import FileDataset

_PREAMBLE, _MAGIC = 128, b"DICM"
_GREY = ("MONOCHROME1", "MONOCHROME2")  # in the first one 0 is white
_DAMAGED = "has pixel data that are truncated or damaged"
_OTHER_SIZE = "has pixel data of another size than its header says"
# Start of pydicom's warning that it cuts off pixels beyond the header's size
_SURPLUS = "The decoded RLE segment contains"
# First bytes of compressed pictures: JPEG and JPEG-LS (ITU T.81, T.87), JPEG 2000 and HTJ2K (T.800)
_JPEG, _JPEG_2000 = b"\xff\xd8", b"\xff\x4f\xff\x51"
_BOXED = b"\0\0\0\x0cjP  "  # JPEG 2000 as a file of its own, which DICOM does not mean to hold
_FRAME_STARTS = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD8)}
_ENDS = {0xD9, 0xDA}  # markers for the end of the image and of the header
_NEEDED = ("Rows", "Columns", "BitsAllocated", "BitsStored", "PixelRepresentation")


def is_dicom(path: Path) -> bool:
    """Tell whether a file is a DICOM, by its ending '.dcm' in any case, or else by its first bytes.

    A file with another ending is read for this. If it is missing or cannot be read, the answer is
    False. Decoding the file later reports the reason.
    """
    if path.suffix.lower() == ".dcm":
        return True
    try:
        if file_fault(path):
            return False
        with path.open("rb") as file:
            return file.read(_PREAMBLE + len(_MAGIC))[_PREAMBLE:] == _MAGIC
    except OSError:
        return False  # reported when it is decoded


def read_radiograph(path: Path, bits: int) -> Grey:
    """Read a grey radiograph: a DICOM file with ``read_dicom``, any other file with ``read_grey``.

    Args:
        path: the file.
        bits: the bits per pixel that the user declares, 8 to 16.

    Returns:
        The picture, (height, width), float32, from 0 (black) to 1 (white).

    Raises:
        BrokenImageError: the file is missing or damaged, is not a single grey image of the declared
            depth, or is a DICOM that cannot be decoded on this machine.
    """
    if is_dicom(path):
        return read_dicom(path, bits)
    return read_grey(path, bits)


def read_dicom(path: Path, bits: int) -> Grey:
    """Decode a DICOM's picture to (height, width), float32, from 0 (black) to 1 (white).

    The picture looks as in a viewer. The header's lookup tables, or its rescaling and first window,
    convert the stored values to brightness. Without table and window, the whole range of the stored
    bits is shown. A picture in which high values are dark (MONOCHROME1) is inverted. Padding pixels
    become black.

    Args:
        path: the file.
        bits: the bits per pixel that the user declares, 8 to 16.

    Raises:
        BrokenImageError: the file is missing or damaged, is not a single grey frame of the declared
            depth, has another size than its header says, or has a compression that cannot be
            decoded on this machine.
    """
    try:
        return _read(path, bits)
    except (BrokenImageError, MemoryError):
        raise
    except Exception:  # pydicom reads an element on access, and raises nearly anything
        raise BrokenImageError("has a header that is damaged") from None


def radiograph_header(path: Path) -> ImageHeader:
    """Read width, height and bits per pixel of a DICOM or an image file without decoding pixels.

    The bits of a DICOM are those that a pixel takes in the file (8 or 16), not those in use. The
    bits of an image file are those of all channels together.

    Raises:
        BrokenImageError: the file is missing or damaged, is neither a DICOM nor an image, or its
            header lacks width, height or bits.
    """
    if not is_dicom(path):
        return picture_header(path)
    dataset = _read_header(path, pixels=False)
    try:
        return ImageHeader(int(dataset.Columns), int(dataset.Rows), int(dataset.BitsAllocated))
    except Exception:  # an element that is missing, or is not a number
        raise BrokenImageError("is a DICOM without a size") from None


def _read(path: Path, bits: int) -> Grey:
    """Check a DICOM file, and decode it to (height, width), float32, from 0 (black) to 1 (white).

    The header and the amount of data are checked before the stored values are decoded. The values
    are then converted to the brightness that a viewer shows. A picture in which high values are
    dark (MONOCHROME1) is inverted. Padding pixels become 0.

    ``bits`` is the declared number of bits per pixel. The header's stored bits must not exceed it.
    The header's allocated bits must be 8 if ``bits`` is 8, and 16 otherwise.

    Raises:
        BrokenImageError: the file is missing, is not a grey DICOM with one frame, does not fit
            ``bits``, cannot be decoded here, or has a rescaling, window or lookup table that cannot
            be applied.
        Exception: the header is damaged. ``read_dicom`` turns any such error into a
            ``BrokenImageError``.
    """
    dataset = _read_header(path)
    _check_kind(dataset, bits)
    raw = _decode_pixels(dataset)
    try:
        picture = _apply_display(dataset, raw)
    except Exception:  # a damaged table may lead to any error
        picture = np.full(1, np.nan)
    if not np.isfinite(picture).all():
        raise BrokenImageError("has a rescaling, window or lookup table that cannot be applied")
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        picture = 1 - picture
    # After the inversion, because padding is to be black in both kinds of grey
    picture[_find_padding(dataset, raw)] = 0
    return picture.astype(np.float32)


def _read_header(path: Path, pixels: bool = True) -> FileDataset:
    """Read a DICOM file with pydicom, without decoding its pixels.

    Args:
        path: the file.
        pixels: whether to load the encoded pixel data too. Readers of the header alone do not need
            them.

    Raises:
        BrokenImageError: the file is missing, damaged, not a DICOM, or deflated (compressed as a
            whole).
    """
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError
    from pydicom.filereader import read_file_meta_info
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    check_file(path)
    try:
        # A small file of that kind can hold any number of bytes, which pydicom inflates at once
        if read_file_meta_info(path).get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
            raise BrokenImageError("is deflated: save it uncompressed")
        return dcmread(path, stop_before_pixels=not pixels)
    except (BrokenImageError, MemoryError):
        raise
    except InvalidDicomError:
        fault = "is not a DICOM file"
    except Exception as error:  # damaged files raise nearly anything
        fault = read_fault(error)
    raise BrokenImageError(fault)


def _check_kind(dataset: FileDataset, bits: int) -> None:
    """Check that a DICOM is one grey image of ``bits`` bits per pixel that can be decoded here.

    Only the header is checked.

    Raises:
        BrokenImageError: the DICOM has colours, several frames or another depth, has no pixels or
            more than 89 million, lacks a needed value in its header, or is compressed in a way that
            cannot be decoded on this machine.
    """
    fault = _kind_fault(dataset) or _syntax_fault(dataset)
    if fault:
        raise BrokenImageError(fault)
    check_depth(dataset.BitsAllocated, 2**dataset.BitsStored - 1, bits)
    check_pixels(dataset.Rows, dataset.Columns)


def _kind_fault(dataset: FileDataset) -> str:
    """Explain why a DICOM file is not a single grey image, or return '' if it is one.

    The header must state the height, the width, the allocated and the stored bits per pixel, and
    whether pixel values have a sign. The file must have pixel data, in a single frame with a single
    grey channel.
    """
    if "PixelData" not in dataset:
        return "is a DICOM without pixel data"
    for key in _NEEDED:
        if dataset.get(key) is None:
            return f"is a DICOM that lacks {key}"
    is_grey = dataset.get("PhotometricInterpretation") in _GREY
    if not is_grey or dataset.get("SamplesPerPixel", 1) != 1:
        return f"is not grey: it must be {' or '.join(_GREY)}"
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames != 1:
        return f"has {frames} frames: save one image per file"
    return ""


def _syntax_fault(dataset: FileDataset) -> str:
    """Explain why a DICOM's compression cannot be decoded here, or return '' if it can be.

    The installed plugins of pydicom decide which compressions can be decoded. The pixel data are
    not read.
    """
    from pydicom.pixels.decoders.base import get_decoder

    syntax = dataset.file_meta.get("TransferSyntaxUID")
    if syntax is None:
        return "is a DICOM file without a transfer syntax"
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        return "is a DICOM of an unknown transfer syntax: save it uncompressed"
    if not decoder.is_available:
        return (
            f"is compressed ({syntax.name}), which cannot be decoded here: save it uncompressed, "
            "or install pydicom's plugin for it"
        )
    return ""


def _decode_pixels(dataset: FileDataset) -> npt.NDArray[Any]:
    """Decode the stored values of a DICOM, (height, width), before any rescaling.

    Raises:
        BrokenImageError: the data are damaged, or do not have as many values as the height and
            width in the header require.
    """
    shape = (dataset.Rows, dataset.Columns)
    try:
        _check_amount(dataset, shape)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", _SURPLUS, UserWarning)
            raw: npt.NDArray[Any] = dataset.pixel_array
    except BrokenImageError:
        raise
    except Exception:  # decoders raise nearly anything on damaged files
        raise BrokenImageError(_DAMAGED) from None
    if raw.shape != shape:
        raise BrokenImageError(_OTHER_SIZE)
    return raw


def _check_amount(dataset: FileDataset, shape: tuple[int, int]) -> None:
    """Check, before decoding, that the amount of pixel data fits the size in the header.

    - Uncompressed data must have the expected number of bytes. Surplus bytes at the end are removed
      from ``dataset`` if they all have the same value. There must be fewer of them than of the
      expected bytes.
    - Compressed data have a header whose size must be ``shape``. RLE data have no such header, and
      are not checked here.

    Raises:
        BrokenImageError: there are too few bytes, the surplus is not padding, or compressed data
            state another size.
    """
    from pydicom.encaps import generate_frames
    from pydicom.uid import RLELossless

    content = dataset.PixelData
    syntax = dataset.file_meta.TransferSyntaxUID
    fault = ""
    if not syntax.is_encapsulated:
        # Uncompressed pixels take height x width x bytes per pixel
        expected = math.prod(shape) * dataset.BitsAllocated // 8
        if len(content) < expected:
            fault = _DAMAGED
        surplus = content[expected:]
        if len(surplus) > expected % 2:  # an element has an even length
            # Older scanners pad the pixels, which readers should accept (DICOM PS3.5, 8.1.1).
            # Anything but a few equal bytes means that the header's size is wrong
            if len(surplus) >= expected or len(set(surplus)) > 1:
                fault = _OTHER_SIZE
            dataset.PixelData = content[: expected + expected % 2]
    elif syntax != RLELossless:
        # RLE does not state its size; pydicom's warning is caught when it is decoded
        frame = next(generate_frames(content, number_of_frames=1))
        if declared_shape(frame) != shape:
            fault = _OTHER_SIZE
    if fault:
        raise BrokenImageError(fault)


def declared_shape(content: bytes) -> tuple[int, int] | None:
    """Read (height, width) from the first bytes of a JPEG, JPEG-LS or JPEG 2000 picture.

    The first header in the bytes that states a size is used, and nothing is decoded. The result is
    None if the bytes are of another format or end before this header does.
    """
    try:
        if content.startswith(_JPEG):
            return _jpeg_shape(content)
        start = 0
        if content.startswith(_BOXED):
            start = content.find(_JPEG_2000)  # -1 if the boxes hold no picture
        if start >= 0 and content.startswith(_JPEG_2000, start):
            right, bottom, left, top = struct.unpack_from(">4I", content, start + 8)
            return bottom - top, right - left
    except (struct.error, IndexError):  # it is cut short
        pass
    return None


def _jpeg_shape(content: bytes) -> tuple[int, int] | None:
    """Find the frame header of a JPEG, and return (height, width) from it.

    The result is None if the image data or the end of the picture come before a frame header, or if
    a segment is malformed.

    Raises:
        IndexError: the content ends before a frame header.
        struct.error: the content ends within a header.
    """
    # A segment is 0xFF, a marker and, for most markers, a length of 2 bytes that includes itself
    place = len(_JPEG)
    while content[place] == 0xFF:
        marker = content[place + 1]
        if marker in _ENDS:
            return None
        if marker in _FRAME_STARTS:
            height, width = struct.unpack_from(">2H", content, place + 5)
            return height, width
        if marker == 0xFF:
            # Fill bytes: a marker may be preceded by any number of 0xFF
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + struct.unpack_from(">H", content, place + 2)[0]
    return None


def _apply_display(dataset: FileDataset, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert a DICOM's stored values to the brightness that a viewer shows, from 0 to 1.

    The first step (modality) applies a lookup table, or a slope and an intercept. The second step
    (values of interest, VOI) applies a lookup table, or stretches the range of the first window to
    the whole brightness. Without both, the range that the stored bits allow is stretched. Results
    outside 0..1 are clipped.

    Args:
        dataset: the DICOM. The descriptor of its VOI table may be changed.
        raw: the stored values, (height, width).

    Raises:
        ValueError: the header rescales by a slope that is not above 0.
        Exception: any other error, if a table is damaged.
    """
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

    # Without a VOI table or window the whole range of the stored bits is shown, not the range of
    # the values in this picture: a picture's grey must not depend on its own extremes
    low, high = _modality_range(dataset)
    values = apply_modality_lut(raw, dataset)
    if dataset.get("VOILUTSequence"):
        table = dataset.VOILUTSequence[0]
        entries, first, depth = table.LUTDescriptor
        low, high = 0, 2**depth - 1
        # If a table has 8 bits, pydicom stores the places in 8 bits too, which are too few for most
        if depth == 8:
            table.LUTDescriptor = [entries, first, 16]
        values = np.rint(values).astype(np.int64)
    shown = apply_voi_lut(values, dataset).astype(np.float64)
    stretched: npt.NDArray[Any] = ((shown - low) / (high - low)).clip(0, 1)
    return stretched


def _modality_range(dataset: FileDataset) -> tuple[float, float]:
    """Compute the smallest and the largest value that a DICOM may have after the modality step.

    The modality step converts stored values to the scanner's unit, by a lookup table or by a slope
    and an intercept. Only the header is read:

    - With a lookup table of d bits per entry, the range is 0 to 2^d - 1.
    - Otherwise b stored bits give 0 to 2^b - 1, or -2^(b-1) to 2^(b-1) - 1 if the values are
      signed. If the header has slope and intercept, they are applied to both ends.

    Raises:
        ValueError: there is no table, and the header has an intercept and a slope that is not above
            0.
    """
    if dataset.get("ModalityLUTSequence"):
        return 0, 2 ** dataset.ModalityLUTSequence[0].LUTDescriptor[2] - 1
    levels = 2**dataset.BitsStored
    low = 0
    if dataset.PixelRepresentation:  # the values are signed
        low = -levels // 2
    high = low + levels - 1
    slope = dataset.get("RescaleSlope")
    intercept = dataset.get("RescaleIntercept")
    if slope is None or intercept is None:
        return low, high
    if slope <= 0:
        raise ValueError("pydicom's windows turn round on such a slope")
    return low * slope + intercept, high * slope + intercept


def _find_padding(dataset: FileDataset, raw: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Find the padding pixels, which fill a DICOM's picture outside the image.

    The header may state a padding value, and a limit that makes it a range. A pixel is padding if
    its stored value equals the padding value or lies in the range, both ends included. Without a
    padding value in the header, no pixel is padding.

    Returns:
        A bool mask (height, width), True for padding.
    """
    value = dataset.get("PixelPaddingValue")
    if value is None:
        return np.zeros(raw.shape, dtype=bool)
    # The limit may be above or below the value; without a limit only the value is padding
    ends = value, dataset.get("PixelPaddingRangeLimit", value)
    padded: npt.NDArray[np.bool_] = (raw >= min(ends)) & (raw <= max(ends))
    return padded
