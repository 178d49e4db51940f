"""Load published weights: VGG16 with batch norm, and ResNet-22 with its classifier.

VGG16's features come from a file of timm or torchvision, which use the same names. ResNet-22 comes
from Wu et al.'s file (2019), a four-view model under ``model``: the extractor of the
cranio-caudal views (``four_view_resnet.cc``), as Fed-Align-CL's authors do, or from a file of a
single extractor. Each view of that file has a classifier of a hidden layer (``fc1_lcc``) and pairs
of logits, no and yes, for benign and then for malignant findings (``output_layer_lcc``): the hidden
layer of the left cranio-caudal view and its malignant pair are taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedsilo.core.errors import SettingError

_VIEWS = ("_lcc", "")  # suffix of a classifier's layers in files of four views, and of one
_MALIGNANT = slice(2, 4)  # rows of the output layer


@dataclass(frozen=True)
class _Architecture:
    """The names of an architecture's arrays in a file, and words for errors.

    Attributes:
        setting: the setting that names the file.
        first: the first convolution, whose shape gives the image's channels and the width.
        prefixes: prefixes that files put before the names of arrays; the first that fits is used.
        part: start of the wanted arrays' names, after the prefix.
        name: the architecture, for errors.
        width: value of the setting 'network.width' per output channel of the first convolution.
        advice: the file that a user should take, as an imperative.
    """

    setting: str
    first: str
    prefixes: tuple[str, ...]
    part: str
    name: str
    width: int
    advice: str


_VGG = _Architecture(
    setting="train.initial-weights",
    first="features.0.weight",
    prefixes=("", "module.", "model.", "encoder.", "backbone."),
    part="features.",
    name="VGG16 with batch norm",
    width=2,
    advice="take 'timm:vgg16_bn', or torchvision's file of vgg16_bn",
)
_RESNET22 = _Architecture(
    setting="vit.backbone-weights",
    first="first_conv.weight",
    prefixes=("four_view_resnet.cc.", "view_resnet.", ""),
    part="",
    name="ResNet-22",
    width=1,
    advice="take Wu et al.'s sample_image_model.p, or a file of a ResNet-22's own arrays",
)


def fill_vgg(encoder: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Load VGG16's convolutional weights from a file into ``encoder``, all or none.

    Only arrays under ``features.`` are loaded. In the file, the prefix ``module.``, ``model.``,
    ``encoder.`` or ``backbone.`` may precede ``features.``.

    Args:
        encoder: the ``VggEncoder`` to fill, in place.
        content: a file's arrays by name. Arrays outside ``features.`` are ignored.
        where: the file, for errors.

    Raises:
        SettingError: an array under ``features.`` is missing, has a name unknown to the encoder,
            has another shape or is not finite. ``encoder`` is then unchanged.
    """
    _fill(encoder, content, where, _VGG)


