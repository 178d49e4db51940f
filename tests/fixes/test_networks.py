"""Networks that do not fit their data, weights or solver, and their fixes."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsilo.cli.main import main
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import silo_names
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.methods.fedefm import FedEFMSettings, batch_closeness, multishot_loss
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import VggEncoder
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.resnet22 import ResNet22
from fedsilo.models.networks.segmentation.build_segmentation import build_segmentation
from fedsilo.server_app.config.settings import resolve
from tests.support.colour import write_cifar10
from tests.support.fixes import HEART, PHANTOM, Case, Values, changed, check, refused, tiny
from tests.support.made_data import write_idx
from tests.support.tiny import VIT, VIT_FIELDS

# Parts of the errors that the functions below try
TRIED = (
    "network 'vit' takes grey or colour images, but",
    "Swin Transformers take images whose sides are multiples",
    "network 'unet' divides images by 8",
    "network 'transunet' halves images until a patch",
    "the feature map of the",
    "transport costs or masses contain non-finite values",
    "so the closeness is not reliable",
)
DIGITS: Values = {**tiny("fedavg", rounds=1, mc_passes=0), "split.silo-train-size": 10}
COLOUR: Values = {**DIGITS, "dataset": "cifar10", "split.silos": 2, "split.silo-test-size": 2}
ANGIOGRAMS: Values = {
    **PHANTOM,
    "method": "fedavg",
    "rounds": 1,
    "train.mc-passes": 0,
    "network.width": 4,
}
ANGIOGRAMS = {**ANGIOGRAMS, "train.local-epochs": 1, "split.sample-share": 0.01}
LARGE_MAPS: Values = {**ANGIOGRAMS, "method": "fedefm", "data.image-size": 48}

CASES = [
    Case(
        "does not take data set 'heart-synthetic', which is",
        {
            **HEART,
            "method": "fedavg",
            "network.name": "vgg16-bn",
            "rounds": 1,
            "train.local-epochs": 1,
        },
        {"'network.name' to logistic": {"network": "logistic"}, "or mlp": {"network": "mlp"}},
    ),
    Case(
        "does not take data set 'cifar10', which is",
        {**COLOUR, "network": "logistic"},
        {
            "'network.name' to conv": {"network": "conv"},
            "or vgg16-bn": {"network": "vgg16-bn"},
            "or resnet22": {"network": "resnet22"},
            "or vit": VIT,
        },
    ),
    Case(
        "doubles the head of fedsilo's own networks",
        {**DIGITS, **tiny("distrans", rounds=1, mc_passes=0), "network": "timm:resnet10t"},
        {"another 'network.name'": {"network": "conv"}},
    ),
    Case(
        "which leaves nothing of 16x16 pixels: choose another 'network.name'",
        {**DIGITS, "network": "vgg16-bn"},
        {"choose another 'network.name'": {"network": "conv"}},
    ),
    Case(
        "pixels do not divide images of",
        {**ANGIOGRAMS, **VIT, "data.image-size": 20, "vit.backbone-patch": 16},
        {
            "'vit.backbone-patch' to a divisor": {"vit.backbone-patch": 10},
            "'data.image-size' to a multiple": {"data.image-size": 32},
        },
    ),
    Case(
        "do not divide images of",
        {**DIGITS, **VIT, "dataset": "mnist", "vit.backbone-patch": 16},
        {"set 'vit.backbone-patch' to a divisor": {"vit.backbone-patch": 6}},
    ),
    Case(
        ": choose network 'conv'",
        {**DIGITS, "dataset": "mnist", "network": "resnet22"},
        {"choose network 'conv'": {"network": "conv"}},
    ),
    Case(
        "set 'network.width' to that of the weights, 2",
        {**DIGITS, "network": "resnet22", "backbone-weights": "resnet22.pt"},
        {"set 'network.width' to that of the weights": {"width": 2}},
    ),
    Case(
        "PyTorch may fail in layers of network",
        {
            **DIGITS,
            "network.name": "resnet22",
            "network.width": 2,
            "machine.memory-format": "channels-last",
        },
        {"set it to 'auto'": {"machine.memory-format": "auto"}},
    ),
    Case(
        "set 'network.width' to that of the weights, 8",
        {**COLOUR, "network.name": "vgg16-bn", "train.initial-weights": "vgg.pt"},
        {"set 'network.width' to that of the weights, 8": {"width": 8}},
    ),
    Case(
        "solver 'cvxpylayers' is for maps of up to",
        {**LARGE_MAPS, "fedefm.emd-solver": "cvxpylayers"},
        {
            "choose 'fedefm.emd-solver' 'pot'": {"fedefm.emd-solver": "pot"},
            "a smaller 'fedefm.emd-grid'": {"fedefm.emd-grid": 2},
        },
    ),
]


def write_inputs(folder: Path) -> None:
    """Write small colour images, grey ones of 12 pixels a side, and weights of two networks."""
    write_cifar10(folder)
    for part in ("train", "t10k"):
        images = torch.arange(60 * 12 * 12).reshape(60, 12, 12).to(torch.uint8).numpy()
        write_idx(folder / "mnist" / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / "mnist" / f"{part}-labels-idx1-ubyte.gz", images[:, 0, 0] % 10)
    torch.save(ResNet22(in_channels=1, width=2).state_dict(), folder / "resnet22.pt")
    torch.save(VggEncoder(in_channels=3, width=8).state_dict(), folder / "vgg.pt")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_with_fitting_network_ends(case: Case, tmp_path: Path) -> None:
    names = iter(range(10))
    write_inputs(tmp_path)

    def attempt(values: Values) -> None:
        named = {
            "run.out": str(tmp_path),
            "data.dir": str(tmp_path),
            "run.name": f"run{next(names)}",
            "rounds": 1,
        }
        settings = resolve(changed(values, named))
        run_inline(settings, len(silo_names(settings.common)))

    check(case, attempt)


def test_two_channel_images_with_other_network_than_vit_run() -> None:
    def build(**more: Any) -> None:
        build_classifier(CommonSettings(**{**VIT_FIELDS, **more}), NetworkShape((2, 16, 16), 3))

    assert "has 2 channels: choose another 'network.name'" in refused(build)
    assert not refused(lambda: build(network="conv", width=4))


def test_segmentation_of_larger_images_runs() -> None:
    settings = CommonSettings(width=4)
    said = refused(lambda: build_segmentation("unet", settings, NetworkShape((1, 7, 7), 2)))
    assert "leaves nothing of 7x7 pixels: set 'data.image-size'" in said
    assert not refused(lambda: build_segmentation("unet", settings, NetworkShape((1, 16, 16), 2)))


def test_segmentation_with_patches_that_can_be_halved_to_runs() -> None:
    def build(patch: int, kind: str = "transunet") -> None:
        settings = CommonSettings(**{**VIT_FIELDS, "backbone_patch": patch, "width": 4})
        build_segmentation(kind, settings, NetworkShape((1, 48, 48), 2))

    said = refused(lambda: build(6))
    assert "have 6 pixels: set 'vit.backbone-patch' to 8 or 16, or choose another network" in said
    assert not any(refused(lambda patch=patch: build(patch)) for patch in (8, 16))
    assert not refused(lambda: build(6, "vit"))


def test_swin_with_fitting_images_or_other_network_is_finetuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", "--task", "segmentation", "--weights", "scratch", "--site", "human"]
    words += ["--dataset", "angiogram-phantom", "--set", "split.sample-share=0.08", "--seeds", "1"]
    words += ["--epochs", "1", "--device", "cpu", "--set", "network.width=4"]

    def said(network: str, size: int) -> str:
        more = ["--network", network, "--set", f"data.image-size={size}"]
        main([*words, *more, "--out", str(tmp_path / f"{network}-{size}")])
        return capsys.readouterr().err

    told = said("swin", 20)
    assert "these are 20x20: set 'data.image-size', or choose another network" in told
    assert not said("swin", 16)
    assert not said("unet", 20)


def test_distillation_at_lower_rate_does_not_diverge() -> None:
    draw = torch.Generator().manual_seed(3)
    images, labels = torch.randn(8, 1, 16, 16, generator=draw), torch.arange(8)

    def distil(rate: float) -> None:
        settings = (CommonSettings(width=4, seed=seed) for seed in (1, 2))
        own, expert = (build_classifier(each, NetworkShape((1, 16, 16), 10)) for each in settings)
        optimiser = torch.optim.SGD(expert.parameters(), lr=rate)
        torch.autograd.backward(expert.loss(images, labels))
        optimiser.step()
        multishot_loss(own, {"s2a": expert.eval()}, images, labels, FedEFMSettings())

    said = refused(lambda: distil(1e12))
    assert "the feature map of the teacher contains non-finite values" in said
    assert "its training diverged: lower 'train.learning-rate'" in said
    assert not refused(lambda: distil(0.001))


def test_emd_of_moderate_maps_is_computed_and_of_diverged_maps_refused() -> None:
    maps = torch.randn(2, 2, 2, 16, generator=torch.Generator().manual_seed(0))
    said = refused(lambda: batch_closeness(1e25 * maps, 1e25 * maps, FedEFMSettings()))
    assert "costs or masses contain non-finite values, because one of" in said
    assert "diverged: lower 'train.learning-rate'" in said
    assert not refused(lambda: batch_closeness(maps, 10 * maps, FedEFMSettings()))


def test_emd_that_sinkhorn_cannot_solve_with_exact_solver_is_computed() -> None:
    own = torch.randn(2, 2, 2, 16, generator=torch.Generator().manual_seed(0))
    near = own + 0.01 * torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    with pytest.warns(RuntimeWarning, match="not reliable: choose 'fedefm.emd-solver' 'po"):
        batch_closeness(own, near, FedEFMSettings(emd_solver="sinkhorn"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        closeness = batch_closeness(own, near, FedEFMSettings(emd_solver="pot"))
    assert 0.99 < float(closeness) < 1
