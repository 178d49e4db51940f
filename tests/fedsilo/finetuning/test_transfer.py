"""What a network takes over from a run's model, or learns from it, and what is the seed's."""

import dataclasses
from typing import Any

import pytest
import torch

from fedsilo.client_app.training.compute import Compute
from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.finetuning.finetune import build_start
from fedsilo.finetuning.finetune_request import RunModel
from fedsilo.finetuning.tasks import Pooled, Segmentation, Study
from fedsilo.finetuning.transfer import (
    TransferReport,
    build_run_vit,
    distil,
    token_loss,
    transfer,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.segmentation.build_segmentation import build_segmentation
from tests.support.errors import refuses
from tests.support.tiny import VIT_FIELDS


def run_model(common: CommonSettings, task: NetworkShape, **more: Any) -> RunModel:
    """Return a run's model with arrays all of 7."""
    network = build_classifier(common, task)
    state = {n: t for n, t in network.state_dict().items() if t.is_floating_point()}
    arrays = {name: torch.full_like(tensor, 7.0) for name, tensor in state.items()}
    return dataclasses.replace(RunModel("run", common, arrays, ((), task.outputs), True), **more)


CPU = Compute(torch.device("cpu"), bf16=False)
SMALL = CommonSettings(width=2, device="cpu")


def test_what_does_not_fit_stays_as_the_seed_has_it_and_is_counted() -> None:
    given = run_model(SMALL, NetworkShape((3, 16, 16), 2))
    network = build_classifier(SMALL, NetworkShape((1, 16, 16), 2))
    before = network.encoder.stages[0].weight.clone()  # type: ignore[index,union-attr]
    report = transfer(network, given, SMALL, ((), 2))
    state = network.state_dict()
    assert report.left == ("encoder.stages.0.weight",), "grey images have another first layer"
    assert torch.equal(state["encoder.stages.0.weight"], before)
    below = {n: t for n, t in state.items() if n.startswith("encoder.") and t.is_floating_point()}
    numbers = sum(tensor.numel() for tensor in below.values())
    assert (report.arrays, report.of) == (len(below) - 1, len(below))
    assert report.share == pytest.approx(1 - 2 * 9 / numbers)
    assert all((t == 7).all() for n, t in below.items() if n not in report.left)
    assert report.head is True
    assert (state["head.4.weight"] == 7).all()
    assert "left to the seed: encoder.stages.0.weight" in report.summary()


@pytest.mark.parametrize("classes", [((), 3), (("a", "b"), 2)])
def test_a_head_for_other_classes_is_the_seed_s(classes: tuple[tuple[str, ...], int]) -> None:
    given = run_model(SMALL, NetworkShape((1, 16, 16), 2))
    network = build_classifier(SMALL, NetworkShape((1, 16, 16), classes[1]))
    report = transfer(network, given, SMALL, classes)
    assert report.head is False
    assert report.share == 1
    assert not (network.state_dict()["head.1.weight"] == 7).any()


def test_a_run_of_another_width_fits_nowhere_and_is_named() -> None:
    arrays = {"encoder.stages.0.weight": torch.zeros(9, 1, 3, 3)}
    given = run_model(SMALL, NetworkShape((1, 16, 16), 2), arrays=arrays)
    with refuses(SettingError, "1", "conv"):
        transfer(build_classifier(SMALL, NetworkShape((1, 16, 16), 2)), given, SMALL, ((), 2))


def test_starts_differ_in_nothing_but_what_they_took() -> None:
    images = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    part = Split(images, images[:, 0])
    pooled = Pooled(part, part, part, NetworkShape((1, 16, 16), 2), (), ("a",), ("a",))
    plan = Study(Segmentation("unet"), SMALL, pooled, CPU, seeds=1, epochs=1)
    scratch, nothing = build_start(plan, None, 0)
    given, report = build_start(plan, run_model(SMALL, NetworkShape((1, 16, 16), 2)), 0)
    assert nothing is None
    assert isinstance(report, TransferReport)
    others = [n for n in scratch.state_dict() if not n.startswith("pyramid.encoder.")]
    first, second = scratch.state_dict(), given.state_dict()
    assert len(others) > 10
    assert all(torch.equal(first[name], second[name]) for name in others)
    other, _ = build_start(plan, None, 1)
    assert not torch.equal(other.state_dict()["head.weight"], first["head.weight"])


VIT = CommonSettings(**{**VIT_FIELDS, "backbone_patch": 8, "train_backbone": True, "seed": 5})
OWN = CommonSettings(width=4, device="cpu", batch_size=4, optimiser="adamw", seed=1)


def run_of_a_vit() -> RunModel:
    vit = build_classifier(VIT, NetworkShape((1, 16, 16), 3))
    return RunModel("run", VIT, vit.state_dict(), ((), 3), has_backbone=True)


def test_the_loss_is_the_share_of_the_tokens_variance_that_is_not_explained() -> None:
    tokens = torch.tensor([[[[1.0, 3.0], [5.0, 1.0]]]])  # normalised: -1 1 and 1 -1
    assert token_loss(torch.zeros(1, 2, 1, 2), tokens).item() == pytest.approx(1, abs=1e-4)
    maps = torch.tensor([[[[-1.0, 1.0]], [[1.0, -1.0]]]])
    assert token_loss(maps, tokens).item() == pytest.approx(0, abs=1e-4)
    # One of two tokens is right, of the other nothing
    assert token_loss(maps * torch.tensor([1.0, 0.0]), tokens).item() == pytest.approx(
        0.5, abs=1e-4
    )
    finer = maps.repeat_interleave(2, dim=2)
    assert token_loss(finer, tokens).item() == pytest.approx(0, abs=1e-4)


def test_the_teacher_is_the_run_s_vit_resampled_to_the_images_and_fixed() -> None:
    run = run_of_a_vit()
    images = torch.randn(2, 1, 16, 16)
    teacher = build_run_vit(run, OWN, (1, 16, 16)).eval()
    own = build_classifier(VIT, NetworkShape((1, 16, 16), 3)).eval()
    assert isinstance(own, PromptedViT)
    own.load_state_dict(dict(run.arrays))
    assert torch.equal(teacher.encode_with_map(images)[1], own.encode_with_map(images)[1])
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert build_run_vit(run, OWN, (1, 24, 24)).grid_size() == (3, 3)


@pytest.mark.parametrize("kind", ["unet", "swin", "swinunet"])
def test_an_encoder_learns_what_the_vit_says_without_labels(kind: str) -> None:
    task = NetworkShape((1, 32, 32), 2)
    network = build_segmentation(kind, OWN, task)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (8, 1, 32, 32), generator=draw, dtype=torch.uint8)
    report = distil(network, run_of_a_vit(), Split(inputs, torch.zeros(8)), OWN, CPU, 6)
    assert len(report.losses) == 6
    assert report.losses[-1] < 0.95 * report.losses[0]
    changed = {
        n for n, tensor in network.state_dict().items() if not torch.equal(tensor, before[n])
    }
    of_way_up = ("decoder.", "head.", "expand.", "join.", "way_up.", "last_")
    assert changed
    assert not [name for name in changed if name.startswith(of_way_up)]
    assert f"{100 * (1 - report.losses[-1]):.1f} % of their variance" in report.summary()


def test_the_same_seed_learns_the_same() -> None:
    inputs = torch.arange(4 * 32 * 32).reshape(4, 1, 32, 32).to(torch.uint8)
    images = Split(inputs, torch.zeros(4))

    def learned() -> torch.Tensor:
        network = build_segmentation("unet", OWN, NetworkShape((1, 32, 32), 2))
        distil(network, run_of_a_vit(), images, OWN, CPU, 1)
        return network.coarsest(torch.ones(1, 1, 32, 32))

    torch.rand(1)
    assert torch.equal(learned(), learned())
