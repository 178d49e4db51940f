"""Settings in every form in which they come, mutated; see ``tests/fuzz/driver.py``."""

from pathlib import Path

import pytest

from tests.fuzz.configs import kinds
from tests.fuzz.driver import Kind, check


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_no_settings_harm_who_reads_them(kind: Kind, tmp_path: Path) -> None:
    check(kind, tmp_path)
