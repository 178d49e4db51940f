"""Tests of the method 'apfl': site."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsilo.core.messages import ARRAYS
from fedsilo.models.methods.apfl import mixture
from fedsilo.models.networks.site_network import TokenClassifier
from tests.support.lab import answer, steps_of
from tests.support.methods import Opened

# At a site

BIAS = "head.4.bias"
SGD = {"optimiser": "sgd", "learning_rate": 0.05, "dropout": 0.0, "local_steps": 1}


def test_a_mixture_has_the_own_models_statistics() -> None:
    own = {"w": torch.tensor([4.0]), "n.running_mean": torch.tensor([1.0])}
    shared = {"w": torch.tensor([8.0]), "n.running_mean": torch.tensor([9.0])}
    mixed = mixture(own, shared, 0.25)
    assert {n: a.tolist() for n, a in mixed.items()} == {"w": [7.0], "n.running_mean": [1.0]}


def test_the_global_model_is_trained_as_fedavg_trains_it(
    opened: Opened, weights: dict[str, Any]
) -> None:
    sent = answer(opened("apfl", weights, own=SGD))[ARRAYS]
    fedavg = answer(opened("fedavg", weights, own=SGD))[ARRAYS]
    for name, array in fedavg.items():
        np.testing.assert_allclose(sent[name].numpy(), array.numpy(), atol=1e-6)


def test_the_own_model_moves_by_alpha_times_the_mixtures_gradient(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own = SGD | {"mixing_alpha": 0.25}
    sent = answer(opened("apfl", weights, own=own))[ARRAYS]
    kept = opened("apfl", weights, own=own, round=2).state()
    # v and w begin alike, so the first mixture is w: of one step v has a quarter
    moved = sent[BIAS].numpy() - weights[BIAS]
    np.testing.assert_allclose(kept[BIAS].numpy() - weights[BIAS], 0.25 * moved, atol=1e-6)


def test_what_is_measured_is_the_mixture_of_what_came_and_what_stayed(
    opened: Opened, weights: dict[str, Any]
) -> None:
    answer(opened("apfl", weights, own=SGD))
    lab = opened("apfl", weights, own=SGD, round=2)
    expected = 0.5 * lab.state()[BIAS].numpy() + 0.5 * weights[BIAS]
    np.testing.assert_allclose(lab.open().state_dict()[BIAS], expected, atol=1e-7)


def test_the_own_model_learns_evidence_with_the_kl_term_of_the_epoch(
    opened: Opened, weights: dict[str, Any]
) -> None:
    lab = opened("apfl", weights, own=SGD | {"loss": "evidential"})
    steps = steps_of(lab)
    network = cast(TokenClassifier, steps.network)
    inputs, labels = lab.silo.train.inputs[:4], lab.silo.train.labels[:4]
    assert network.evidence is not None
    network.evidence.kl_weight = 1.0  # as the tenth epoch sets it
    # v and w begin alike, so the mixture is w: both have the same loss
    assert steps.loss(inputs, labels).item() == pytest.approx(
        2 * network.loss(inputs, labels).item(), rel=1e-4
    )
