import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.pacing import batch_of, begins_epoch, check_pace, ends_epoch, epoch_of
from tests.support.errors import refuses

PAPER = CommonSettings(epoch_steps=120, pace=40)


def test_three_rounds_of_the_papers_pace_make_an_epoch() -> None:
    assert [epoch_of(r, PAPER) for r in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert [begins_epoch(r, PAPER) for r in range(1, 5)] == [True, False, False, True]
    assert [ends_epoch(r, PAPER) for r in range(1, 5)] == [False, False, True, False]


@pytest.mark.parametrize(("samples", "size"), [(1460, 12), (410, 3), (239, 2), (3, 2)])
def test_a_batch_is_the_samples_over_the_steps_and_at_least_two(samples: int, size: int) -> None:
    assert batch_of(samples, PAPER) == size


def test_a_pace_that_does_not_divide_the_epoch_is_refused_with_those_that_do() -> None:
    with refuses(SettingError, "pace", "50", "1", "2", "3", "40", "60", "120"):
        check_pace(CommonSettings(epoch_steps=120, pace=50))


@pytest.mark.parametrize("key", ["local_epochs", "local_steps", "batch_size"])
def test_what_epochs_across_rounds_leave_without_meaning_is_refused(key: str) -> None:
    changed = CommonSettings(epoch_steps=120, **{key: 7})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=key.replace("_", "-")):
        check_pace(changed)


def test_a_pace_without_an_epoch_and_a_micro_batch_of_one_are_refused() -> None:
    with refuses(SettingError, "pace"):
        check_pace(CommonSettings(pace=10))
    with refuses(SettingError, "train.micro-batch", "1"):
        check_pace(CommonSettings(micro_batch=1))
    check_pace(CommonSettings())
