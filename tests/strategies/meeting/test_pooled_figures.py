"""Pooled statistics on their way to the sites."""

import dataclasses
from typing import Any

import numpy as np

from fedsilo.core.messages import EVALUATE, STANDARDISED, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.site_facts import Sums
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg

COMMON = CommonSettings(silos=3)


def test_the_statistics_travel_with_every_message_in_double_precision(
    spy_grid: Any, fake_app: Any, participants: Participants
) -> None:
    count, total = np.array([3.0, 1.0]), np.array([1.0, 0.1])
    sums = Sums(count, total, np.array([11.0, 0.01]))
    facts = {
        site: dataclasses.replace(found, sums=sums) for site, found in participants.facts.items()
    }
    grid = spy_grid(fake_app())
    strategy = RoundLoop(FedAvg(COMMON, NoSettings(), Participants(facts, participants.nodes)))
    strategy.start(grid, 2, 20)
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds == [TRAIN] * 6 + [EVALUATE] * 3
    for message in grid.sent:
        record = message.content.array_records[STANDARDISED]
        assert {array.dtype for array in record.values()} == {"float64"}
        np.testing.assert_allclose(record["mean"].numpy(), [1 / 3, 0.1], rtol=1e-15)
        # 11 / 3 - (1 / 3)^2 = 32 / 9; one value alone does not vary
        np.testing.assert_allclose(record["std"].numpy(), [32**0.5 / 3, 1], rtol=1e-15)


def test_without_sums_no_message_has_figures(
    spy_grid: Any, fake_app: Any, participants: Participants
) -> None:
    grid = spy_grid(fake_app())
    RoundLoop(FedAvg(COMMON, NoSettings(), participants)).start(grid, 1, 20)
    assert len(grid.sent) == 6
    assert not any(STANDARDISED in message.content.array_records for message in grid.sent)
