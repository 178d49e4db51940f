from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.weights.backbones import backbone_digest, load_backbone
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.resnet22 import ResNet22
from tests.support.errors import refuses

TASK = NetworkShape((1, 32, 32), 2)


def settings(path: Path | str, **more: Any) -> CommonSettings:
    return CommonSettings(network="resnet22", width=2, backbone_weights=str(path), **more)


@pytest.fixture
def published() -> dict[str, Tensor]:
    """Return weights of a ResNet-22, none of them the seed's."""
    torch.manual_seed(9)
    found = ResNet22(in_channels=1, width=2).state_dict()
    return {n: a + 1 if a.is_floating_point() else a for n, a in found.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], Path]:
    def save(content: Any) -> Path:
        torch.save(content, tmp_path / "weights.p")
        return tmp_path / "weights.p"

    return save


def _four_views(published: dict[str, Tensor]) -> dict[str, Any]:
    """Return weights as Wu et al.'s file holds them: two extractors and more layers."""
    cc = {f"four_view_resnet.cc.{name}": array for name, array in published.items()}
    mlo = {f"four_view_resnet.mlo.{name}": array - 5 for name, array in published.items()}
    return {"model": cc | mlo | {"fc1_lcc.weight": torch.zeros(2, 2)}}


@pytest.mark.parametrize("form", ["four views", "one view", "bare"])
def test_the_extractor_of_a_file_is_taken_and_the_head_stays_the_seeds(
    form: str, published: dict[str, Tensor], saved: Callable[[Any], Path]
) -> None:
    prefixed = {f"view_resnet.{name}": array for name, array in published.items()}
    forms = {"four views": _four_views(published), "one view": prefixed, "bare": published}
    chosen = settings(saved(forms[form]))
    network, seeds = build_classifier(chosen, TASK), build_classifier(chosen, TASK)
    load_backbone(network, chosen)
    for name, array in network.encoder.state_dict().items():
        if array.is_floating_point():
            assert torch.equal(array, published[name]), name
    assert all(
        torch.equal(a, b)
        for a, b in zip(network.head.parameters(), seeds.head.parameters(), strict=True)
    )


def _with_head(published: dict[str, Tensor], view: str = "_lcc") -> dict[str, Any]:
    """Return the four-view file with a classifier of 32 channels: 32-32, then 8 logits."""
    layers = {
        f"fc1{view}.weight": 2 * torch.eye(32),
        f"fc1{view}.bias": torch.full((32,), -1.0),
        f"output_layer{view}.fc_layer.weight": torch.arange(8.0)[:, None].expand(8, 32),
        f"output_layer{view}.fc_layer.bias": torch.arange(8.0) * 10,
    }
    file = _four_views(published)
    return {"model": file["model"] | layers}


@pytest.mark.parametrize("view", ["_lcc", ""])
def test_the_published_classifier_is_two_layers_and_the_pair_of_malignancy(
    view: str, published: dict[str, Tensor], saved: Callable[[Any], Path]
) -> None:
    file = _with_head(published, view)
    if not view:
        del file["model"]["fc1_lcc.weight"]
    chosen = settings(saved(file), classifier="published")
    network = build_classifier(chosen, TASK)
    load_backbone(network, chosen)
    embedding = torch.full((1, 32), 0.25)
    embedding[0, 0] = 1.0  # relu(2 * 1 - 1) = 1, all others relu(2 * 0.25 - 1) = 0
    assert network.head(embedding).tolist() == [[2 + 20, 3 + 30]], "rows 2 and 3 of the 8"


def _no_head(file: dict[str, Any]) -> dict[str, Any]:
    return {"model": {n: a for n, a in file["model"].items() if not n.startswith("output")}}


def _narrow(file: dict[str, Any]) -> dict[str, Any]:
    return {"model": file["model"] | {"fc1_lcc.bias": torch.zeros(4)}}


