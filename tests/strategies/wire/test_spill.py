"""Spilled arrays are what they were, wherever they are, and nothing of them is left behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.strategies.wire.spill import Spill


@pytest.mark.parametrize("in_memory", [0, 2**20])
def test_kept_arrays_are_read_as_they_were(in_memory: int, tmp_path: Path) -> None:
    spill = Spill(str(tmp_path), in_memory)
    arrays = {f"a{n}": np.arange(n, dtype=np.float32).reshape(n, 1) for n in (0, 1, 3000)}
    arrays |= {"scalar": np.float64(2.5) * np.ones(()), "words": np.uint32([[1, 2], [3, 4]])}
    arrays["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    sites = [spill.keep(arrays | {"site": np.float32([site])}) for site in range(3)]
    for site, kept in enumerate(sites):
        assert list(kept) == [*arrays, "site"]
        assert kept["site"] == site
        for name, array in arrays.items():
            assert (kept[name].dtype, kept[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(kept[name], array)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    spill.close()


def test_what_fits_stays_in_memory_and_the_rest_does_not() -> None:
    spill = Spill(in_memory=5000)
    arrays = {"a": np.zeros(1000, np.float32)}
    first, second = spill.keep(arrays), spill.keep(arrays)
    spill.close()
    assert first["a"].size == 1000
    with pytest.raises(ValueError, match="closed"):
        second["a"]


def test_a_full_disk_is_reported_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(RunDirectoryError) as told:
        Spill(str(tmp_path), 0).keep({"a": np.ones(1)})
    assert str(told.value) == (
        f"the replies of a round cannot be kept in {tmp_path} (No space left on device): make "
        "room there and resume"
    )
