"""Tests of the method 'cyclic': server."""

import numpy as np

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.strategies.loop.ask import Ask, Question, Replies
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import Cyclic
from tests.support.asking import make_reply

# At the server


class Doubling(Ask):
    """Each site answers with twice what came, plus its number."""

    stateful_sites = ()

    def __init__(self, sites: list[str]) -> None:
        self.sites = sites
        self.order: list[str] = []

    def put(self, question: Question) -> Replies:
        (site,) = question.send
        self.order.append(site)
        value = 2 * question.send[site]["w"] + int(site[1])
        return Replies({site: make_reply(site, {"w": value})})


def test_each_site_goes_on_from_what_the_one_before_made(participants: Participants) -> None:
    server = Cyclic(CommonSettings(silos=3, seed=1), NoSettings(), participants)
    ask = Doubling(participants.sites())
    after = server.round(State({"w": np.float32([1])}), ask)
    value = 1
    for site in ask.order:
        value = 2 * value + int(site[1])
    assert sorted(ask.order) == participants.sites()
    assert after.arrays["w"].tolist() == [value]


def test_the_order_is_keyed_on_the_round(participants: Participants) -> None:
    server = Cyclic(CommonSettings(silos=3, seed=1), NoSettings(), participants)

    def order(round_: int) -> list[str]:
        ask = Doubling(participants.sites())
        server.round(State({"w": np.float32([1])}, round_), ask)
        return ask.order

    assert order(0) == order(0)
    assert len({tuple(order(number)) for number in range(8)}) > 1


def test_weights_go_to_another_site_as_they_are(participants: Participants) -> None:
    server = Cyclic(CommonSettings(silos=3), NoSettings(), participants)
    assert "one other site" in server.disclosures().leaves[0]
