"""Weights that are refused when a run begins, and their fixes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from fedsilo.core.files.state_files import save_state
from fedsilo.datasets.registry import silo_names
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.resnet22 import ResNet22
from fedsilo.server_app.config.settings import resolve
from tests.support.fixes import PHANTOM, Case, Changes, Values, changed, check, tiny
from tests.support.tiny import VIT

SIZES: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
# A ViT of timm's with nothing of it changed
PLAIN: Values = {
    "network.name": "vit",
    "vit.backbone": "vit_tiny_patch16_224",
    "vit.prompt-length": 1,
    "vit.basic-layers": 1,
    "train.local-epochs": 1,
    "train.mc-passes": 0,
}
ON_DIGITS: Values = {**tiny("fedavg", rounds=1, mc_passes=0), "split.silo-train-size": 10}
FROZEN: Values = {**ON_DIGITS, **VIT}
TRAINED: Values = {**ON_DIGITS, **VIT, "vit.train-backbone": True}
OF_THE_WIDE: Changes = {"vit.backbone-width": 32}
OF_THE_DEEP: Changes = {"vit.backbone-depth": 3}
# A ResNet-22 that begins with a file's weights, and its classifier
RADIOGRAPHS: Values = {
    **PHANTOM,
    "dataset": "mammography-phantom",
    "split.sample-share": 0.02,
    "data.image-size": 32,
    "method": "fedavg",
    "network.name": "resnet22",
    "network.width": 2,
    "network.classifier": "published",
    "rounds": 1,
    "train.local-epochs": 1,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}

CASES = [
    Case(
        "does not contain a classifier ('fc1_lcc.weight' is missing): name Wu et al.'s",
        {**RADIOGRAPHS, "backbone-weights": "headless"},
        {
            "name Wu et al.'s sample_image_model.p in 'vit.backbone-weights'": {
                "backbone-weights": "headed"
            },
            "set 'network.classifier' to 'seed'": {"classifier": "seed"},
        },
    ),
    Case(
        "or not finite: set 'network.classifier' to 'seed'",
        {**RADIOGRAPHS, "backbone-weights": "other-head"},
        {"set 'network.classifier' to 'seed'": {"classifier": "seed"}},
    ),
    Case(
        "'published', which has two classes, malignant or not, but the data",
        {
            **ON_DIGITS,
            "network": "resnet22",
            "width": 2,
            "classifier": "published",
            "backbone-weights": "headed",
        },
        {"set it to 'seed'": {"classifier": "seed"}},
    ),
    Case(
        "the sites would have images that it has seen; set 'split.public-share' to the same",
        {
            **PHANTOM,
            "split.sample-share": 0.01,
            **VIT,
            "vit.backbone-weights": "seen",
            "vit.backbone-patch": 8,
            "method": "fedavg",
            "rounds": 1,
            "train.local-epochs": 1,
            "train.mc-passes": 0,
            "machine.device": "cpu",
        },
        {"set 'split.public-share' to the same": {"split.public-share": 0.3}},
    ),
    Case(
        "set 'vit.backbone' and 'vit.backbone-...' to those of the weights, or name other weights",
        {**FROZEN, "backbone-weights": "wide"},
        {
            "'vit.backbone-...' to those of the weights": OF_THE_WIDE,
            "or name other weights": {"backbone-weights": "fitting"},
        },
    ),
    Case(
        "'vit.backbone-...' to those of the weights, or name other weights",
        {**ON_DIGITS, **PLAIN, "backbone-weights": "named"},
        {"set 'vit.backbone'": {"backbone": "test_vit"}},
    ),
    Case(
        "arrays of the blocks are not in it",
        {**TRAINED, "train.initial-weights": "deep", "vit.backbone-depth": 4},
        {
            "'vit.backbone-...' to those of the weights": OF_THE_DEEP,
            "or name other weights": {"train.initial-weights": "fitting", "vit.backbone-depth": 2},
        },
    ),
    Case(
        "set 'vit.backbone' and 'vit.backbone-...' to those of the",
        {
            **ON_DIGITS,
            **PLAIN,
            "vit.backbone-weights": "random",
            "vit.train-backbone": True,
            "train.initial-weights": "named",
        },
        {"set 'vit.backbone'": {"backbone": "test_vit"}},
    ),
]


def _vit(name: str = "vit_tiny_patch16_224", **changes: Any) -> dict[str, Any]:
    vit = timm.create_model(name, num_classes=0, img_size=16, in_chans=1, **changes)
    return {key: tensor.clone() for key, tensor in vit.state_dict().items()}


def _write_seen(path: Path) -> None:
    vit = _vit(**SIZES | {"patch_size": 8})
    arrays = {name: tensor.numpy() for name, tensor in vit.items()}
    save_state(path, arrays, {"data": ["angiogram-phantom", 0.3, 10]})


def _radiograph(head: int = 0) -> dict[str, Any]:
    """Return a ResNet-22 of width 2; ``head``: numbers of its classifier's hidden layer."""
    resnet = ResNet22(in_channels=1, width=2).state_dict()
    state = {f"view_resnet.{name}": array.clone() for name, array in resnet.items()}
    if head:
        state |= {"fc1.weight": torch.eye(head), "fc1.bias": torch.zeros(head)}
        state |= {"output_layer.fc_layer.weight": torch.zeros(4, head)}
        state |= {"output_layer.fc_layer.bias": torch.zeros(4)}
    return state


FILES: dict[str, Callable[[Path], None]] = {
    "seen": _write_seen,
    "fitting": lambda path: save_file(_vit(**SIZES), path),
    "wide": lambda path: save_file(_vit(**SIZES | {"embed_dim": 32}), path),
    "deep": lambda path: save_file(_vit(**SIZES | {"depth": 3}), path),
    "named": lambda path: save_file(_vit("test_vit"), path),
    "headless": lambda path: save_file(_radiograph(), path),
    "headed": lambda path: save_file(_radiograph(head=32), path),
    "other-head": lambda path: save_file(_radiograph(head=4), path),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_with_refused_weights_and_fix_ends(case: Case, tmp_path: Path) -> None:
    names = iter(range(10))

    def attempt(values: Values) -> None:
        run_name = f"run{next(names)}"
        named: dict[str, Any] = {"run.out": str(tmp_path), "run.name": run_name, "rounds": 1}
        for key in ("vit.backbone-weights", "train.initial-weights"):
            if (name := values.get(key)) in FILES:
                path = tmp_path / f"{name}.safetensors"
                FILES[str(name)](path)
                named[key] = str(path)
        settings = resolve(changed(values, named))
        run_inline(settings, len(silo_names(settings.common)))

    check(case, attempt)
