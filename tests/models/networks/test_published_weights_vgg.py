"""Published weights of VGG16 in a network: taken array by array, or refused in a line."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.models.networks.encoders import VggEncoder
from fedsilo.models.networks.published_weights import fill_vgg
from tests.support.errors import refuses

State = dict[str, Tensor]


def _drawn(encoder: VggEncoder) -> State:
    """Return other values for all its arrays."""
    state = encoder.state_dict()
    return {n: torch.randn_like(a) if a.is_floating_point() else a for n, a in state.items()}


@pytest.fixture(scope="module")
def published() -> State:
    return _drawn(VggEncoder(in_channels=3, width=4))


HEADS = {
    "timm": ("pre_logits.fc1.weight", "pre_logits.fc1.bias", "head.fc.weight"),
    "torchvision": ("classifier.0.weight", "classifier.0.bias", "classifier.6.weight"),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("prefix", ["", "module.", "encoder."])
def test_the_features_are_taken_and_the_head_is_left(
    published: State, head: tuple[str, ...], prefix: str
) -> None:
    given = {**published, **{name: torch.zeros(3) for name in head}}
    encoder = VggEncoder(in_channels=3, width=4)
    fill_vgg(encoder, {f"{prefix}{name}": array for name, array in given.items()}, "a file")
    found = encoder.state_dict()
    assert all(torch.equal(found[n], a) for n, a in published.items() if a.is_floating_point())
    assert all(parameter.requires_grad for parameter in encoder.parameters())


def test_counters_of_batches_may_be_missing_and_half_precision_is_taken(published: State) -> None:
    given = {n: a.half() for n, a in published.items() if not n.endswith("tracked")}
    encoder = VggEncoder(in_channels=3, width=4)
    fill_vgg(encoder, given, "a file")
    first = encoder.state_dict()["features.0.weight"]
    assert first.dtype == torch.float32
    assert torch.equal(first, published["features.0.weight"].half().float())


def _without(name: str) -> Callable[[State], State]:
    return lambda state: {n: a for n, a in state.items() if n != name}


def _plain(state: State) -> State:
    """Return what a file of VGG16 without batch norm would hold."""
    convolutions = {n: a for n, a in state.items() if a.ndim == 4}
    return {f"features.{i * 2}.weight": a for i, a in enumerate(convolutions.values())}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: {},
            ["w.pt", "features.0.weight"],
        ),
        (_without("features.1.running_mean"), [1, "features.1.running_mean"]),
        (lambda state: {**state, "features.44.bias": torch.ones(2)}, [1, "features.44.bias"]),
        (_plain, []),
        (lambda state: {**state, "features.3.bias": "text"}, ["features.3.bias"]),
        (
            lambda state: {**state, "features.0.weight": torch.ones(2, 1, 3, 3)},
            [1, 3],
        ),
        (
            lambda state: _drawn(VggEncoder(in_channels=3, width=32)),
            ["features.0.weight", 16, 3, 2, "width", 32],
        ),
        (
            lambda state: {**state, "features.4.running_var": torch.full((2,), float("nan"))},
            ["w.pt", "features.4.running_var"],
        ),
        (lambda state: {**state, "features.0.weight": torch.tensor(1.0)}, []),
    ],
)
def test_weights_of_another_network_or_width_are_refused_and_nothing_is_taken(
    published: State, change: Callable[[State], State], says: list[object]
) -> None:
    encoder = VggEncoder(in_channels=3, width=4)
    before = {name: array.clone() for name, array in encoder.state_dict().items()}
    with refuses(SettingError, *says) as caught:
        fill_vgg(encoder, change(published), "w.pt")
    assert "'train.initial-weights'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[n], a) for n, a in encoder.state_dict().items())
