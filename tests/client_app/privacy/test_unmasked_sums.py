"""The hospital's record of secret sums: a part and zeros never meet for the same arrays."""

from pathlib import Path

import pytest

from fedsilo.client_app.privacy.unmasked_sums import SummedBefore
from fedsilo.core.errors import RefusedError, SiteError


def test_a_part_and_zeros_are_never_masked_for_the_same_arrays(tmp_path: Path) -> None:
    """Two runs at once may both pass the checks before the data are opened."""
    record = SummedBefore(tmp_path, "terms")
    record.note_part("answered", failed=False)
    record.note_part("answered", failed=False)
    with pytest.raises(RefusedError):
        record.note_part("answered", failed=True)
    record.note_part("failed", failed=True)
    record.note_part("failed", failed=True)
    with pytest.raises(SiteError):
        record.note_part("failed", failed=False)
    assert (record.has_failed("answered"), record.has_failed("failed")) == (False, True)


def test_a_sum_that_was_unmasked_counts_as_answered(tmp_path: Path) -> None:
    record = SummedBefore(tmp_path, "terms")
    record.note("arrays", ["a", "b"], failed=False)
    with pytest.raises(RefusedError):
        record.note_part("arrays", failed=True)
    record.refuse_other_sites("arrays", ["a", "b"])
    record.note_part("arrays", failed=False)
    with pytest.raises(RefusedError):
        SummedBefore(tmp_path, "terms").refuse_other_sites("arrays", ["a"])
