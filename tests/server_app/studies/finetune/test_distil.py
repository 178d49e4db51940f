"""A network that learns a ViT's tokens, by numbers one can check by hand."""

import pytest
import torch

from fedsilo.client_app.training.compute import Compute
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.segmentation.build import build_segmentation
from fedsilo.server_app.studies.finetune.distil import distil, token_loss, vit_of
from fedsilo.server_app.studies.finetune.weights import RunModel
from tests.support.tiny import VIT_FIELDS

CPU = Compute(torch.device("cpu"), bf16=False)
VIT = CommonSettings(**{**VIT_FIELDS, "backbone_patch": 8, "train_backbone": True, "seed": 5})
OWN = CommonSettings(width=4, device="cpu", batch_size=4, optimiser="adamw", seed=1)


def run_of_a_vit() -> RunModel:
    vit = build_classifier(VIT, Task((1, 16, 16), 3))
    return RunModel("run", "fedefm", VIT, vit.state_dict(), ((), 3), has_backbone=True)


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
    teacher = vit_of(run, OWN, (1, 16, 16)).eval()
    own = build_classifier(VIT, Task((1, 16, 16), 3)).eval()
    assert isinstance(own, PromptedViT)
    own.load_state_dict(dict(run.arrays))
    assert torch.equal(teacher.encode_with_map(images)[1], own.encode_with_map(images)[1])
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert vit_of(run, OWN, (1, 24, 24)).grid_size() == (3, 3)


@pytest.mark.parametrize("kind", ["unet", "swin", "swinunet"])
def test_an_encoder_learns_what_the_vit_says_without_labels(kind: str) -> None:
    task = Task((1, 32, 32), 2)
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
        network = build_segmentation("unet", OWN, Task((1, 32, 32), 2))
        distil(network, run_of_a_vit(), images, OWN, CPU, 1)
        return network.coarsest(torch.ones(1, 1, 32, 32))

    torch.rand(1)
    assert torch.equal(learned(), learned())
