from collections.abc import Callable
from typing import Any

import pytest

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ROUND_KEYS
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.local import Local


def test_no_array_crosses_the_wire_in_either_direction(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]]
) -> None:
    grid, strategy = spied_run(tiny("local"))
    assert len(grid.replies) == 12  # hello, two rounds and the evaluation at three sites
    for message in [*grid.sent, *grid.replies]:
        assert not message.has_error()
        assert not message.content.array_records
    assert not strategy.state.arrays


def test_a_site_that_sends_its_weights_all_the_same_is_refused(
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    participants: Participants,
) -> None:
    app = fake_app(
        lambda message: content(**measured),
        s2a=lambda message: content({"w": [1.0]}, **measured),
    )
    common = CommonSettings(rounds=1, silos=3, run_name="run")
    strategy = RoundLoop(Local(common, NoSettings(), participants), run_dir="/somewhere")
    with pytest.raises(SiteError, match=r"site s2a.*surplus \['w'\]"):
        strategy.start(spy_grid(app), 1)


def test_sites_of_a_real_run_are_known_to_keep_state_from_their_first_reply_on(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy = spied_run(tiny("local"))
    assert strategy.state.stateful_sites == ("s1a", "s2a", "s3a")
    expected = [told(message)["expects-state"] for message in grid.sent[3:]]
    assert expected == [0] * 3 + [ROUND_KEYS] * 3 + [2 * ROUND_KEYS] * 3


def test_nothing_but_metrics_is_said_to_leave(participants: Participants) -> None:
    strategy = Local(CommonSettings(silos=9, dataset="mnist"), NoSettings(), participants)
    assert strategy.disclosures().leaves == ()
