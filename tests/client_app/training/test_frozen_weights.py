"""In bf16 a frozen backbone is converted once a training: the same bits, and fp32 afterwards."""

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.tiny import VIT_FIELDS

BF16 = Compute(torch.device("cpu"), bf16=True)
SETTINGS = CommonSettings(**VIT_FIELDS, dataset="digits", local_steps=3, batch_size=4, seed=7)


def training(**more: Any) -> LocalTraining:
    """Return a training of a new network, whose ``types`` names a frozen weight's in each loss."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = cast(PromptedViT, build_classifier(SETTINGS, NetworkShape((3, 16, 16), 4)))
        images = torch.rand(12, 3, 16, 16) * 2 - 1
    split = Split(images, torch.arange(12) % 4)
    return LocalTraining(network, split, SETTINGS, BF16, (1, "site"), **more)


def test_the_frozen_weights_are_converted_once_and_are_exact_again_afterwards() -> None:
    types = []
    one = training()
    qkv = cast(PromptedViT, one.network).vit.blocks[0].attn.qkv
    exact, norm = qkv.weight.detach().clone(), cast(PromptedViT, one.network).vit.norm

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        types.append((qkv.weight.dtype, norm.weight.dtype))
        return one.network.loss(inputs, labels)

    one.objective = loss
    one.run()
    assert types == [(torch.bfloat16, torch.float32)] * 3
    assert qkv.weight.dtype == torch.float32
    assert torch.equal(qkv.weight, exact)
    assert not [n for n, p in one.network.encoder.named_parameters() if p.grad is not None]  # type: ignore[union-attr, operator]


def test_the_bits_are_those_of_weights_that_autocast_converts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = training(), training()
    one.run()
    monkeypatch.setattr(Compute, "convert_frozen", lambda *_: nullcontext())
    other.run()
    expected = exchanged_arrays(other.network)
    for name, array in exchanged_arrays(one.network).items():
        assert torch.equal(array, expected[name]), name


@pytest.mark.parametrize("name", ["penalty", "after_step"])
def test_what_runs_outside_autocast_finds_the_weights_as_they_are(name: str) -> None:
    types = []
    one = training()

    def note(*_: object) -> Tensor:
        types.append(cast(PromptedViT, one.network).vit.blocks[0].attn.qkv.weight.dtype)
        return torch.zeros(())

    setattr(one, name, note)
    one.run()
    assert set(types) == {torch.float32}


def test_a_training_that_fails_leaves_the_weights_exact() -> None:
    def fail(*_: Tensor) -> Tensor:
        raise ZeroDivisionError

    one = training(objective=fail)
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert cast(PromptedViT, one.network).vit.blocks[0].attn.qkv.weight.dtype == torch.float32