def fill_resnet22(encoder: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Load the weights of ResNet-22 from a published file into ``encoder``, all or none.

    In the file, a prefix precedes the encoder's names. The prefixes ``four_view_resnet.cc.``,
    ``view_resnet.`` and "" are tried in this order, until ``first_conv.weight`` is found after one.
    Arrays without the prefix are ignored.

    Args:
        encoder: the ``ResNet22`` to fill, in place.
        content: a file's arrays by name, or a mapping that has them under the key ``model``.
        where: the file, for errors.

    Raises:
        SettingError: an array is missing, has a name unknown to the encoder, has another shape or
            is not finite. ``encoder`` is then unchanged.
    """
    _fill(encoder, content.get("model", content), where, _RESNET22)


def _fill(encoder: nn.Module, content: Any, where: str, source: _Architecture) -> None:
    """Load a file's arrays into ``encoder`` as float32, all of them or none.

    The number of batches that a batch norm has seen is never loaded, and may be missing in the
    file.

    Args:
        encoder: the network to fill, in place.
        content: the file's content, which should map names to arrays.
        where: the file, for errors.
        source: tells which names the file's arrays should have, and has texts for errors.

    Raises:
        SettingError: an array is missing, has a name unknown to the encoder, has another shape or
            is not finite. ``encoder`` is then unchanged.
    """
    setting, wanted = f"setting '{source.setting}'", encoder.state_dict()
    arrays = _select_arrays(content, where, source)
    fitting: dict[str, Tensor] = {}
    missing = []
    for name in wanted:
        # Files of old versions of PyTorch lack batch norm's counters of batches. Nothing reads
        # these counters, so the encoder keeps its own
        if name.endswith("num_batches_tracked"):
            continue
        if isinstance(arrays.get(name), Tensor):
            fitting[name] = arrays[name].float()
        else:
            missing.append(name)
    surplus = [name for name in arrays if name not in wanted]
    if missing or surplus:
        raise SettingError(
            f"{setting}: {where} must hold {source.name}, but is of another network: "
            f"{len(missing)} arrays are missing ({', '.join(missing[:3])}), {len(surplus)} too "
            f"many ({', '.join(surplus[:3])}): {source.advice}"
        )
    _check_shapes(fitting, wanted, where, source)
    for name, array in fitting.items():
        if not array.isfinite().all():
            raise SettingError(
                f"{setting}: in {where} '{name}' contains non-finite values: {source.advice}"
            )
    encoder.load_state_dict(wanted | fitting)


def _select_arrays(content: Any, where: str, source: _Architecture) -> dict[str, Any]:
    """Select the encoder's arrays in a file, and remove the prefix from their names.

    The prefixes of ``source.prefixes`` are tried in their order. The first prefix counts with which
    the file has the array ``source.first``, the first convolution's weights.

    Args:
        content: the file's content. If it is not a mapping, it counts as empty.
        where: the file, for errors.
        source: the architecture that the file should hold.

    Returns:
        The arrays whose names begin with the prefix and then ``source.part``. Only the prefix is
        removed. Types and shapes are not checked.

    Raises:
        SettingError: no prefix leads to the first convolution.
    """
    stored: Mapping[str, Any] = {}
    if isinstance(content, Mapping):
        stored = content
    # A prefix tells who stored the file: the whole network, its wrapper for several GPUs, or a part
    for prefix in source.prefixes:
        if f"{prefix}{source.first}" not in stored:
            continue
        arrays = {}
        for name, array in stored.items():
            if name.startswith(f"{prefix}{source.part}"):
                arrays[name.removeprefix(prefix)] = array
        return arrays
    raise SettingError(
        f"setting '{source.setting}': {where} does not contain {source.name} ('{source.first}' is "
        f"missing): {source.advice}"
    )


def _check_shapes(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str, source: _Architecture
) -> None:
    """Check that a file's arrays have the shapes of the network's arrays of the same names.

    The number of image channels is checked first. Only the first fault is reported.

    Args:
        given: the file's arrays by the network's names. ``source.first``, the weights of the first
            convolution, must be among them.
        wanted: the network's arrays by name. It must have all names of ``given``.
        where: the file, for errors.
        source: the architecture, for errors.

    Raises:
        SettingError: an array has another shape. If the image channels differ, the error names the
            two numbers. Otherwise it names the 'network.width' that suits the weights.
    """
    setting, first = f"setting '{source.setting}'", given[source.first]
    channels = wanted[source.first].shape[1]
    # Weights for colour with grey images are the likeliest mistake, so this is reported first
    if first.ndim == 4 and first.shape[1] != channels:
        raise SettingError(
            f"{setting}: {where} takes images of {first.shape[1]} channels, but those of "
            f"the run have {channels}: choose other weights"
        )
    for name, array in given.items():
        if array.shape != wanted[name].shape:
            channels = 64  # the published number, if the first convolution is a scalar
            if first.ndim:
                channels = first.shape[0]
            width = channels * source.width
            raise SettingError(
                f"{setting}: in {where} '{name}' is {tuple(array.shape)}, not "
                f"{tuple(wanted[name].shape)}: set 'network.width' to that of the weights, {width}"
            )


def fill_published_head(head: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Load the published classifier of mammograms from a file into ``head``, in place.

    The file is the one by Wu et al. Its output layer has several findings, of which only the two
    outputs for malignant findings, no and yes, are used.

    Args:
        head: the classifier that ``build_published_head`` built.
        content: the file's content. Its entry ``model`` is used if there is one.
        where: the file, for errors.

    Raises:
        SettingError: the file lacks a classifier, or the classifier's arrays have other shapes or
            are not finite. ``head`` is then unchanged.
    """
    stored, wanted = content.get("model", content), head.state_dict()
    arrays = _head_arrays(stored, where)
    for name, array in arrays.items():
        if array.shape != wanted[name].shape or not array.isfinite().all():
            raise SettingError(
                f"setting 'network.classifier' is 'published': in {where} the classifier's "
                f"'{name}' is {tuple(array.shape)}, not {tuple(wanted[name].shape)}, or not "
                "finite: set 'network.classifier' to 'seed'"
            )
    # Only once all are checked: a head that is half published would be nobody's
    for name, array in arrays.items():
        wanted[name].copy_(array)


def _head_arrays(stored: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Select the classifier's arrays in a published file of mammogram networks.

    The classifier of the left cranio-caudal view is taken if the file has it. Otherwise layers
    without a view in their names are taken. From the output layer, only the two rows for malignant
    findings are kept.

    Args:
        stored: the file's arrays by name.
        where: the file, for errors.

    Returns:
        ``0.weight``, ``0.bias``, ``2.weight`` and ``2.bias`` as float32.

    Raises:
        SettingError: the file lacks such a classifier.
    """
    for view in _VIEWS:
        arrays: dict[str, Tensor] = {}
        for part in ("weight", "bias"):
            hidden = stored.get(f"fc1{view}.{part}")
            output = stored.get(f"output_layer{view}.fc_layer.{part}")
            if isinstance(hidden, Tensor) and isinstance(output, Tensor):
                arrays[f"0.{part}"] = hidden.float()
                arrays[f"2.{part}"] = output.float()[_MALIGNANT]
        # Both layers of one view are needed; layers of two views were not trained together
        if len(arrays) == 4:
            return arrays
    raise SettingError(
        f"setting 'network.classifier' is 'published', but {where} does not contain a classifier "
        "('fc1_lcc.weight' is missing): name Wu et al.'s sample_image_model.p in "
        "'vit.backbone-weights', or set 'network.classifier' to 'seed'"
    )
