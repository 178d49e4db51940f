"""What image files say of themselves, without their pixels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsilo.datasets.images.decoding import ALL, BrokenImageError, header_measures, picture_header


def test_files_are_counted_by_width_height_and_depth(tmp_path: Path) -> None:
    Image.new("RGB", (100, 600)).save(tmp_path / "a.png")
    Image.new("L", (100, 50)).save(tmp_path / "b.jpg")
    Image.fromarray(np.zeros((300, 5000), np.uint16)).save(tmp_path / "c.tiff")
    (tmp_path / "d.png").write_bytes(b"no image")
    files = [tmp_path / name for name in ("a.png", "b.jpg", "c.tiff", "d.png", "e.png")]
    width, height, depth = header_measures(files, picture_header)
    assert width.counts(ALL) == [0, 2, *[0] * 8, 1]
    assert height.counts(ALL)[:5] == [1, 0, 0, 1, 1]
    assert depth.counts(ALL) == [0, 1, 1, 1, 0]


def test_what_is_no_image_says_so(tmp_path: Path) -> None:
    with pytest.raises(BrokenImageError, match="is missing"):
        picture_header(tmp_path / "none.png")
