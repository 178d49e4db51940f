"""Embeddings of a site's samples: which layer, in which mode, of which networks."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.compute import Compute
from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.explanations.embeddings import PENULTIMATE, embed, single_classifier
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.mixture import Mixture
from fedsilo.models.networks.site_network import TokenClassifier

CPU = Compute(torch.device("cpu"), bf16=False)


def network_of(kind: str, shape: tuple[int, ...]) -> TokenClassifier:
    values = {
        "method": "fedavg",
        "network.name": kind,
        "network.width": 4,
        "network.dropout": 0.5,
    }
    return build_classifier(build(CommonSettings, values), NetworkShape(shape, 2))


def images(count: int, size: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 1, size, size), generator=draw, dtype=torch.uint8)


def test_an_embedding_is_the_mean_of_an_images_tokens() -> None:
    network, inputs = network_of("conv", (1, 16, 16)), images(5, 16)
    found = embed(network, inputs, CPU)
    assert found.shape == (5, 16)
    with torch.no_grad():
        tokens = network.eval().encode(float_inputs(inputs))
    assert tokens.shape == (5, 4, 16)
    torch.testing.assert_close(found, tokens.mean(dim=1))


def test_the_penultimate_layer_is_what_the_last_linear_one_reads() -> None:
    network, inputs = network_of("resnet22", (1, 64, 64)), images(5, 64)
    network.train()
    found = embed(network, inputs, CPU, PENULTIMATE)
    last = cast(nn.Linear, cast(nn.Sequential, network.head)[-1])
    assert found.shape == (5, last.in_features)
    with torch.no_grad():
        logits = network.eval()(float_inputs(inputs))
        torch.testing.assert_close(last(found), logits)
    assert not last._forward_pre_hooks, "nothing is left at the network"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_embeddings_are_exact_whatever_the_run_was_computed_in(precision: str) -> None:
    network, inputs = network_of("conv", (1, 16, 16)), images(3, 16)
    half = Compute(torch.device("cpu"), bf16=precision == "bf16", fp16=precision == "fp16")
    for layer in ("embedding", PENULTIMATE):
        found = embed(network, inputs, half, layer)
        assert found.dtype == torch.float32
        assert torch.equal(found, embed(network, inputs, CPU, layer))


def test_a_row_of_a_table_is_embedded_too() -> None:
    rows = torch.randn(3, 5)
    assert torch.equal(embed(network_of("logistic", (5,)), rows, CPU), rows)


def test_a_method_that_wraps_one_network_is_embedded_by_it_and_a_mixture_refused(
    opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    method = opened("fedavg", weights)
    network = cast(TokenClassifier, method.open())
    assert single_classifier(network) is network
    mixed = Mixture({"a": network, "b": network_of("conv", (1, 16, 16))})
    with pytest.raises(SettingError, match=r"mixes 2 networks.*name a run of a method with one"):
        embed(mixed, images(2, 16), CPU)
