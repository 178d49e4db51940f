"""Tests of the method 'fedadam': equations and server."""

from collections.abc import Callable

import numpy as np
import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.models.methods.fedadam import FedAdagradSettings, FedAdamSettings, FedYogiSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavgm import FedAvgM
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import state_after

# The equations


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


# The equations


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


# At the server


def test_two_rounds_of_two_sites_and_one_weight_go_by_the_equations(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    settings = FedAdamSettings(beta2=0.75, tau=2.0, server_learning_rate=3.0)
    server = FedAvgM(CommonSettings(silos=3), settings, participants)

    def after(state: State, one: float, three: float) -> State:
        replies = {
            site: site_reply(site, {"w": np.float32([value])}, num_examples=count)
            for site, value, count in (("s1a", one, 1), ("s2a", three, 3))
        }
        return state_after(server, state, replies)

    first = after(State({"w": np.float32([1])}), 2.0, 6.0)
    # the mean is 5, delta 4, beta_1 0.9; m = 0.1 * 4, v = 0.75 * 2 ** 2 + 0.25 * 4 ** 2
    np.testing.assert_allclose(first.arrays["moments/w"], [[0.4], [7.0]], rtol=1e-7)
    weight = np.float32(1 + 3 * 0.4 / (7**0.5 + 2))
    np.testing.assert_allclose(first.arrays["w"], [weight], rtol=1e-7)

    second = after(first, 2.0, 6.0)
    delta = 5 - float(weight)
    m, v = 0.9 * 0.4 + 0.1 * delta, 0.75 * 7 + 0.25 * delta**2
    np.testing.assert_allclose(second.arrays["moments/w"], [[m], [v]], rtol=1e-6)
    np.testing.assert_allclose(second.arrays["w"], [weight + 3 * m / (v**0.5 + 2)], rtol=1e-6)
    assert {array.dtype for array in second.arrays.values()} == {np.dtype(np.float32)}


def test_batch_norms_running_variance_is_averaged_and_so_never_below_zero(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    server = FedAvgM(CommonSettings(silos=3), FedAdamSettings(), participants)
    name = "norm.running_var"
    state = State({name: np.float32([1e-3])})
    reply = site_reply("s1a", {name: np.float32([1e-4])})
    assert state_after(server, state, {"s1a": reply}).arrays == {name: np.float32([1e-4])}
