import math

import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.feddistill import FedDistillSettings


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_no_weight_at_all_would_be_local_and_is_refused(weight: float) -> None:
    with pytest.raises(SettingError, match=r"'feddistill.logit-weight' must be above 0"):
        build(FedDistillSettings, {"feddistill.logit-weight": weight})


def test_the_weight_is_one_unless_it_is_set() -> None:
    assert build(FedDistillSettings, {}).logit_weight == 1.0


def test_ten_samples_are_behind_a_mean_unless_it_is_set_and_never_none() -> None:
    assert build(FedDistillSettings, {}).class_min_count == 10
    with pytest.raises(SettingError, match=r"'feddistill.class-min-count' must be at least 1"):
        build(FedDistillSettings, {"feddistill.class-min-count": 0})
