"""Initial weights: a run's model must fit, of another ViT the blocks must."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.errors import refuses

TASK = NetworkShape((1, 16, 16), 3)
CONV = CommonSettings(network="conv", width=4, seed=1)
VIT = CommonSettings(
    network="vit",
    backbone_weights="random",
    backbone_width=16,
    backbone_depth=2,
    backbone_heads=2,
    backbone_patch=4,
    prompt_sets="none",
    train_backbone=True,
    seed=1,
)


def _from(settings: CommonSettings, path: Path | str) -> CommonSettings:
    return dataclasses.replace(settings, initial_weights=str(path), seed=2)


def test_a_runs_model_is_taken_array_by_array(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    wanted = exchanged_arrays(build_classifier(CONV, TASK))
    save_file({name: array.clone() for name, array in wanted.items()}, path)
    settings = _from(CONV, path)
    network = build_classifier(settings, TASK)
    assert not torch.equal(exchanged_arrays(network)["head.1.weight"], wanted["head.1.weight"])
    load_initial_weights(network, settings)
    assert all(torch.equal(found, wanted[n]) for n, found in exchanged_arrays(network).items())
    wider = dataclasses.replace(settings, width=8)
    with pytest.raises(SettingError, match=r"'encoder.* is \(4, .*give the run the network"):
        load_initial_weights(build_classifier(wider, TASK), wider)


def test_of_another_vit_the_blocks_are_taken_by_sams_names(tmp_path: Path) -> None:
    path = tmp_path / "sam.safetensors"
    own = build_classifier(VIT, TASK).get_submodule("encoder.vit").state_dict()
    blocks = {n: a.clone() for n, a in own.items() if n.startswith("blocks.")}
    named = {f"image_encoder.{n.replace('mlp.fc', 'mlp.lin')}": a for n, a in blocks.items()}
    save_file({**named, "image_encoder.neck.0.weight": torch.zeros(3)}, path)
    settings = _from(VIT, path)
    network = build_classifier(settings, TASK)
    before = network.get_submodule("encoder.vit").state_dict()["cls_token"].clone()
    load_initial_weights(network, settings)
    found = network.get_submodule("encoder.vit").state_dict()
    assert all(torch.equal(found[name], array) for name, array in blocks.items())
    assert torch.equal(found["cls_token"], before), "what does not fit stays"
    named.popitem()
    save_file(named, path)
    with refuses(SettingError, 1, 24):
        load_initial_weights(network, settings)


def test_refusals(tmp_path: Path) -> None:
    with refuses(SettingError, "none.safetensors"):
        load_initial_weights(
            build_classifier(CONV, TASK), _from(CONV, tmp_path / "none.safetensors")
        )
    path = tmp_path / "other.safetensors"
    save_file({"blocks.0.norm1.weight": torch.ones(4)}, path)
    with refuses(SettingError, "network", "vit", "vit.train-backbone"):
        load_initial_weights(build_classifier(CONV, TASK), _from(CONV, path))
    broken = {n: a.clone() for n, a in exchanged_arrays(build_classifier(CONV, TASK)).items()}
    broken["head.1.bias"][0] = float("nan")
    save_file(broken, path)
    with refuses(SettingError, "head.1.bias"):
        load_initial_weights(build_classifier(CONV, TASK), _from(CONV, path))


VGG = CommonSettings(network="vgg16-bn", width=4, seed=1)
COLOUR = NetworkShape((3, 32, 32), 3)


def test_vggs_features_come_from_timm_or_a_file_and_the_head_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = build_classifier(VGG, COLOUR).encoder.state_dict()
    given = {**published, "head.fc.weight": torch.zeros(1000, 8)}
    asked = []

    def timms(name: str, key: str) -> dict[str, torch.Tensor]:
        asked.append((name, key))
        return given

    monkeypatch.setattr("fedsilo.datasets.weights.initial_weights.timm_state", timms)
    path = tmp_path / "vgg16_bn.pth"
    torch.save(given, path)
    for named in ("timm:vgg16_bn", path):
        settings = _from(VGG, named)
        network = build_classifier(settings, COLOUR)
        head = network.head.state_dict()["1.weight"].clone()
        load_initial_weights(network, settings)
        found = network.encoder.state_dict()
        assert all(torch.equal(found[name], array) for name, array in published.items())
        assert torch.equal(network.head.state_dict()["1.weight"], head)
    assert asked == [("vgg16_bn", "train.initial-weights")]
    with refuses(SettingError, "network", "vgg16-bn", "width", "128"):
        load_initial_weights(build_classifier(CONV, TASK), _from(CONV, path))
    wider = dataclasses.replace(_from(VGG, path), width=8)
    with refuses(SettingError, "width", "4"):
        load_initial_weights(build_classifier(wider, COLOUR), wider)


def test_a_runs_vgg_is_taken_with_its_head(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    wanted = exchanged_arrays(build_classifier(VGG, COLOUR))
    save_file({name: array.clone() for name, array in wanted.items()}, path)
    settings = _from(VGG, path)
    network = build_classifier(settings, COLOUR)
    load_initial_weights(network, settings)
    assert all(torch.equal(found, wanted[n]) for n, found in exchanged_arrays(network).items())


def test_of_a_run_on_other_classes_the_encoder_is_taken_and_the_head_from_the_seed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    of_run = exchanged_arrays(build_classifier(CONV, NetworkShape((1, 16, 16), 5)))
    save_file({name: array.clone() for name, array in of_run.items()}, path)
    settings = _from(CONV, f"encoder:{path}")
    network = build_classifier(settings, TASK)
    before = {name: array.clone() for name, array in exchanged_arrays(network).items()}
    load_initial_weights(network, settings)
    found = exchanged_arrays(network)
    encoder = [name for name in found if name.startswith("encoder.")]
    assert encoder
    assert all(torch.equal(found[name], of_run[name]) for name in encoder)
    head = [name for name in found if name not in encoder]
    assert head
    assert all(torch.equal(found[name], before[name]) for name in head)
    wider = dataclasses.replace(settings, width=8)
    with pytest.raises(SettingError, match=r"'encoder.* is \(4, .*give the run the network"):
        load_initial_weights(build_classifier(wider, TASK), wider)
    save_file({encoder[0]: of_run[encoder[0]].clone()}, path)
    with pytest.raises(SettingError, match=rf"lacks {len(encoder) - 1} of {len(encoder)} arrays"):
        load_initial_weights(network, settings)
