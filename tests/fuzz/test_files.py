"""Data folders and caches with one file mutated; see ``tests/fuzz/driver.py``."""

from pathlib import Path

import pytest

from tests.fuzz.driver import Kind, check
from tests.fuzz.files import kinds


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_no_file_harms_who_reads_it(kind: Kind, tmp_path: Path) -> None:
    check(kind, tmp_path)
