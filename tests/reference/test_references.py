"""Twenty rounds of each method end with the weights of a loop written from its paper."""

from pathlib import Path

import pytest

from tests.reference.cases import CASES
from tests.reference.harness import Case, compare


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_all_weights_are_the_references(case: Case, tmp_path: Path) -> None:
    assert compare(case, tmp_path).deviation < 1e-5
