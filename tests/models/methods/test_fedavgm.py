import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.fedavgm import FedAvgMSettings


def test_the_first_step_is_the_delta_and_the_second_has_momentum() -> None:
    settings = FedAvgMSettings(momentum=0.5, server_learning_rate=0.1)
    step, v = settings.step(np.array([2.0, -4.0]))
    np.testing.assert_allclose(v, [2.0, -4.0])
    np.testing.assert_allclose(step, [0.2, -0.4])
    step, v = settings.step(np.array([1.0, 1.0]), v)
    np.testing.assert_allclose(v, [2.0, -1.0])  # 0.5 * 2 + 1, 0.5 * -4 + 1
    np.testing.assert_allclose(step, [0.2, -0.1])


def test_without_momentum_at_rate_1_a_step_is_the_delta() -> None:
    settings = FedAvgMSettings(momentum=0.0)
    assert settings.step(3.0, 100.0) == (3.0, 3.0)


def test_the_defaults_are_the_papers() -> None:
    assert FedAvgMSettings() == FedAvgMSettings(momentum=0.9, server_learning_rate=1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"fedavgm.momentum": 1.0}, {"fedavgm.momentum": -0.1}, {"fedavgm.server-learning-rate": 0.0}],
)
def test_a_momentum_that_never_ends_and_a_rate_of_nothing_are_refused(
    wrong: dict[str, float],
) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        build(FedAvgMSettings, wrong)
