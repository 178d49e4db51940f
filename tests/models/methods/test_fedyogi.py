import numpy as np
import pytest

from fedsilo.models.methods.fedadam import FedAdagradSettings, FedYogiSettings


@pytest.mark.parametrize(
    ("delta", "v"),
    [(1.0, 2.0**2 - 0.25 * 1), (3.0, 2.0**2 + 0.25 * 9), (2.0, 2.0**2)],
    ids=["smaller", "larger", "equal"],
)
def test_yogis_v_moves_by_a_share_of_the_square_towards_it(delta: float, v: float) -> None:
    settings = FedYogiSettings(beta2=0.75, tau=2.0, server_learning_rate=3.0)
    step, moments = settings.step(np.float64(delta))
    assert moments.tolist() == pytest.approx([0.1 * delta, v])
    assert step == pytest.approx(3 * 0.1 * delta / (v**0.5 + 2))


def test_adagrads_v_is_the_sum_of_squares() -> None:
    settings = FedAdagradSettings(beta1=0.5, tau=2.0, server_learning_rate=3.0)
    _, moments = settings.step(np.float64(3))
    step, moments = settings.step(np.float64(1), moments)
    assert moments.tolist() == [0.5 * 1.5 + 0.5, 4 + 9 + 1]
    assert step == pytest.approx(3 * 1.25 / (14**0.5 + 2))


def test_adagrad_has_no_momentum_unless_one_is_set() -> None:
    settings = FedAdagradSettings(tau=1.0, server_learning_rate=2.0)
    _, moments = settings.step(np.float64(3))
    step, (m, v) = settings.step(np.float64(-2), moments)
    assert (m, v) == (-2, 1 + 9 + 4)  # of the first delta nothing is left in m
    assert step == pytest.approx(2 * -2 / (14**0.5 + 1))
