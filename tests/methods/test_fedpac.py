"""Tests of the method 'fedpac': the mix of classifiers, and who gets which."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.fedpac import FedPACSettings, mixing_weights, variance_of
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedpac import FedPAC
from tests.support.asking import arrays_expected, arrays_sent, make_reply, state_after
from tests.support.methods import with_class_counts


def test_the_variance_is_that_of_a_hand_computed_site() -> None:
    # Class 0: features 1 and 3 along one axis; class 1: twice 2 along the other. p(y) is 1/2 each
    shares, squares = np.array([0.5, 0.5]), np.array([5.0, 4.0])
    means = np.array([[2.0, 0.0], [0.0, 2.0]])
    # 0.5 * 5 + 0.5 * 4 - (1^2 + 1^2), divided by the four samples
    assert variance_of(shares, means, squares, 4) == pytest.approx(2.5 / 4)


def test_weights_of_equal_sites_follow_the_variances_alone() -> None:
    # Of sum a_j^2 v_j the minimum has a_j in proportion to 1 / v_j
    weights = mixing_weights(0, np.ones((2, 3)), np.array([1.0, 3.0]))
    np.testing.assert_allclose(weights, [0.75, 0.25])


def test_a_site_far_from_all_others_keeps_its_own_classifier() -> None:
    weights = mixing_weights(0, np.array([[0.0], [10.0], [11.0]]), np.array([0.1, 0.1, 0.1]))
    np.testing.assert_allclose(weights, [1, 0, 0], atol=1e-3)


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(
            st.integers(0, n - 1),
            st.lists(st.floats(-3, 3), min_size=2 * n, max_size=2 * n),
            st.lists(st.floats(0, 2), min_size=n, max_size=n),
        )
    )
)
def test_no_other_mix_of_two_sites_is_better(case: tuple[int, list[float], list[float]]) -> None:
    place, numbers, variances = case
    features, v = np.array(numbers).reshape(-1, 2), np.array(variances)

    def value(weights: Any) -> float:
        far = weights @ (features[place] - features)
        return float(weights**2 @ v + far @ far)

    weights = mixing_weights(place, features, v)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    for one in range(len(v)):
        towards = 0.9 * weights + 0.1 * np.eye(len(v))[one]
        assert value(weights) <= value(towards) + 1e-7


@pytest.fixture
def server(participants: Participants) -> FedPAC:
    """Return the server of three sites, of which the last has no class of ten samples."""
    counts = {"s1a": [12, 11], "s2a": [10, 3], "s3a": [9, 9]}
    common = CommonSettings(method="fedpac", network="conv", width=4)
    told = with_class_counts(participants, **counts)
    return FedPAC(common, FedPACSettings(), told)


def test_only_large_classes_are_expected_before_and_after_training(server: FedPAC) -> None:
    expected = arrays_expected(server, server.initial_state())
    assert {n for n in expected["s2a"] if n.startswith("prototype/")} == {"prototype/0"}
    assert {n for n in expected["s2a"] if n.startswith("received/")} == {"received/0"}
    assert not [n for n in expected["s3a"] if n.startswith(("prototype/", "received/"))]


def test_a_site_without_a_large_class_keeps_its_classifier_and_is_in_no_mix(
    server: FedPAC,
) -> None:
    state = server.initial_state()
    replies = {}
    for place, (site, specs) in enumerate(arrays_expected(server, state).items(), 1):
        arrays = {n: np.full(spec.shape, place, np.float32) for n, spec in specs.items()}
        replies[site] = make_reply(site, arrays)
    sent = arrays_sent(server, state_after(server, state, replies))
    heads = {site: float(arrays["head.4.bias"].mean()) for site, arrays in sent.items()}
    assert heads["s3a"] == 3
    assert 1 <= heads["s1a"] <= 2
    assert "prototype/0" in sent["s1a"]
    assert "prototype/0" not in sent["s3a"]
    assert all(float(arrays["encoder.stages.0.weight"].mean()) == 2 for arrays in sent.values())


def test_a_network_of_one_layer_is_refused(participants: Participants) -> None:
    common = CommonSettings(method="fedpac", network="conv", width=4)
    with pytest.raises(SettingError, match="would share 0"):
        FedPAC(common, FedPACSettings(personal_layers=99), participants).initial_state()
