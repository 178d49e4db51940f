"""How weights are transferred: copied into a new network array by array, and reported."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.studies.finetune.weights import Classes, RunModel, Source

_HEAD = "head."


@dataclass(frozen=True)
class TransferReport:
    """What a network took from pretrained weights."""

    arrays: int  # how many arrays of the encoder it took,
    of: int  # of how many
    share: float  # the share of the encoder's numbers in them
    left: tuple[str, ...]  # arrays of the encoder that keep the seed's values
    head: bool = False  # whether the head is the run's
    backbone: str = ""  # the frozen backbone loaded beside the run's arrays, or empty

    def summary(self) -> str:
        """Return it in one line."""
        share = f"{100 * self.share:.1f} % of its numbers"
        parts = [f"gives {self.arrays} of the encoder's {self.of} arrays, {share}"]
        if self.backbone:
            parts.append(f"a backbone from '{self.backbone}', as the run's")
        if self.head:
            parts.append("its head")
        if self.left:
            parts.append(f"left to the seed: {', '.join(self.left[:3])}")
        return "; ".join(parts)


def transfer(
    trunk: nn.Module, source: Source, settings: CommonSettings, classes: Classes
) -> TransferReport:
    """Copy what fits of the weights of ``source`` into ``trunk``, whose arrays have a run's names.

    Raises:
        SettingError: nothing fits, or they are of another architecture.
    """
    if isinstance(source, RunModel):
        return _transfer_run(trunk, source, settings, classes)
    before = {name: tensor.clone() for name, tensor in _encoder_arrays(trunk).items()}
    load_initial_weights(trunk, dataclasses.replace(settings, initial_weights=source.named))
    after = _encoder_arrays(trunk)
    return _report(after, [name for name in after if not torch.equal(after[name], before[name])])


def _encoder_arrays(trunk: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point arrays of ``trunk`` without its head's."""
    return {
        name: tensor
        for name, tensor in trunk.state_dict().items()
        if tensor.is_floating_point() and not name.startswith(_HEAD)
    }


def _report(encoder: Mapping[str, Tensor], names: Sequence[str], **details: Any) -> TransferReport:
    """Return the report for the arrays ``names`` of the encoder having been set."""
    numbers = sum(encoder[name].numel() for name in names)
    share = numbers / sum(target.numel() for target in encoder.values())
    left = tuple(sorted(encoder.keys() - set(names)))
    return TransferReport(arrays=len(names), of=len(encoder), share=share, left=left, **details)


def _transfer_run(
    trunk: nn.Module, run_model: RunModel, settings: CommonSettings, classes: Classes
) -> TransferReport:
    """Copy what fits of a run's model; its head only as a whole and for the same ``classes``."""
    if not run_model.has_backbone and hasattr(trunk, "vit"):
        # The check whether the weights have seen images of these silos is about the data used here
        common = dataclasses.replace(
            run_model.common, dataset=settings.dataset, public_share=settings.public_share
        )
        load_backbone(trunk, common)
    encoder = _encoder_arrays(trunk)
    fitting = {
        name: array
        for name, target in encoder.items()
        if (array := _fitting(name, run_model.arrays, target, trunk)) is not None
    }
    if not fitting:
        raise SettingError(
            f"none of the {len(run_model.arrays)} arrays of {run_model.label} (network "
            f"'{run_model.network}') fits the network to be trained: leave 'width' and "
            "'backbone-...' at the run's"
        )
    state = trunk.state_dict()
    head = _head(state, run_model) if classes == run_model.classes else {}
    with torch.no_grad():
        for name, array in {**fitting, **head}.items():
            state[name].copy_(array)
    report = _report(encoder, list(fitting), head=bool(head))
    backbone = {name for name in encoder if name.startswith("encoder.vit.")}
    if run_model.has_backbone or not backbone:
        return report
    left = tuple(name for name in report.left if name not in backbone)
    return dataclasses.replace(report, left=left, backbone=run_model.common.backbone_weights)


def _fitting(
    name: str, arrays: Mapping[str, Tensor], target: Tensor, trunk: nn.Module
) -> Tensor | None:
    """Return a run's array in the form of ``target``, or None if it does not fit.

    A ViT's position embeddings are resampled to the size of the images.
    """
    array = arrays.get(name)
    if array is None or array.shape == target.shape:
        return array
    if name.endswith("pos_embed") and array.shape[-1] == target.shape[-1]:
        from timm.layers.pos_embed import resample_abs_pos_embed

        vit = cast(Any, trunk).vit
        grid = list(vit.patch_embed.grid_size)
        moved: Tensor = resample_abs_pos_embed(array, grid, num_prefix_tokens=vit.num_prefix_tokens)
        return moved
    return None


def _head(state: Mapping[str, Tensor], run_model: RunModel) -> dict[str, Tensor]:
    """Return the arrays of a run's head if all fit, otherwise none."""
    wanted = {name: target for name, target in state.items() if name.startswith(_HEAD)}
    arrays = {name: run_model.arrays[name] for name in wanted if name in run_model.arrays}
    fits = all(name in arrays and arrays[name].shape == wanted[name].shape for name in wanted)
    return arrays if fits else {}
