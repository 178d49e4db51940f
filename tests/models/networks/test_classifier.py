from __future__ import annotations

import pytest
import torch
from torch import nn

from models.contract.errors import SettingError
from models.contract.settings import CommonSettings
from models.networks.classifier import (
    FrozenPart,
    Task,
    TokenClassifier,
    build_classifier,
    build_evidence,
    exchanged_arrays,
    float_inputs,
    load_exchanged,
    network_kind,
)

SMALL = CommonSettings(width=2, seed=3)
TASK = Task((1, 16, 16), 10)


def _network(settings: CommonSettings = SMALL) -> TokenClassifier:
    return build_classifier(settings, TASK)


def test_a_28_pixel_image_becomes_nine_tokens_of_four_widths() -> None:
    network = build_classifier(CommonSettings(width=4), Task((1, 28, 28), 7))
    images = torch.zeros(2, 1, 28, 28)
    assert network.encode(images).shape == (2, 9, 16)
    assert network(images).shape == (2, 7)
    assert (network.tokens, network.channels) == (9, 16)


def test_dropout_stands_before_each_linear_layer_with_the_rate_of_the_settings() -> None:
    head = list(build_classifier(CommonSettings(width=2, dropout=0.35), TASK).head)
    linear = [index for index, part in enumerate(head) if isinstance(part, nn.Linear)]
    before = [head[index - 1] for index in linear]
    assert all(isinstance(part, nn.Dropout) and part.p == 0.35 for part in before)
    assert isinstance(head[-1], nn.Linear)


