from collections.abc import Callable

import numpy as np

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.feddyn import FedDynSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.feddyn import FedDyn
from fedsilo.strategies.wire.reply import Reply
from tests.strategies.conftest import sized
from tests.support.asking import arrays_sent, state_after

MEAN = "norm.running_mean"


def test_two_rounds_go_by_the_equations_and_h_is_never_sent(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    known = sized(participants, {"s1a": {"train": 1}, "s2a": {"train": 3}, "s3a": {"train": 4}})
    server = FedDyn(CommonSettings(silos=3), FedDynSettings(0.5), known)

    def after(state: State, one: float, three: float) -> State:
        replies = {
            site: site_reply(
                site, {"w": np.float32([w]), MEAN: np.float32([w])}, num_examples=count
            )
            for site, w, count in (("s1a", one, 1), ("s2a", three, 3))
        }
        return state_after(server, state, replies)

    first = after(State({"w": np.float32([1]), MEAN: np.float32([0])}), 2.0, 6.0)
    # the mean is 5; h = -0.5 * 1/2 * (5 - 1) = -1, as half of the samples answered; 5 + 1 / 0.5
    assert {n: a.tolist() for n, a in first.arrays.items()} == {
        "w": [7.0],
        "h/w": [-1.0],
        MEAN: [5.0],
    }
    second = after(first, 4.0, 8.0)
    # the mean is 7, as the model was: h stays, 7 + 1 / 0.5
    assert second.arrays["h/w"].tolist() == [-1.0]
    assert second.arrays["w"].tolist() == [9.0]
    assert set(arrays_sent(server, second)["s1a"]) == {"w", MEAN}
    assert set(server.model(second)) == {"w", MEAN}
