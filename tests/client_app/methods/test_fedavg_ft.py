from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedavg_ft import FedAvgFTSite
from fedsilo.models.contract.errors import CheckpointError, SiteError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.lab import answer, evaluate, steps_of

Opened = Callable[..., Lab]
RATES = {"learning_rate": 0.5, "finetune_learning_rate": 0.25}


def state_of(method: FedAvgFTSite) -> dict[str, torch.Tensor]:
    return exchanged_arrays(cast(nn.Module, method.open()))


def test_before_fine_tuning_a_round_is_fedavgs(opened: Opened, weights: dict[str, Any]) -> None:
    method = opened("fedavg-ft", weights, own={"finetune_learning_rate": 0.25})
    found, fedavg = answer(method), answer(opened("fedavg", weights))
    assert set(found[ARRAYS]) == set(weights)
    for name, array in fedavg[ARRAYS].items():
        np.testing.assert_array_equal(found[ARRAYS][name].numpy(), array.numpy())
    assert found[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


@pytest.mark.parametrize(
    ("fields", "rate"),
    [({"returns": True}, 0.5), ({"returns": False}, 0.25)],
)
def test_fine_tuning_has_a_step_size_of_its_own(
    opened: Opened, weights: dict[str, Any], fields: dict[str, Any], rate: float
) -> None:
    site = opened("fedavg-ft", weights, own=RATES, **fields)
    settings = steps_of(site).fit.get("settings", site.sampling)
    assert settings.learning_rate == rate
    assert settings.batch_size == 16


def test_the_step_size_of_fine_tuning_is_the_one_that_trains(
    opened: Opened, weights: dict[str, Any]
) -> None:
    moved = {}
    for rate in (1e-6, 1e-2):
        method = opened("fedavg-ft", weights, own={"finetune_learning_rate": rate}, returns=False)
        answer(method)
        kept = method.state_files.before(Instruction(2, "train"))
        assert kept is not None
        moved[rate] = np.abs(kept["head.4.weight"].numpy() - weights["head.4.weight"]).max()
    assert 0 < moved[1e-6] < 1e-4 < moved[1e-2]


def test_fine_tuning_starts_from_the_global_weights_and_sends_none(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedavg-ft", weights, returns=False)
    for name, tensor in state_of(method).items():
        np.testing.assert_array_equal(tensor, weights[name])
    reply = answer(method)
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 1


def test_fine_tuning_goes_on_from_the_sites_own_weights(
    opened: Opened, weights: dict[str, Any]
) -> None:
    first = opened("fedavg-ft", weights, returns=False)
    answer(first)
    kept = first.state_files.before(Instruction(2, "train"))
    assert kept is not None
    assert set(kept) == set(weights)
    second = opened("fedavg-ft", round=2, returns=False)
    for name, tensor in state_of(second).items():
        assert torch.equal(tensor, kept[name])
    answer(second)
    later = second.state_files.before(Instruction(3, "train"))
    assert later is not None
    assert not torch.equal(later["head.4.bias"], kept["head.4.bias"])


def test_the_final_evaluation_measures_the_personal_model_and_stores_nothing(
    opened: Opened, weights: dict[str, Any]
) -> None:
    trained = opened("fedavg-ft", weights, returns=False)
    expected = answer(trained)[METRICS]["trained.val.loss"]
    before = sorted(path.name for path in trained.state_files.folder.iterdir())
    method = opened("fedavg-ft", round=2, phase="evaluate", returns=False)
    found = evaluate(method)[METRICS]
    # the same weights, other dropout draws
    assert found["incoming.val.loss"] == pytest.approx(expected, rel=0.05)
    assert found["kept-state"] == 0
    assert sorted(path.name for path in method.state_files.folder.iterdir()) == before


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_a_site_with_neither_own_nor_global_weights_is_told_so(opened: Opened, phase: str) -> None:
    method = opened("fedavg-ft", round=2, phase=phase, returns=False)
    with pytest.raises(SiteError, match="site s1a has no own model, but the message has none"):
        method.open()


def test_a_personal_model_that_is_gone_is_an_error(opened: Opened) -> None:
    with pytest.raises(CheckpointError, match="site s1a is gone from"):
        answer(opened("fedavg-ft", round=2, returns=False, expects_state=True))