def test_a_token_is_the_channels_of_one_place_of_the_map() -> None:
    class Fixed(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.arange(8.0).reshape(1, 2, 2, 2)  # channel 0: 0..3, channel 1: 4..7

    network = TokenClassifier(Fixed(), nn.Identity(), tokens=4, channels=2)
    expected = [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]
    assert network.encode(torch.zeros(1)).squeeze(0).tolist() == expected


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = exchanged_arrays(_network())
    torch.manual_seed(1)
    again = exchanged_arrays(_network())
    other = exchanged_arrays(_network(CommonSettings(width=2, seed=4)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.1.weight"], other["head.1.weight"])


def test_images_too_small_for_the_poolings_are_refused_with_their_size() -> None:
    with pytest.raises(SettingError, match="7x16 pixels"):
        build_classifier(SMALL, Task((1, 7, 16), 10))


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
    source(images)  # moves batch norm's running figures, which must travel too
    load_exchanged(target, exchanged_arrays(source))
    assert torch.equal(source.eval()(images), target.eval()(images))


def test_arrays_of_another_network_are_refused_by_name() -> None:
    network = _network()
    arrays = exchanged_arrays(network)
    arrays["surplus.weight"] = arrays.pop("head.1.bias")
    with pytest.raises(SettingError, match=r"missing \['head.1.bias'\], surplus \['surplus.w"):
        load_exchanged(network, arrays)


@pytest.mark.parametrize("shape", [(1,), (7,)])
def test_an_array_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    network = _network()
    arrays = exchanged_arrays(network) | {"head.1.bias": torch.zeros(shape)}
    with pytest.raises(SettingError, match=r"head\.1\.bias"):
        load_exchanged(network, arrays)


def test_colour_images_become_tokens_of_512_vgg_features() -> None:
    settings = CommonSettings(network="vgg16-bn")
    network = build_classifier(settings, Task((3, 64, 32), 4))
    images = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    network.eval()
    with torch.no_grad():
        assert network.encode(images).shape == (2, 2, 512)
        assert network(images).shape == (2, 4)
    with pytest.raises(SettingError, match="divides images by 32"):
        build_classifier(settings, Task((3, 28, 28), 4))


ROWS = Task((5,), 3)


def test_logistic_regression_is_one_linear_layer_of_the_features_as_they_are() -> None:
    network = build_classifier(CommonSettings(network="logistic", seed=3), ROWS).eval()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(network.encode(rows), rows[:, None, :])
    assert set(exchanged_arrays(network)) == {"head.1.weight", "head.1.bias"}
    weights = network.state_dict()
    expected = rows @ weights["head.1.weight"].T + weights["head.1.bias"]
    torch.testing.assert_close(network(rows), expected)
    assert (network.tokens, network.channels) == (1, 5)


def test_an_mlp_has_one_hidden_layer_of_the_settings_width() -> None:
    network = build_classifier(CommonSettings(network="mlp", width=6, seed=3), ROWS).eval()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    assert network.encode(rows).shape == (4, 1, 6)
    assert network(rows).shape == (4, 3)
    assert (network.tokens, network.channels) == (1, 6)
    shapes = {name: tuple(array.shape) for name, array in exchanged_arrays(network).items()}
    assert shapes == {
        "encoder.layers.0.weight": (6, 5),
        "encoder.layers.0.bias": (6,),
        "head.1.weight": (3, 6),
        "head.1.bias": (3,),
    }
    weights = network.state_dict()
    hidden = nn.functional.gelu(
        rows @ weights["encoder.layers.0.weight"].T + weights["encoder.layers.0.bias"]
    )
    expected = hidden @ weights["head.1.weight"].T + weights["head.1.bias"]
    torch.testing.assert_close(network(rows), expected)


@pytest.mark.parametrize("network", ["logistic", "mlp"])
def test_all_dropout_of_a_row_network_is_in_its_head(network: str) -> None:
    built = build_classifier(CommonSettings(network=network, dropout=0.35), ROWS)
    dropouts = [part for part in built.modules() if isinstance(part, nn.Dropout)]
    assert [part.p for part in dropouts] == [0.35]
    assert dropouts[0] is next(iter(built.head))


def test_auto_means_conv_for_images_and_logistic_regression_for_tables() -> None:
    assert network_kind(CommonSettings(), TASK) == "conv"
    assert network_kind(CommonSettings(), ROWS) == "logistic"
    for task, name in ((TASK, "conv"), (ROWS, "logistic")):
        auto, named = (build_classifier(CommonSettings(network=n), task) for n in ("auto", name))
        arrays = exchanged_arrays(auto)
        assert arrays.keys() == exchanged_arrays(named).keys()
        assert all(torch.equal(arrays[k], v) for k, v in exchanged_arrays(named).items())


@pytest.mark.parametrize("network", ["conv", "vgg16-bn"])
def test_an_image_network_on_a_table_is_refused_with_those_that_take_it(network: str) -> None:
    settings = CommonSettings(network=network, dataset="heart")
    said = f"network '{network}' .*data set 'heart', which is a table: .*logistic or mlp"
    for ask in (network_kind, build_classifier):
        with pytest.raises(SettingError, match=said):
            ask(settings, ROWS)


@pytest.mark.parametrize("network", ["logistic", "mlp"])
def test_a_row_network_on_images_is_refused_with_those_that_take_them(network: str) -> None:
    settings = CommonSettings(network=network, dataset="digits")
    said = f"network '{network}' .*data set 'digits', which is images: .*conv or vgg16-bn"
    with pytest.raises(SettingError, match=said):
        build_classifier(settings, TASK)


def test_8_bit_images_are_scaled_to_minus_one_to_one_and_other_inputs_are_left() -> None:
    found = float_inputs(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([-1.0, -0.6, 1.0])
    for rows in (torch.tensor([0.0, 255.0]), torch.tensor([3], dtype=torch.int64)):
        assert float_inputs(rows) is rows


class PartlyFrozen(nn.Module):
    """A frozen part with a batch norm, and others whose names begin as its does."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = FrozenPart()
        self.backbone.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.backbone2 = nn.Linear(2, 1, bias=False)
        self.outer = nn.ModuleDict({"backbone": nn.Linear(1, 1, bias=False), "kept": FrozenPart()})
        self.outer["kept"].register_buffer("scale", torch.ones(2))


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
    with pytest.raises(SettingError, match=r"surplus \['backbone.inner.0.bias'\]"):
        load_exchanged(module, given | {"backbone.inner.0.bias": torch.ones(2)})


def test_an_evidential_conv_network_answers_log_alpha_and_its_criterion_is_eq_4_by_hand() -> None:
    settings = CommonSettings(width=2, seed=3, dropout=0.0, loss="evidential")
    network = build_classifier(settings, Task((1, 16, 16), 2)).eval()
    # alpha (3, 1) of class 0: p = (3/4, 1/4), error 2/16, variances 2 * (3/16) / 5
    alpha = torch.tensor([[3.0, 1.0]])
    found = network.criterion(alpha.log(), torch.tensor([0]))
    assert found.item() == pytest.approx(2 / 16 + 2 * (3 / 16) / 5)
    images = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = network.head(network.encode(images).flatten(1))
        log_alpha = network(images)
        expected = (nn.functional.softplus(plain) + 1).log()
        assert network.loss(images, torch.tensor([0, 1, 1])).item() == pytest.approx(
            network.criterion(log_alpha, torch.tensor([0, 1, 1])).item()
        )
    torch.testing.assert_close(log_alpha, expected)
    assert list(exchanged_arrays(network)) == list(
        exchanged_arrays(build_classifier(CommonSettings(width=2), Task((1, 16, 16), 2)))
    )


@pytest.mark.parametrize(
    ("loss", "network", "evidential"),
    [
        ("auto", "auto", False),
        ("auto", "conv", False),
        ("auto", "vit", True),
        ("cross-entropy", "vit", False),
        ("evidential", "conv", True),
    ],
)
def test_auto_is_evidential_for_a_vit_alone(loss: str, network: str, evidential: bool) -> None:
    settings = CommonSettings(loss=loss, network=network, evidence="relu")
    found = build_evidence(settings, TASK)
    assert (found is not None) is evidential
    if found is not None:
        assert (found.kind, found.prior.tolist()) == ("relu", [1.0] * 10)


def test_weights_that_do_not_fit_name_a_few_arrays() -> None:
    wanted = {f"layers.{place}": torch.zeros(1) for place in range(5)}
    network = nn.Module()
    for name, value in wanted.items():
        network.register_buffer(name.replace(".", "_"), value)
    with pytest.raises(SettingError) as told:
        load_exchanged(network, {"other": torch.zeros(1)})
    first = "['layers_0', 'layers_1', 'layers_2'] and 2 more"
    assert str(told.value).endswith(f"missing {first}, surplus ['other']")
