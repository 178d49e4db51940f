import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedsilo.datasets.radiographs.dicom import declared_shape

FRAME = struct.pack(">BHHB", 8, 20, 30, 1)  # depth, height, width, components


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True, "comment": b"x" * 999}),
        ("JPEG2000", {"no_jp2": True}),
        ("JPEG2000", {}),
    ],
)
def test_the_shape_is_the_one_that_a_decoder_finds(form: str, told: dict[str, object]) -> None:
    file = io.BytesIO()
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(file, form, **told)
    assert declared_shape(file.getvalue()) == (20, 30)


@pytest.mark.parametrize("marker", [0xC0, 0xC1, 0xC3, 0xF7])  # 0xC3: lossless; 0xF7: JPEG-LS
def test_every_kind_of_frame_is_known_and_fill_bytes_are_passed_over(marker: int) -> None:
    segment = b"\xff\xff\xff" + bytes([marker]) + struct.pack(">H", 8) + FRAME
    table = b"\xff\xc4" + struct.pack(">H", 4) + b"\xff\xc0"  # holds what looks like a frame
    assert declared_shape(b"\xff\xd8\xff\x01" + table + segment) == (20, 30)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xd8", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xc0\0", b"RIFF", b"\xffO\xffQ"],
)
def test_what_says_no_shape_has_none(content: bytes) -> None:
    assert declared_shape(content) is None


@given(st.sampled_from([b"\xff\xd8", b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  "]), st.binary())
def test_any_bytes_are_read_without_an_error(start: bytes, rest: bytes) -> None:
    shape = declared_shape(start + rest)
    assert shape is None or len(shape) == 2
