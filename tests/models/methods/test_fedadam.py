import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.fedadam import FedAdamSettings


class Halves(FedAdamSettings):
    """FedAdam whose first moment is easily followed by hand."""

    @property
    def mean_decay(self) -> float:
        """Half."""
        return 0.5


HALVES = Halves(beta2=0.5, tau=1.0, server_learning_rate=2.0)


def test_the_first_round_goes_by_the_equations_from_a_v_of_tau_squared() -> None:
    step, (m, v) = HALVES.step(np.array([3.0, 0.0]))
    np.testing.assert_allclose(m, [1.5, 0.0])  # 0.5 * 0 + 0.5 * 3
    np.testing.assert_allclose(v, [5.0, 0.5])  # 0.5 * 1 + 0.5 * 9
    np.testing.assert_allclose(step, [2 * 1.5 / (5**0.5 + 1), 0.0])


def test_the_second_round_goes_on_from_both_moments() -> None:
    step, (m, v) = HALVES.step(np.array([1.0]), np.array([[2.0], [17.0]]))
    np.testing.assert_allclose(m, [1.5])  # 0.5 * 2 + 0.5 * 1
    np.testing.assert_allclose(v, [9.0])  # 0.5 * 17 + 0.5 * 1
    np.testing.assert_allclose(step, [2 * 1.5 / (3 + 1)])


def test_a_small_tau_makes_steps_of_one_size_and_a_large_one_does_not() -> None:
    def ratio(tau: float) -> float:
        settings = FedAdamSettings(beta2=0.0, tau=tau)
        small, large = settings.step(np.array([0.01, 1.0]))[0]
        return float(large / small)

    assert ratio(1e-9) == pytest.approx(1)
    assert ratio(1e9) == pytest.approx(100)


def test_the_moments_have_the_shape_of_the_array_behind_two() -> None:
    for shape in ((), (3,), (2, 3)):
        step, moments = FedAdamSettings().step(np.ones(shape))
        assert (step.shape, moments.shape) == (shape, (2, *shape))


def test_the_defaults_are_the_papers_where_it_has_one() -> None:
    settings = FedAdamSettings()
    assert (settings.mean_decay, settings.beta2, settings.tau) == (0.9, 0.99, 1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fedadam.beta2": 1.0},
        {"fedadam.tau": 0.0},
        {"fedadam.server-learning-rate": 0.0},
    ],
)
def test_moments_that_forget_nothing_and_a_tau_of_nothing_are_refused(
    wrong: dict[str, float],
) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        build(FedAdamSettings, wrong)
