"""The size that a compressed picture says it has, read from its first bytes and nothing decoded.

JPEG and JPEG-LS (ITU T.81, T.87) say it in the segment that starts their frame, JPEG 2000 and
HTJ2K (ITU T.800) in their segment SIZ.
"""

from __future__ import annotations

import struct

_JPEG, _JPEG_2000 = b"\xff\xd8", b"\xff\x4f\xff\x51"
_BOXED = b"\0\0\0\x0cjP  "  # JPEG 2000 as a file of its own, which DICOM does not mean to hold
_FRAME_STARTS = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD8)}
_ENDS = {0xD9, 0xDA}  # of the image, of the header


def declared_shape(content: bytes) -> tuple[int, int] | None:
    """Return (height, width) as a compressed picture says; None if it does not say any."""
    try:
        if content.startswith(_JPEG):
            return _of_jpeg(content)
        start = content.find(_JPEG_2000) if content.startswith(_BOXED) else 0
        if start >= 0 and content.startswith(_JPEG_2000, start):
            right, bottom, left, top = struct.unpack_from(">4I", content, start + 8)
            return bottom - top, right - left
    except (struct.error, IndexError):  # it is cut short
        pass
    return None


def _of_jpeg(content: bytes) -> tuple[int, int] | None:
    place = len(_JPEG)
    while content[place] == 0xFF:
        marker = content[place + 1]
        if marker in _ENDS:
            return None
        if marker in _FRAME_STARTS:
            height, width = struct.unpack_from(">2H", content, place + 5)
            return height, width
        if marker == 0xFF:  # of two such bytes the first only fills
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + struct.unpack_from(">H", content, place + 2)[0]
    return None
