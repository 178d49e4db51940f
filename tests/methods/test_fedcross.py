"""Tests of the method 'fedcross': which models are mixed, and what sites are sent."""

from typing import Any

import numpy as np
import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.fedcross import FedCrossSettings, collaborators
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedcross import FedCross
from tests.support.asking import arrays_sent, make_reply, state_after

# By cosine: 0 and 1 are nearly alike, 2 is opposite to 0, 3 is at a right angle to 0 and 2
VECTORS = np.array([[1.0, 0.0], [3.0, 0.1], [-2.0, 0.0], [0.0, 5.0]])
MODELS = {0: [1.0, 0.0], 1: [1.0, 0.2], 2: [0.0, 1.0]}


@pytest.mark.parametrize(
    ("choice", "round_", "expected"),
    [
        ("lowest", 1, [2, 2, 0, 0]),
        ("highest", 1, [1, 0, 3, 1]),
        ("in-order", 1, [2, 3, 0, 1]),
        ("in-order", 3, [1, 2, 3, 0]),
    ],
)
def test_collaborators_are_those_of_the_rule(choice: Any, round_: int, expected: list[int]) -> None:
    assert collaborators(VECTORS, choice, round_) == expected


def test_weights_of_zero_have_a_collaborator_all_the_same() -> None:
    assert collaborators(np.zeros((2, 3)), "lowest", 1) == [1, 0]


def test_a_trained_model_is_mixed_and_one_without_a_reply_as_it_was(
    participants: Participants,
) -> None:
    common = CommonSettings(method="fedcross", evaluate_every=0, rounds=9)
    server = FedCross(common, FedCrossSettings(0.75), participants)
    state = State({f"middleware/{k}/w": np.float32(v) for k, v in MODELS.items()})
    sites = {}
    for site, sent in arrays_sent(server, state).items():
        assert sent.keys() == {"w"}, "the mean is sent only where it is measured"
        place = next(k for k, v in MODELS.items() if np.array_equal(sent["w"], np.float32(v)))
        sites[place] = site
    assert sites.keys() == MODELS.keys(), "each site trains another model"
    reply = make_reply(sites[0], {"w": np.float32([2.0, 0.0])})
    after = state_after(server, state, {sites[0]: reply})
    # Of (2, 0), (1, 0.2), (0, 1) the third is least like both others, and the first least like it
    mixed = [[1.5, 0.25], [0.75, 0.4], [0.5, 0.75]]
    found = [after.arrays[f"middleware/{k}/w"] for k in MODELS]
    np.testing.assert_allclose(found, mixed, atol=1e-6)
    np.testing.assert_allclose(server.model(after)["w"], np.mean(mixed, axis=0), atol=1e-6)


def test_a_single_site_is_refused(participants: Participants) -> None:
    site, facts = next(iter(participants.facts.items()))
    alone = Participants({site: facts}, {site: participants.nodes[site]})
    with pytest.raises(SettingError, match="choose 'fedavg'"):
        FedCross(CommonSettings(method="fedcross"), FedCrossSettings(), alone).initial_state()
