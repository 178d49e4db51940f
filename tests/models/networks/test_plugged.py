"""Networks of others: the same logits as the module alone, tokens, and what is refused."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from torch import nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.models.maths.mc_dropout import only_dropout_active
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape, check_network_settings
from fedsilo.models.networks.plugged import PluggedClassifier
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.errors import refuses

TASK = NetworkShape((1, 8, 8), 5)


def _own(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    numbers = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(numbers, classes))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], CommonSettings]:
    """Return a builder of settings with the network ``plugged_nets:build``."""

    def make(build: Any, **more: Any) -> CommonSettings:
        module = ModuleType("plugged_nets")
        module.build = build  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "plugged_nets", module)
        return CommonSettings(network="plugged_nets:build", **more)

    return make


def _built(settings: CommonSettings, task: NetworkShape = TASK) -> PluggedClassifier:
    network = build_classifier(settings, task)
    assert isinstance(network, PluggedClassifier)
    return network


@pytest.mark.parametrize("shape", [(1, 8, 8), (13,)])
def test_a_module_gives_its_own_logits_which_are_its_only_token(
    named: Callable[..., CommonSettings], shape: tuple[int, ...]
) -> None:
    network = _built(named(_own), NetworkShape(shape, 5)).eval()
    inputs = torch.rand(3, *shape)
    assert torch.equal(network(inputs), network.encoder(inputs))
    assert network.encode(inputs).shape == (3, 1, 5)
    assert (network.tokens, network.channels) == (1, 5)


def test_initial_weights_are_those_of_the_seed(named: Callable[..., CommonSettings]) -> None:
    first, again, other = (
        exchanged_arrays(_built(named(_own, seed=seed)))["encoder.2.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_server_on_the_meta_device_gets_the_same_shapes(
    named: Callable[..., CommonSettings],
) -> None:
    with torch.device("meta"):
        network = _built(named(_own))
    assert exchanged_arrays(network)["encoder.2.weight"].shape == (5, 64)


def test_dropout_of_a_plug_is_for_training_alone(named: Callable[..., CommonSettings]) -> None:
    network, inputs = _built(named(_own)), torch.rand(3, 1, 8, 8)
    network.train()
    assert not torch.equal(network(inputs), network(inputs))
    with only_dropout_active(network):
        assert torch.equal(network(inputs), network(inputs))


@pytest.mark.parametrize(
    ("name", "shape", "tokens", "channels"),
    [
        ("resnet10t", (3, 64, 64), 4, 512),  # maps, channels first
        ("vit_tiny_patch16_224", (1, 32, 32), 5, 192),  # a class token and four patches
        ("swinv2_cr_tiny_ns_224", (3, 224, 224), 49, 768),
        ("swin_tiny_patch4_window7_224", (3, 224, 224), 49, 768),  # maps, channels last
    ],
)
def test_timms_networks_have_their_features_as_tokens(
    name: str, shape: tuple[int, ...], tokens: int, channels: int
) -> None:
    network = _built(CommonSettings(network=f"timm:{name}"), NetworkShape(shape, 5)).eval()
    assert (network.tokens, network.channels) == (tokens, channels)
    inputs = torch.rand(2, *shape)
    seen = inputs * network.scale + network.offset
    with torch.no_grad():
        maps = network.encode_with_map(inputs)[1]
        assert torch.allclose(network(inputs), network.encoder(seen))
    assert maps.shape[0::3] == (2, channels)


def test_a_name_that_timm_does_not_know_is_told() -> None:
    with refuses(SettingError, "timm:resnet0"):
        _built(CommonSettings(network="timm:resnet0"))
    with pytest.raises(SettingError, match="takes images, but the data are a table"):
        _built(CommonSettings(network="timm:resnet10t"), NetworkShape((13,), 2))


def _fails(*_: Any) -> nn.Module:
    raise KeyError("x")


class _NoTensor(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        return [inputs]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (3, ["int"]),
        (nn.Linear(1, 1), ["Linear"]),
        (lambda *_: 3, ["nn.Module", "int"]),
        (_fails, ["x"]),
        (lambda: 3, []),
        (lambda *_: nn.Flatten(), []),
        (lambda *_: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), []),
        (lambda *_: nn.Linear(7, 5), [1, 8]),
        (lambda shape, classes: _own(shape, classes + 1), [2, 5, 6]),
        (lambda *_: _NoTensor(1, 1), [2]),
    ],
)
def test_what_is_no_classifier_of_such_data_is_refused_in_a_line(
    named: Callable[..., CommonSettings], build: Any, told: list[object]
) -> None:
    with refuses(SettingError, *told) as error:
        _built(named(build))
    assert "\n" not in str(error.value)


def test_a_name_without_its_object_is_refused_before_any_data_are_read(
    named: Callable[..., CommonSettings],
) -> None:
    named(_own)
    with refuses(SettingError, "plugged_nets", "other"):
        check_network_settings(CommonSettings(network="plugged_nets:other"))


def test_a_private_run_refuses_a_batch_norm_that_group_norm_cannot_replace(
    named: Callable[..., CommonSettings],
) -> None:
    def build(*_: Any) -> nn.Module:
        return nn.Sequential(nn.SyncBatchNorm(1), nn.Flatten(), nn.Linear(64, 5))

    with pytest.raises(SettingError, match="has a SyncBatchNorm"):
        _built(named(build, sample_clip_norm=1.0, noise_multiplier=1.0))


class _LessTheMean(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - inputs.mean(dim=0)


def test_a_private_run_refuses_a_network_in_which_samples_meet(
    named: Callable[..., CommonSettings],
) -> None:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(_LessTheMean(), _own(shape, classes))

    assert _built(named(build))
    with refuses(SettingError, "privacy.sample-clip-norm"):
        _built(named(build, sample_clip_norm=1.0, noise_multiplier=1.0))


def test_a_private_run_replaces_batch_norms_of_the_batch_alone(
    named: Callable[..., CommonSettings],
) -> None:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        norm = nn.BatchNorm2d(1, track_running_stats=False)
        return nn.Sequential(norm, _own(shape, classes))

    network = _built(named(build, sample_clip_norm=1.0, noise_multiplier=1.0))
    assert not any(isinstance(part, nn.BatchNorm2d) for part in network.modules())


def test_a_private_run_refuses_such_norms_in_a_classifier_of_tokens_too(
    named: Callable[..., CommonSettings],
) -> None:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        network = build_classifier(CommonSettings(network="conv"), NetworkShape((1, 16, 16), 5))
        network.encoder = nn.Sequential(nn.SyncBatchNorm(1), network.encoder)
        return network

    private = named(build, sample_clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(SettingError, match="has a SyncBatchNorm"):
        build_classifier(private, NetworkShape((1, 16, 16), 5))


def test_weights_of_timms_model_come_from_a_file_but_for_a_head_of_other_classes(
    tmp_path: Any,
) -> None:
    given = timm.create_model("resnet10t", num_classes=7)
    path = tmp_path / "weights.pth"
    torch.save(given.state_dict(), path)
    settings = CommonSettings(network="timm:resnet10t", initial_weights=str(path))
    network = _built(settings, NetworkShape((1, 32, 32), 5))
    head = network.encoder.get_parameter("fc.weight").clone()
    load_initial_weights(network, settings)
    name = "layer1.0.conv1.weight"
    assert torch.equal(network.encoder.get_parameter(name), given.get_parameter(name))
    first = given.get_parameter("conv1.0.weight").sum(dim=1, keepdim=True)  # grey in each colour
    assert torch.allclose(network.encoder.get_parameter("conv1.0.weight"), first)
    assert torch.equal(network.encoder.get_parameter("fc.weight"), head)


def test_weights_of_another_network_are_refused(
    named: Callable[..., CommonSettings], tmp_path: Any
) -> None:
    path = tmp_path / "weights.pth"
    for state, told in (
        (_own((9,), 5).state_dict(), "'2.weight' is missing, surplus or of another shape"),
        ({"2.weight": torch.full((5, 64), torch.nan), "2.bias": torch.zeros(5)}, "non-finite"),
    ):
        torch.save(state, path)
        settings = named(_own, initial_weights=str(path))
        with pytest.raises(SettingError, match=f"does not fit: .*{told}"):
            load_initial_weights(_built(settings), settings)
