"""Tests of the method 'fedavg': server."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.core.messages import ARRAYS, METRICS, NUM_EXAMPLES, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.models.methods.uefl import UEFLSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.strategies.loop.method import initial_weights
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.uefl import UEFL

# At the server

ROOT = Path(__file__).resolve().parents[2]
COMMON = CommonSettings(width=4, seed=7, silos=3)
TASK = NetworkShape((1, 16, 16), 10)


def test_methods_of_one_seed_start_from_the_same_weights(participants: Participants) -> None:
    fedavg = FedAvg(COMMON, NoSettings(), participants).initial_state().arrays
    uefl = UEFL(COMMON, UEFLSettings(), participants).initial_state().arrays
    assert set(uefl) - set(fedavg) == {"codebook.0"}
    for name, array in fedavg.items():
        np.testing.assert_array_equal(uefl[name], array)


def test_another_seed_starts_from_other_weights() -> None:
    first = initial_weights(build_classifier(COMMON, TASK))
    second = initial_weights(build_classifier(dataclasses.replace(COMMON, seed=8), TASK))
    assert not np.array_equal(first["head.1.weight"], second["head.1.weight"])


def test_step_counters_stay_home_and_running_means_travel() -> None:
    weights = initial_weights(build_classifier(COMMON, TASK))
    assert all(array.dtype == np.float32 for array in weights.values())
    assert not [name for name in weights if "num_batches_tracked" in name]
    assert [name for name in weights if "running_mean" in name]


def test_a_run_averages_what_the_sites_sent_by_their_counts(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]]
) -> None:
    grid, strategy = spied_run(tiny("fedavg", rounds=1))
    trained = [r.content for r in grid.replies if r.metadata.message_type == TRAIN]
    assert [c[METRICS][NUM_EXAMPLES] for c in trained] == [36, 36, 36]
    final = grid.sent[-1].content[ARRAYS]
    assert set(final) == set(strategy.state.arrays)
    for name in final:
        parts = np.stack([c[ARRAYS][name].numpy() for c in trained]).astype(np.float64)
        np.testing.assert_allclose(final[name].numpy(), parts.mean(axis=0), atol=1e-6)
        if name.startswith("head"):
            assert not np.array_equal(parts[0], parts[1])


def test_fedavg_says_that_weights_leave_a_site(participants: Participants) -> None:
    (told,) = FedAvg(COMMON, NoSettings(), participants).disclosures().leaves
    assert "all weights and batch-norm statistics" in told
