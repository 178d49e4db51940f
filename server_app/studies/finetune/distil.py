"""Distil a ViT into a network that takes none of its arrays.

The FedEFM paper initialises UNet and SwinUnet from its foundation ViT and does not say how. Here
the encoder's last map, through one linear layer that is dropped afterwards, learns to predict the
ViT's token of each patch (Romero et al. 2015, FitNets, equation 3), each token normalised over its
channels (Wei et al. 2022, feature distillation). It uses the training images, without labels.
"""

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.seeding import seeded
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import keys_with
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.segmentation.pyramids import Segmenter, resized
from fedsilo.server_app.studies.finetune.tasks import cosine_epochs
from fedsilo.server_app.studies.finetune.transfer import transfer
from fedsilo.server_app.studies.finetune.weights import RunModel


@dataclass(frozen=True)
class DistilReport:
    """How a network learned a ViT's tokens."""

    losses: tuple[float, ...]  # by epoch: the share of the tokens' variance left unexplained

    def summary(self) -> str:
        """Return it in one line."""
        return (
            f"its ViT's tokens were distilled into the encoder for {len(self.losses)} epochs: "
            f"{100 * (1 - self.losses[-1]):.1f} % of their variance explained"
        )


def distil(
    network: Segmenter,
    source: RunModel,
    images: Split,
    settings: CommonSettings,
    compute: Compute,
    epochs: int,
) -> DistilReport:
    """Teach the encoder of ``network``, in place, the tokens of a run's ViT; labels are ignored.

    Raises:
        SettingError: the ViT does not take images of this size.
    """
    shape = tuple(images.inputs.shape[1:])
    teacher = compute.place(vit_of(source, settings, shape)).eval()
    with torch.no_grad():
        channels = network.coarsest(compute.bring(images.inputs[:2]).float()).shape[1]
    with seeded(settings.seed, "distil"):
        project = compute.place(nn.Conv2d(channels, teacher.vit.embed_dim, 1))

    def objective(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            tokens = teacher.encode_with_map(inputs)[1]
        return token_loss(project(network.coarsest(inputs)), tokens)

    both = nn.ModuleList([network, project])
    losses = cosine_epochs(
        both, objective, images, settings, compute, epochs=epochs, purpose="distil"
    )
    return DistilReport(tuple(losses))


def token_loss(maps: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean squared distance of maps (batch, c, ., .) from tokens (batch, r, k, c).

    Tokens are normalised over their channels, so that maps of zeros have a loss of 1.
    """
    wanted = nn.functional.layer_norm(tokens.float(), tokens.shape[-1:])
    given = resized(maps.float(), tokens.shape[1:3]).permute(0, 2, 3, 1)
    return nn.functional.mse_loss(given, wanted)


def vit_of(source: RunModel, settings: CommonSettings, input_shape: tuple[int, ...]) -> PromptedViT:
    """Return a run's ViT, frozen, for images of ``input_shape``; SettingError if it has no fit."""
    fields = [key.replace("-", "_") for key in keys_with(CommonSettings, "network")]
    of_run = {field: getattr(source.common, field) for field in fields}
    own = of_run | {"network": "vit", "train_backbone": True, "backbone_weights": "random"}
    common = dataclasses.replace(settings, **own)
    vit = cast(PromptedViT, build_classifier(common, Task(input_shape, source.classes[1])))
    transfer(vit, source, common, source.classes)
    return vit.requires_grad_(False)
