"""Augment training images with transforms of torchvision v2, each image separately.

The transforms draw from torch's global generators, because they accept no others. Each batch has
its own seed, so the same seed gives the same images, and dropout draws the same numbers as without
augmentation.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.files.yaml_text import parse_structure
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo

_EXAMPLE = "[{RandomHorizontalFlip: {p: 0.5}}, {RandomRotation: {degrees: 10}}]"
_BIAS, _RANGE = 32768, 65535  # radiographs are stored as int16

Transform = Callable[..., Any]
Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def augmenter(
    settings: CommonSettings, key: tuple[int | str, ...], device: torch.device
) -> Augment:
    """Return a function that augments a batch of images, and their masks in the same way.

    The function takes images (batch, channels, height, width) and labels, and returns both. Labels
    that are masks (batch, height, width) get the same rotations and flips as their images, but no
    changes of colour. Empty corners of a mask become background. Other labels and empty batches are
    returned unchanged. Each batch gets new random numbers. Types and shapes stay the same for
    transforms that passed ``check_images``.

    Args:
        settings: the transforms ('train.augmentation') and the seed.
        key: values that the random numbers depend on besides the seed, such as (round, site).
        device: the device of the batches.
    """
    transform, numbers = _parse_transforms(settings.augmentation), count()

    def augment(batch: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        number, has_masks = next(numbers), labels.ndim == 3
        if not len(batch):  # a private batch may be empty
            return batch, labels
        images, masks = [], []
        with seed_generators(settings.seed, "augmentation", *key, number, device=device):
            for image, label in zip(batch, labels, strict=True):
                if has_masks:
                    image, label = _change_pair(image, label, transform)
                    masks.append(label)
                else:
                    image = _change(image, transform)
                images.append(image)
        if has_masks:
            labels = torch.stack(masks)
        return torch.stack(images), labels

    return augment


def _change(image: Tensor, transform: Transform) -> Tensor:
    """Transform one image (channels, height, width) and return the result.

    An int16 image, which uses the whole range of int16, is first scaled to floats from 0 to 1. The
    result of ``transform`` is clipped to 0 to 1, scaled back and rounded to int16. Any other image
    is passed to ``transform`` unchanged.
    """
    changed: Tensor
    if image.dtype != torch.int16:
        changed = transform(image)
        return changed
    changed = transform((image.float() + _BIAS) / _RANGE)
    return (changed.clamp(0, 1) * _RANGE - _BIAS).round().to(torch.int16)


def _change_pair(image: Tensor, mask: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """Transform an image (channels, height, width) and its mask (height, width) in the same way.

    Both are transformed in one call, so random transforms draw the same numbers for both.
    Transforms of colours leave the mask unchanged. An int16 image is scaled to 0 to 1 for the
    transform, and back to int16.

    Returns:
        The transformed image and the transformed mask.
    """
    from torchvision import tv_tensors

    moved: list[Tensor] = []

    def both(pixels: Tensor) -> Tensor:
        changed: Tensor
        changed, marks = transform(pixels, tv_tensors.Mask(mask))
        moved.append(marks.as_subclass(Tensor))
        return changed

    return _change(image, both), moved[0]


@lru_cache(maxsize=4)
def _parse_transforms(text: str) -> Transform:
    """Build one transform that applies the transforms in ``text`` one after another.

    The text is the value of 'train.augmentation', a YAML list such as "[{RandomRotation: {degrees:
    10}}]". The result is cached by the text.

    Raises:
        SettingError: the text is malformed, or names a transform that torchvision does not have.
            The error also means that a transform refuses its arguments.
    """
    from torchvision.transforms import v2

    composed: Transform = v2.Compose(
        _build_transforms(parse_structure("train.augmentation", text, _EXAMPLE))
    )
    return composed


def _build_transforms(entries: Any) -> list[Any]:
    """Build transforms of torchvision v2 from the entries of 'train.augmentation', in their order.

    If an entry has the argument "transforms" with a list, as RandomApply has, the transforms in
    that list are built too.

    Args:
        entries: a list. Each entry is the name of a transform, or a mapping from the name to the
            transform's arguments by name (None for no arguments).

    Raises:
        SettingError: an entry has neither form, torchvision does not have the transform, or the
            transform refuses its arguments.
    """
    from torchvision.transforms import v2

    known: dict[str, Any] = {}
    for name, kind in vars(v2).items():
        if inspect.isclass(kind) and issubclass(kind, v2.Transform):
            known[name] = kind
    built = []
    for entry in entries:
        named = entry
        if isinstance(entry, str):
            named = {entry: {}}
        if not isinstance(named, dict) or len(named) != 1:
            raise SettingError(
                f"'train.augmentation' has {quote_value(entry)}; write a list as {_EXAMPLE}"
            )
        ((name, arguments),) = named.items()
        if name not in known:
            raise unknown_name("transform of torchvision v2", str(name), known)
        try:
            arguments = dict(arguments or {})
            # Nested transforms, such as RandomApply's
            inner = arguments.get("transforms")
            if isinstance(inner, list):
                arguments["transforms"] = _build_transforms(inner)
            built.append(known[name](**arguments))
        except (TypeError, ValueError) as error:
            raise _refusal(name, error) from None
    return built


def _refusal(name: str, error: Exception) -> SettingError:
    reason = one_line(error, 200)
    return SettingError(f"transform '{name}' is refused ({reason}): change 'train.augmentation'")


def check_augmentation(settings: CommonSettings, is_table: bool) -> None:
    """Check that a run's augmentation is for images and can be built.

    Without 'train.augmentation' nothing is checked.

    Raises:
        SettingError: the data set is a table, the setting is malformed, torchvision does not have a
            transform, or a transform refuses its arguments.
    """
    if not settings.augmentation:
        return
    if is_table:
        raise SettingError(
            f"'train.augmentation' is for images, but data set '{settings.dataset}' is a table: "
            "remove 'train.augmentation'"
        )
    _parse_transforms(settings.augmentation)


def check_images(settings: CommonSettings, silo: Silo) -> None:
    """Check the run's augmentation on an image of zeros with this site's type and shape.

    The run must have an augmentation. The transforms run once, so an error that depends on chance
    or on real pixels is not found.

    Raises:
        SettingError: the transforms cannot be built, one of them fails, or the image gets another
            shape or type.
    """
    image = torch.zeros(silo.shape.input_shape, dtype=silo.train.inputs.dtype)
    transform = _parse_transforms(settings.augmentation)
    try:
        with seed_generators(settings.seed, "augmentation"):
            changed = _change(image, transform)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(settings.augmentation, error) from None
    if (changed.shape, changed.dtype) != (image.shape, image.dtype):
        raise SettingError(
            f"'train.augmentation' makes {tuple(changed.shape)} {changed.dtype} of images of "
            f"{tuple(image.shape)} {image.dtype}: images must keep size and type; change "
            "'train.augmentation'"
        )
