"""The published weights of ResNet-22 (Wu et al. 2019), put into a network.

Their file holds a four-view model under ``model``. Of its two feature extractors that of the
cranio-caudal views (``four_view_resnet.cc``) is taken, as Fed-Align-CL's authors do. A file of a
single extractor, with or without the prefix ``view_resnet``, is taken as it is.

Each of the file's views has a classifier: a hidden layer (``fc1_lcc``) and, in pairs of logits, no
and yes for benign findings, then for malignant ones, of this breast first (``output_layer_lcc``).
Asked for, the hidden layer of the left cranio-caudal view and its pair of malignancy are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedsilo.models.contract.errors import SettingError

_HEADS = ("_lcc", "")  # after the names of a head's layers: of four views, of one
_MALIGNANT = slice(2, 4)  # rows of the output layer
_PREFIXES = ("four_view_resnet.cc.", "view_resnet.", "")


def fill_resnet22(encoder: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Put the weights of a file into ``encoder``.

    Args:
        encoder: a ``fedsilo.models.networks.resnet22.ResNet22``.
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


def fill_published_head(head: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Put the classifier of a file into ``head``, see ``resnet22.build_published_head``.

    Args:
        head: its layers 0 and 2 are linear.
        content: what the file holds.
        where: names it in errors.

    Raises:
        SettingError: the file has no classifier, or one of other shapes or not finite.
    """
    stored = content.get("model", content)
    wanted = head.state_dict()
    for name, array in _head_arrays(stored, where).items():
        if array.shape != wanted[name].shape or not array.isfinite().all():
            raise SettingError(
                f"setting 'classifier' is 'published': in {where} the classifier's '{name}' is "
                f"{tuple(array.shape)}, not {tuple(wanted[name].shape)}, or not finite: set "
                "'classifier' to 'seed'"
            )
        wanted[name].copy_(array)


def _head_arrays(stored: Mapping[str, Any], where: str) -> dict[str, torch.Tensor]:
    """Return the two linear layers of a file's classifier by their names in ours."""
    for view in _HEADS:
        names = [f"fc1{view}.", f"output_layer{view}.fc_layer."]
        wanted = [stored.get(f"{name}{part}") for name in names for part in ("weight", "bias")]
        found = [array.float() for array in wanted if isinstance(array, torch.Tensor)]
        if len(found) == len(wanted):
            hidden_weight, hidden_bias, weight, bias = found
            return {
                "0.weight": hidden_weight,
                "0.bias": hidden_bias,
                "2.weight": weight[_MALIGNANT],
                "2.bias": bias[_MALIGNANT],
            }
    raise SettingError(
        f"setting 'classifier' is 'published', and {where} holds no classifier ('fc1_lcc.weight' "
        "is not in it): name Wu et al.'s sample_image_model.p in 'backbone-weights', or set "
        "'classifier' to 'seed'"
    )


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
