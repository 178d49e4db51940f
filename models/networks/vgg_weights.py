"""Pretrained weights of VGG16 with batch norm, put into a network; timm and torchvision name alike.

Only the convolutional features are taken: the head of 1000 classes goes with its images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.networks.encoders import VGG_WIDTH, VggEncoder

_PREFIXES = ("", "module.", "model.", "encoder.", "backbone.")
_FIRST = "features.0.weight"
_SETTING = "setting 'initial-weights'"
_ADVICE = "take 'timm:vgg16_bn', or torchvision's file of vgg16_bn"


def fill_vgg(encoder: VggEncoder, content: Mapping[str, Any], where: str) -> None:
    """Put the weights of a file into ``encoder``.

    Args:
        encoder: the network's encoder.
        content: arrays by name, with or without a head.
        where: names the file in errors.

    Raises:
        SettingError: they are of another network or width, or not finite.
    """
    arrays = _features(content, where)
    wanted = encoder.state_dict()
    # A counter of batches, which nothing reads
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if not isinstance(arrays.get(name), Tensor)]
    surplus = [name for name in arrays if name not in wanted]
    if missing or surplus:
        raise SettingError(
            f"{_SETTING}: {where} is of another network than VGG16 with batch norm: "
            f"{len(missing)} arrays are missing ({', '.join(missing[:3])}), {len(surplus)} too "
            f"many ({', '.join(surplus[:3])}); {_ADVICE}"
        )
    fitting = {name: torch.as_tensor(arrays[name]).float() for name in needed}
    _refuse_other_shapes(fitting, wanted, where)
    for name, array in fitting.items():
        if not array.isfinite().all():
            raise SettingError(f"{_SETTING}: '{name}' in {where} is not finite; {_ADVICE}")
    encoder.load_state_dict({**wanted, **fitting})


def _features(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arrays of the features, without what stands before their names."""
    for prefix in _PREFIXES:
        if f"{prefix}{_FIRST}" in content:
            return {
                name.removeprefix(prefix): array
                for name, array in content.items()
                if name.startswith(f"{prefix}features.")
            }
    raise SettingError(
        f"{_SETTING}: {where} holds no VGG16 ('{_FIRST}' is not in it), and the run's network is "
        f"'vgg16-bn': {_ADVICE}"
    )


def _refuse_other_shapes(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str
) -> None:
    if given[_FIRST].ndim == 4 and given[_FIRST].shape[1] != wanted[_FIRST].shape[1]:
        raise SettingError(
            f"{_SETTING}: {where} takes images of {given[_FIRST].shape[1]} channels, and those of "
            f"the run have {wanted[_FIRST].shape[1]}: choose other weights"
        )
    for name, array in given.items():
        if array.shape != wanted[name].shape:
            # Twice the first stage's channels, 64 of the published
            width = given[_FIRST].shape[0] * VGG_WIDTH // 64 if given[_FIRST].ndim else VGG_WIDTH
            raise SettingError(
                f"{_SETTING}: in {where} '{name}' is {tuple(array.shape)}, not "
                f"{tuple(wanted[name].shape)}: set 'width' to that of the weights, {width}"
            )