def _broken(file: dict[str, Any]) -> dict[str, Any]:
    return {"model": file["model"] | {"fc1_lcc.bias": torch.full((32,), torch.inf)}}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_no_head, ["fc1_lcc.weight"]),
        (_narrow, [4, 32]),
        (_broken, ["0.bias", 32, "classifier", "seed"]),
    ],
)
def test_fill_published_head_of_a_broken_classifier_raises(
    spoil: Callable[[dict[str, Any]], dict[str, Any]],
    told: list[object],
    published: dict[str, Tensor],
    saved: Callable[[Any], Path],
) -> None:
    chosen = settings(saved(spoil(_with_head(published))), classifier="published")
    network = build_classifier(chosen, TASK)
    before = {name: array.clone() for name, array in network.head.state_dict().items()}
    with refuses(SettingError, *told):
        load_backbone(network, chosen)
    for name, array in network.head.state_dict().items():
        assert torch.equal(array, before[name]), "no part of a head is loaded alone"


def test_published_head_of_three_classes_raises() -> None:
    chosen = settings("weights.p", classifier="published")
    with refuses(SettingError, "3", "seed"):
        build_classifier(chosen, NetworkShape((1, 32, 32), 3))


def test_counters_that_old_files_lack_are_not_missed(
    published: dict[str, Tensor], saved: Callable[[Any], Path]
) -> None:
    old = {n: a for n, a in published.items() if not n.endswith("num_batches_tracked")}
    chosen = settings(saved(old))
    network = build_classifier(chosen, TASK)
    load_backbone(network, chosen)
    encoder = cast(ResNet22, network.encoder)
    assert torch.equal(encoder.first_conv.weight, published["first_conv.weight"])


def _lacking(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: a for n, a in weights.items() if n != "final_bn.weight"}


def _wide(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"first_conv.weight": torch.zeros(16, 1, 7, 7)}


def _infinite(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"final_bn.bias": weights["final_bn.bias"] / 0}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_lacking, [1]),
        (_wide, ["first_conv.weight", 16, 1, 7, 2, "width"]),
        (_infinite, ["final_bn.bias"]),
        (lambda _: {"weight": torch.zeros(2)}, []),
        (lambda weights: weights | {"more": torch.zeros(1)}, [1]),
    ],
)
def test_weights_of_another_network_are_refused(
    spoil: Callable[[Any], Any],
    told: list[object],
    published: dict[str, Tensor],
    saved: Callable[[Any], Path],
) -> None:
    chosen = settings(saved(spoil(published)))
    with refuses(SettingError, *told):
        load_backbone(build_classifier(chosen, TASK), chosen)


def test_a_missing_file_and_words_that_mean_a_vits_weights_are_refused(tmp_path: Path) -> None:
    network = build_classifier(settings(""), TASK)
    for name, told in ((tmp_path / "gone.p", "there is no"), ("timm", "come from a file")):
        with pytest.raises(SettingError, match=told):
            load_backbone(network, settings(name))


def test_backbone_digest_is_of_named_weights_and_empty_for_the_seeds(
    published: dict[str, Tensor], saved: Callable[[Any], Path]
) -> None:
    assert len(backbone_digest(settings(saved(published)))) == 64
    assert backbone_digest(settings("")) == ""
    assert backbone_digest(CommonSettings()) == ""


def test_a_run_starts_from_given_weights(
    published: dict[str, Tensor], saved: Callable[[Any], Path]
) -> None:
    from fedsilo.strategies.loop.method import initial_weights, starting_network

    found = initial_weights(starting_network(settings(saved(published)), TASK))
    given = published["first_conv.weight"].numpy()
    assert (found["encoder.first_conv.weight"] == given).all()


def test_weights_for_grey_images_are_not_taken_for_colours(
    published: dict[str, Tensor], saved: Callable[[Any], Path]
) -> None:
    chosen = settings(saved(published))
    with refuses(SettingError, 1, 3):
        load_backbone(build_classifier(chosen, NetworkShape((3, 32, 32), 2)), chosen)
    spoiled = settings(saved(published | {"final_bn.weight": [1.0]}))
    with pytest.raises(SettingError, match=r"1 arrays are missing .final_bn.weight."):
        load_backbone(build_classifier(spoiled, TASK), spoiled)
