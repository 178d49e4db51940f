import pytest
import torch
from torch import nn

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.privacy.group_norm import with_group_norm


def test_every_batch_norm_becomes_a_group_norm_of_its_channels() -> None:
    network = nn.Sequential(nn.Conv2d(1, 24, 3), nn.Sequential(nn.BatchNorm2d(24)), nn.ReLU())
    with_group_norm(network)
    norm = network.get_submodule("1.0")
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (3, 24)


def test_few_channels_are_one_group() -> None:
    network = nn.Sequential(nn.BatchNorm1d(5))
    with_group_norm(network)
    assert network[0].num_groups == 1


@pytest.mark.parametrize("kind", ["conv", "vgg16-bn", "resnet22"])
def test_in_a_private_network_no_sample_changes_anothers_output(kind: str) -> None:
    settings = CommonSettings(network=kind, width=8, dropout=0.0, sample_clip_norm=1.0)
    channels = 3 if kind == "vgg16-bn" else 1
    network = build_classifier(settings, Task((channels, 32, 32), 2)).train()
    images = torch.randn(2, channels, 32, 32, generator=torch.Generator().manual_seed(1))
    others = torch.cat([images[:1], 100 * images[1:]])
    assert torch.allclose(network(images)[0], network(others)[0], atol=1e-5)
    assert not any(name.endswith("running_mean") for name in network.state_dict())
