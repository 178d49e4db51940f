"""FedEvPrompt (Hendrix et al. 2024): evidential prompt tuning; sites share attention maps.

Equations (arXiv:2411.10071):
  (1) prefix prompts -> models.networks.prefix_attention.prefix_attention
  (2) total loss -> client_app.methods.fedevprompt.FedEvPromptSite.train
  (3) prior by class counts -> models.maths.dirichlet.skewed_prior
  (4) evidential loss -> models.maths.dirichlet.evidential_loss
  (4, first term) expected squared error -> models.maths.dirichlet.evidential_mse
  (5) divergence from the prior -> models.maths.dirichlet.dirichlet_kl
  (6) who enters the buffer -> models.methods.fedevprompt.most_certain
  (7) distillation -> models.maths.attention_rollout.distillation_loss
  (7, scale of the maps) sum or maximum -> models.maths.attention_rollout.scaled_maps
  (belief) belief masses -> models.maths.dirichlet.belief
  (u) vacuity -> models.maths.dirichlet.vacuity
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import AUTO, CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION

MAPS = "maps/"  # maps/<class> from a site, maps/<site>/<class> to one
BUFFER = "buffer/"  # buffer/<site>/<class> at the server
_SUM_TOLERANCE = 1e-3  # a map is a product of float32 softmaxes, so its sum is not exactly 1


@dataclass(frozen=True)
class FedEvPromptSettings(OwnSettings):
    """Settings of FedEvPrompt: sites share maps and, in the paper's ablation (table 2), prompts."""

    title = "FedEvPrompt"
    tasks = (CLASSIFICATION,)
    why_tasks = "sends attention maps of each class, chosen by evidence"
    server = "fedsilo.strategies.methods.fedevprompt:FedEvPrompt"
    site = "fedsilo.client_app.methods.fedevprompt:FedEvPromptSite"
    why_not_private = "sends attention maps of single images, which no noise hides"

    shared_prompts: Literal["none", "b", "all"] = setting(
        "none", "averaged over sites: nothing, b-prompts, or all prompts and the head"
    )
    distillation_weight: float = setting(
        1e-6, "weight lambda of distillation, or 0 so that no map leaves a site", ge=0.0
    )
    map_scale: Literal["sum", "max", "byte"] = setting(
        "sum", "of maps in the distillation: each sums to 1, or has the maximum 1, or 255 (byte)"
    )
    map_prompts: Literal["renormalise", "drop"] = setting(
        "renormalise",
        "a layer's attention to prompts in a map: renormalise, the rest sums to 1, or drop",
    )
    buffer_maps: int = setting(
        5, "maps M of a site and class in the buffer, each of one image", ge=1, le=50
    )
    buffer_selection: Literal["uncertainty", "random"] = setting(
        "uncertainty", "which training samples' maps: of the lowest vacuity, or any"
    )

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that the run trains prompts of a frozen ViT with an evidential loss.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: in one of these cases:

                - The network is not a ViT, has no prompts, or trains its backbone.
                - 'train.loss' is 'cross-entropy'.
                - 'shared-prompts' is 'none', which averages nothing, but 'server.aggregation' is
                  neither 'auto' nor 'mean'.
                - 'shared-prompts' is 'b', but 'vit.prompt-sets' is 'g', which has no prompts b.
        """
        if common.network != "vit" or common.prompt_sets == "none" or common.train_backbone:
            raise SettingError(
                "method 'fedevprompt' prompts a frozen ViT: set 'network.name' to 'vit', "
                "'vit.prompt-sets' to 'b-t' or 'g', and 'vit.train-backbone' to false"
            )
        if common.loss == "cross-entropy":
            raise SettingError(
                "setting 'train.loss' is 'cross-entropy': method 'fedevprompt' is evidential; "
                "leave it at 'auto'"
            )
        # A user who sets a robust rule would believe that it protects something
        if self.shared_prompts == "none" and common.aggregation not in (AUTO, "mean"):
            raise SettingError(
                f"setting 'server.aggregation' is '{common.aggregation}' and "
                "'fedevprompt.shared-prompts' 'none', which averages nothing: leave it at 'mean'"
            )
        if self.shared_prompts == "b" and common.prompt_sets == "g":
            raise SettingError(
                "setting 'fedevprompt.shared-prompts' is 'b' and 'vit.prompt-sets' is 'g', which "
                "has no b-prompts: set 'vit.prompt-sets' to 'b-t', or 'fedevprompt.shared-prompts' "
                "to 'all'"
            )


def shared_names(settings: FedEvPromptSettings, names: list[str]) -> list[str]:
    """Select the exchanged arrays that the server averages over sites.

    Args:
        settings: 'shared-prompts' decides. ``all`` selects every array, and ``none`` no array.
            ``b`` selects only ``prompts.b``, the prompts of the first layers.
        names: the names of the exchanged arrays.

    Returns:
        The selected names, which may be an empty list.
    """
    if settings.shared_prompts == "all":
        return names
    if settings.shared_prompts == "b" and "prompts.b" in names:
        return ["prompts.b"]
    return []


def most_certain(vacuities: Tensor, labels: Tensor, label: int, count: int) -> Tensor:
    """Return the indices of the most certain samples of class ``label``, the most certain first.

    A low vacuity, which means much evidence, makes a sample certain. Of samples with equal vacuity
    the earlier one comes first.

    Args:
        vacuities: the vacuity of each sample, (n,).
        labels: the class of each sample, (n,) int64.
        label: the class.
        count: the most indices. If the class has fewer samples, all are returned.
    """
    of_class = torch.nonzero(labels == label).flatten()
    # A stable sort keeps the samples' order where vacuities are equal
    return of_class[torch.argsort(vacuities[of_class], stable=True)[:count]]


def any_of_class(labels: Tensor, label: int, count: int, rng: torch.Generator) -> Tensor:
    """Draw the indices of ``count`` random samples of class ``label``; all if there are fewer."""
    of_class = torch.nonzero(labels == label).flatten()
    return of_class[torch.randperm(len(of_class), generator=rng)[:count]]


def map_fault(maps: Tensor) -> str | None:
    """Describe the first fault of an array that should contain rollout maps, or return None.

    ``maps`` (n, cells) must be finite and not negative. Each map must sum to 1 within 0.001.
    """
    if not maps.isfinite().all():
        return "a map contains non-finite values"
    if (maps < 0).any():
        return f"a map has a negative value ({maps.min().item():.3g})"
    # float64, so only the sender's own rounding is measured
    for total in maps.double().sum(dim=-1).tolist():
        if abs(total - 1) > _SUM_TOLERANCE:
            return f"a map sums to {total:.4g}, not to 1"
    return None
