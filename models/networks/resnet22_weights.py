"""The published weights of ResNet-22 (Wu et al. 2019), put into a network.

Their file holds a four-view model under ``model``. Of its two feature extractors that of the
cranio-caudal views (``four_view_resnet.cc``) is taken, as Fed-Align-CL's authors do. A file of a
single extractor, with or without the prefix ``view_resnet``, is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.contract.errors import SettingError

_PREFIXES = ("four_view_resnet.cc.", "view_resnet.", "")


def fill_resnet22(encoder: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Put the weights of a file into ``encoder``.

    Args:
        encoder: a ``models.networks.resnet22.ResNet22``.
        content: what the file holds.
        where: names it in errors.

    Raises:
        SettingError: arrays are missing, of other shapes or not finite.
    """
    stored = content.get("model", content)
    wanted = encoder.state_dict()
    arrays = _extractor(stored if isinstance(stored, Mapping) else {}, where)
    # A counter of batches that old files lack; nothing reads it
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name not in arrays]
    surplus = [name for name in arrays if name not in wanted]
    if missing or surplus:
        raise SettingError(
            f"setting 'backbone-weights': {where} is of another architecture than ResNet-22: "
            f"{len(missing)} arrays are missing ({', '.join(missing[:3])}), {len(surplus)} too "
            f"many ({', '.join(surplus[:3])})"
        )
    # In the order of likely mistakes: no array, grey against colour, another width, a broken file
    for name in needed:
        if not isinstance(arrays[name], torch.Tensor):
            raise SettingError(f"setting 'backbone-weights': in {where} '{name}' is no array")
        array = arrays[name].float()
        if name == "first_conv.weight" and array.shape[1:2] != wanted[name].shape[1:2]:
            raise SettingError(
                f"setting 'backbone-weights': {where} takes images of {array.shape[1]} channels, "
                f"and those of the run have {wanted[name].shape[1]}: choose other weights"
            )
        if array.shape != wanted[name].shape:
            raise SettingError(
                f"setting 'backbone-weights': in {where} '{name}' is {tuple(array.shape)}, not "
                f"{tuple(wanted[name].shape)}: set 'width' to that of the weights (published: 16)"
            )
        if not array.isfinite().all():
            raise SettingError(
                f"setting 'backbone-weights': in {where} '{name}' holds values that are not finite"
            )
        wanted[name].copy_(array)


def _extractor(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arrays of the feature extractor, without what stands before their names."""
    for prefix in _PREFIXES:
        if f"{prefix}first_conv.weight" in stored:
            return {
                name.removeprefix(prefix): array
                for name, array in stored.items()
                if name.startswith(prefix)
            }
    raise SettingError(
        f"setting 'backbone-weights': {where} holds no ResNet-22 ('first_conv.weight' is not in "
        "it): take Wu et al.'s sample_image_model.p, or a file of a ResNet-22's own arrays"
    )
