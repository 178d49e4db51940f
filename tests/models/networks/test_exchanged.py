import pytest
import torch
from torch import nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import (
    FrozenPart,
    TokenClassifier,
    exchanged_arrays,
    load_exchanged,
)
from tests.support.errors import refuses

SMALL = CommonSettings(width=2, seed=3)
TASK = NetworkShape((1, 16, 16), 10)


def _network(settings: CommonSettings = SMALL) -> TokenClassifier:
    return build_classifier(settings, TASK)


class PartlyFrozen(nn.Module):
    """A frozen part with a batch norm, and others whose names begin as its does."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = FrozenPart()
        self.backbone.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.backbone2 = nn.Linear(2, 1, bias=False)
        self.outer = nn.ModuleDict({"backbone": nn.Linear(1, 1, bias=False), "kept": FrozenPart()})
        self.outer["kept"].register_buffer("scale", torch.ones(2))


def test_exchanged_arrays_are_sorted_and_leave_step_counters_at_home() -> None:
    network = _network()
    arrays = exchanged_arrays(network)
    assert list(arrays) == sorted(arrays)
    assert not any("num_batches_tracked" in name for name in arrays)
    assert any("running_var" in name for name in arrays)
    assert {name for name, _ in network.named_parameters()} <= arrays.keys()


def test_loaded_arrays_make_another_network_answer_alike() -> None:
    source, target = _network(), _network(CommonSettings(width=2, seed=8))
    images = torch.randn(3, 1, 16, 16)
    source(images)  # moves batch norm's running metrics, which must travel too
    load_exchanged(target, exchanged_arrays(source))
    assert torch.equal(source.eval()(images), target.eval()(images))


def test_arrays_of_another_network_are_refused_by_name() -> None:
    network = _network()
    arrays = exchanged_arrays(network)
    arrays["surplus.weight"] = arrays.pop("head.1.bias")
    with refuses(SettingError, "head.1.bias"):
        load_exchanged(network, arrays)


@pytest.mark.parametrize("shape", [(1,), (7,)])
def test_an_array_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    network = _network()
    arrays = exchanged_arrays(network) | {"head.1.bias": torch.zeros(shape)}
    with refuses(SettingError, "head.1.bias"):
        load_exchanged(network, arrays)


def test_no_array_of_a_frozen_part_is_exchanged_and_none_is_loaded() -> None:
    module = PartlyFrozen()
    assert list(exchanged_arrays(module)) == ["backbone2.weight", "outer.backbone.weight"]
    before = {n: a.clone() for n, a in module.state_dict().items() if "inner" in n or "kept" in n}
    assert len(before) == 8
    given = {"backbone2.weight": torch.ones(1, 2), "outer.backbone.weight": torch.ones(1, 1)}
    load_exchanged(module, given)
    assert module.backbone2.weight.tolist() == [[1.0, 1.0]]
    after = module.state_dict()
    assert all(torch.equal(after[name], array) for name, array in before.items())
    with refuses(SettingError, "backbone.inner.0.bias"):
        load_exchanged(module, given | {"backbone.inner.0.bias": torch.ones(2)})


def test_weights_that_do_not_fit_name_a_few_arrays() -> None:
    wanted = {f"layers.{place}": torch.zeros(1) for place in range(5)}
    network = nn.Module()
    for name, value in wanted.items():
        network.register_buffer(name.replace(".", "_"), value)
    with pytest.raises(SettingError) as told:
        load_exchanged(network, {"other": torch.zeros(1)})
    first = "['layers_0', 'layers_1', 'layers_2'] and 2 more"
    assert str(told.value).endswith(f"missing {first}, surplus ['other']")
