from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedprox import FedProxSettings
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from tests.support.asking import arrays_expected, state_after

Run = Callable[..., tuple[Any, FedAvg]]
Tiny = Callable[..., dict[str, Any]]


def test_the_server_does_what_fedavgs_does(
    participants: Participants, site_reply: Callable[..., Any]
) -> None:
    common = CommonSettings(silos=3, width=1)
    prox, fedavg = (
        FedAvg(common, FedProxSettings(), participants),
        FedAvg(common, NoSettings(), participants),
    )
    before = prox.initial_state()
    names = list(before.arrays)
    for name, array in fedavg.initial_state().arrays.items():
        np.testing.assert_array_equal(before.arrays[name], array)
    assert (
        arrays_expected(prox, before, "train")["s1a"]
        == arrays_expected(fedavg, before, "train")["s1a"]
    )
    replies = {
        site: site_reply(
            site,
            {name: np.full_like(before.arrays[name], value) for name in names},
            num_examples=count,
        )
        for site, value, count in (("s1a", 2, 1), ("s2a", 6, 3))
    }
    after = state_after(prox, before, replies, "train").arrays
    assert all((after[name] == 5).all() for name in names)


def test_the_proximal_term_changes_what_the_sites_send(spied_run: Run, tiny: Tiny) -> None:
    def moved(method: str, **own: Any) -> Any:
        values = tiny(method, rounds=1, optimiser="sgd", learning_rate=0.01, local_steps=20, **own)
        grid, strategy = spied_run(values)
        first = grid.sent[3].content[ARRAYS]["head.4.weight"].numpy()
        return np.linalg.norm(strategy.state.arrays["head.4.weight"] - first)

    free = moved("fedavg")
    assert moved("fedprox", proximal_mu=1e-12) == pytest.approx(free, rel=0.05)
    assert moved("fedprox", proximal_mu=90.0) < 0.5 * free


def test_no_mu_at_all_is_refused_before_a_run_starts(tiny: Tiny) -> None:
    with pytest.raises(SettingError, match=r"'fedprox.proximal-mu' is 0\.0; .*above 0"):
        resolve(tiny("fedprox", proximal_mu=0.0))
    with pytest.raises(
        SettingError, match=r"method 'fedavg' has no setting 'fedprox\.proximal-mu'"
    ):
        resolve(tiny("fedavg") | {"fedprox.proximal-mu": 0.5})
