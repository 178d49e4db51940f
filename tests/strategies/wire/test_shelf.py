"""Replies on the shelf are what came, wherever they lie, and nothing of them is left behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.strategies.wire.shelf import Shelf


def _content(*arrays: Any) -> RecordDict:
    record = ArrayRecord({f"a{n}": Array(np.asarray(a)) for n, a in enumerate(arrays)})
    return RecordDict({"arrays": record, "metrics": MetricRecord({"n": 3}), "c": ConfigRecord()})


@pytest.mark.parametrize("in_memory", [0, 2**20])
def test_what_is_kept_is_read_as_it_came(in_memory: int, tmp_path: Path) -> None:
    arrays = [np.arange(n, dtype=np.float32).reshape(n, 1) for n in (0, 1, 3000)]
    with Shelf(str(tmp_path), in_memory) as shelf:
        contents = [_content(*arrays, site) for site in range(3)]
        kept = [shelf.keep(content) for content in contents]
        for site, (content, found) in enumerate(zip(contents, kept, strict=True)):
            assert found["metrics"] == content["metrics"]
            for name, array in found.array_records["arrays"].items():
                came = content.array_records["arrays"][name]
                assert (array.dtype, array.shape, array.stype) == (
                    *(came.dtype, came.shape, came.stype),
                )
                assert array.data == came.data
                np.testing.assert_array_equal(array.numpy(), came.numpy())
            assert found.array_records["arrays"]["a3"].numpy() == site
        assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_what_fits_stays_in_memory_and_the_rest_does_not() -> None:
    with Shelf(in_memory=5000) as shelf:
        content = _content(np.zeros(1000, np.float32))
        first, second = shelf.keep(content), shelf.keep(content)
    assert first.array_records["arrays"]["a0"].numpy().size == 1000
    with pytest.raises(ValueError, match="closed"):
        second.array_records["arrays"]["a0"].numpy()


def test_the_records_of_a_reply_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower gathers them anew at each look: a reply of two thousand would take minutes."""
    looks, gathered = [], RecordDict.array_records

    def look(content: RecordDict) -> Any:
        looks.append(content)
        return gathered.fget(content)  # type: ignore[attr-defined]  # mypy takes it for its value

    monkeypatch.setattr(RecordDict, "array_records", property(look))
    content = RecordDict({f"r{n}": ArrayRecord({"a": Array(np.zeros(9))}) for n in range(30)})
    with Shelf(in_memory=0) as shelf:
        kept = shelf.keep(content)
        assert len(looks) == 1
        assert list(kept) == list(content)


def test_a_full_disk_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with Shelf(str(tmp_path), 0) as shelf, pytest.raises(RunDirectoryError) as told:
        shelf.keep(_content(1.0))
    assert str(told.value) == (
        f"the replies of a phase cannot be kept in {tmp_path} (No space left on device): make "
        "room there and resume"
    )
