from collections.abc import Callable

import numpy as np

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedadam import FedAdamSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavgm import FedAvgM
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import state_after


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
