"""What a site answers, mutated, against the whole server; see ``tests/fuzz/driver.py``."""

from pathlib import Path

import pytest

from tests.fuzz.driver import Kind, check
from tests.fuzz.replies import kinds


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_no_answer_of_a_site_harms_the_server(kind: Kind, tmp_path: Path) -> None:
    check(kind, tmp_path)
