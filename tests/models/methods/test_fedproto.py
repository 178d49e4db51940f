import math

import pytest
import torch

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.maths.class_means import ClassTargets
from fedsilo.models.methods.fedproto import (
    FedProtoSettings,
    NearestPrototype,
    nearest_logits,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task

# Of three classes the second has no target
TARGETS = ClassTargets(
    torch.tensor([[1.0, 2.0], [0.0, 0.0], [4.0, 4.0]]), torch.tensor([True, False, True])
)


def test_the_nearest_prototype_has_the_largest_logit_and_a_class_without_one_no_chance() -> None:
    found = nearest_logits(torch.tensor([[1.0, 3.0], [4.0, 3.0]]), TARGETS)
    assert found.tolist() == [[-1, -math.inf, -10], [-10, -math.inf, -1]]
    shares = torch.softmax(found, dim=1)
    assert shares[:, 1].tolist() == [0, 0]
    assert shares.sum(dim=1).tolist() == pytest.approx([1, 1])


def test_a_network_measured_by_prototypes_ignores_its_head() -> None:
    common = CommonSettings(width=4, network="mlp", dropout=0.9, dataset="heart-synthetic")
    network = build_classifier(common, Task((3,), 3))
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    embeddings = network.encode(inputs).flatten(1).detach()
    values = torch.stack([embeddings[1], torch.zeros(4), embeddings[3]])
    nearest = NearestPrototype(network, ClassTargets(values, torch.tensor([True, False, True])))
    found = nearest.classify(nearest.features(nearest.encode(inputs)))
    assert found.argmax(dim=1)[[1, 3]].tolist() == [0, 2]
    distances = torch.cdist(embeddings, values).square()
    torch.testing.assert_close(found[:, [0, 2]], -distances[:, [0, 2]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_no_weight_at_all_would_be_local_and_is_refused(weight: float) -> None:
    with pytest.raises(SettingError, match=r"'fedproto.prototype-weight' must be above 0"):
        build(FedProtoSettings, {"fedproto.prototype-weight": weight})


def test_a_mean_of_no_sample_is_refused() -> None:
    with pytest.raises(SettingError, match=r"'fedproto.class-min-count' must be at least 1"):
        build(FedProtoSettings, {"fedproto.class-min-count": 0})


def test_the_head_classifies_unless_it_is_set_otherwise() -> None:
    assert build(FedProtoSettings, {}) == FedProtoSettings(1.0, "head", 10)
    with pytest.raises(SettingError, match=r"'fedproto.inference' must be one of head, prototype"):
        build(FedProtoSettings, {"fedproto.inference": "nearest"})
