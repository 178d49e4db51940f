"""Transfers weights into a new network, by copying arrays or by distillation."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.core.errors import SettingError
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import NETWORK_KEYS, CommonSettings
from fedsilo.core.settings_schema import keys_of
from fedsilo.datasets.silo.silos import Split
from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.finetuning.finetune_request import Classes, RunModel, Source
from fedsilo.finetuning.tasks import cosine_epochs
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.segmentation.pyramids import Segmenter, resize_maps

_HEAD, _BACKBONE = "head.", "encoder.vit."


@dataclass(frozen=True)
class TransferReport:
    """A report on which arrays a network received from pretrained weights."""

    arrays: int  # number of the encoder's arrays that were copied
    of: int  # number of all arrays in the encoder
    share: float  # share of the encoder's numbers that were copied, 0 to 1
    left: tuple[str, ...]  # names of the encoder's arrays that keep their initial values, sorted
    head: bool = False  # whether the run's head was copied too
    backbone: str = ""  # the 'vit.backbone-weights' that was loaded beside the arrays, or empty

    def summary(self) -> str:
        """Summarise the report in one line.

        The line has the number of the encoder's arrays that were copied, and their share of all
        values in the encoder. If a backbone was loaded as well, or the head was copied, the line
        says so. At the end, it names up to three arrays that keep their initial values.
        """
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
    """Copy arrays of ``source`` into ``trunk``, in place, and return a report on them.

    An array is copied if ``trunk`` has one of the same name and shape. The position embeddings of a
    run's ViT may have another shape, and are resampled. Other arrays of ``trunk`` keep their
    initial values. A run's head is copied only if the run learned the same classes.

    Args:
        trunk: the network, or the part of it whose arrays have the same names as in a run.
        source: the run's model, or the pretrained weights, to copy from.
        settings: the settings of fine-tuning, with the data and the network.
        classes: the names and the number of the classes to learn.

    Raises:
        SettingError: in one of these cases:

            - None of a run's arrays can be copied, or the run's backbone cannot be loaded.
            - Pretrained weights are for another architecture, or their file or name is unknown.
    """
    if isinstance(source, RunModel):
        return _transfer_run(trunk, source, settings, classes)
    # Clones, because the arrays share memory with the network, which the loader changes
    before = {name: tensor.clone() for name, tensor in _encoder_arrays(trunk).items()}
    load_initial_weights(trunk, dataclasses.replace(settings, initial_weights=source.named))
    # The loader does not say which arrays it set, so arrays are compared before and after
    after = _encoder_arrays(trunk)
    changed = []
    for name, array in after.items():
        if not torch.equal(array, before[name]):
            changed.append(name)
    return _report(after, changed)


def _encoder_arrays(trunk: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point arrays of a network by name, except those of its head.

    The arrays share memory with the network, so they change when the network changes.
    """
    arrays = {}
    for name, tensor in trunk.state_dict().items():
        if tensor.is_floating_point() and not name.startswith(_HEAD):
            arrays[name] = tensor
    return arrays


def _report(
    encoder: Mapping[str, Tensor], names: Sequence[str], head: bool = False, backbone: str = ""
) -> TransferReport:
    """Build the report on the arrays that an encoder received.

    ``share`` of the report is the number of values in copied arrays, divided by the number of
    values in all arrays of the encoder. ``left`` lists the names of arrays that kept their initial
    values, in sorted order.

    Args:
        encoder: all arrays of the encoder by name.
        names: the names of the arrays that were copied.
        head: whether a run's head was copied.
        backbone: the setting 'vit.backbone-weights' of a pretrained ViT that was loaded in addition
            to the run's arrays, or empty. If it is given, ``left`` has no arrays of the ViT.
    """
    copied, total, left = 0, 0, []
    for name in sorted(encoder):
        size = encoder[name].numel()
        total += size
        if name in names:
            copied += size
        # A backbone that was loaded from its own file does not have its initial values
        elif not backbone or not name.startswith(_BACKBONE):
            left.append(name)
    return TransferReport(len(names), len(encoder), copied / total, tuple(left), head, backbone)


def _transfer_run(
    trunk: nn.Module, run_model: RunModel, settings: CommonSettings, classes: Classes
) -> TransferReport:
    """Copy arrays of a run's model into ``trunk``, in place, and return a report on them.

    ``_fit_array`` decides which arrays are copied. Other arrays of ``trunk`` keep their initial
    values. The head is copied as a whole, and only if the run had the same ``classes``. If the run
    trained only prompts for a pretrained backbone, that backbone is loaded first.

    Raises:
        SettingError: no array of the encoder can be copied.
        FedsiloError: the backbone cannot be loaded.
    """
    if not run_model.has_backbone and hasattr(trunk, "vit"):
        # Loading checks that the backbone was not trained on images of these silos, so the data
        # settings must be those of fine-tuning, not those of the run
        common = dataclasses.replace(
            run_model.common, dataset=settings.dataset, public_share=settings.public_share
        )
        load_backbone(trunk, common)
    # Some arrays may not fit, such as those of another image size; the others are copied
    encoder = _encoder_arrays(trunk)
    fitting = {}
    for name, target in encoder.items():
        array = _fit_array(name, run_model.arrays, target, trunk)
        if array is not None:
            fitting[name] = array
    if not fitting:
        raise SettingError(
            f"none of the {len(run_model.arrays)} arrays of {run_model.label} (network "
            f"'{run_model.network}') fits the network to be trained: leave 'network.width' and "
            "'vit.backbone-...' at the run's"
        )
    # The arrays of a state share memory with the network, so copying into them sets its weights
    state = trunk.state_dict()
    head: dict[str, Tensor] = {}
    if classes == run_model.classes:
        head = _fitting_head(state, run_model)
    with torch.no_grad():
        for name, array in {**fitting, **head}.items():
            state[name].copy_(array)
    backbone = ""
    has_vit = any(name.startswith(_BACKBONE) for name in encoder)
    if has_vit and not run_model.has_backbone:
        backbone = run_model.common.backbone_weights
    return _report(encoder, list(fitting), bool(head), backbone)


def _fit_array(
    name: str, arrays: Mapping[str, Tensor], target: Tensor, trunk: nn.Module
) -> Tensor | None:
    """Return a run's array in the shape of ``target``; None if it is missing or does not fit.

    An array of another shape fits only if it holds the position embeddings of a ViT with tokens of
    the same width. The embeddings are then resampled to the grid of patches in ``trunk``, because
    the images may have a different size in the run.

    Args:
        name: the name of the array.
        arrays: the run's arrays by name.
        target: the array of ``trunk`` with this name.
        trunk: the network that will receive the array.
    """
    array = arrays.get(name)
    if array is None or array.shape == target.shape:
        return array
    # The last axis is the width of the tokens, which resampling does not change
    if name.endswith("pos_embed") and array.shape[-1] == target.shape[-1]:
        from timm.layers.pos_embed import resample_abs_pos_embed

        vit = cast(Any, trunk).vit
        grid = list(vit.patch_embed.grid_size)
        moved: Tensor = resample_abs_pos_embed(array, grid, num_prefix_tokens=vit.num_prefix_tokens)
        return moved
    return None


def _fitting_head(state: Mapping[str, Tensor], run_model: RunModel) -> dict[str, Tensor]:
    """Return the head of a run's model as name -> array, or an empty dictionary if it does not fit.

    ``state`` has the arrays of the network that is to receive the head. The names of a head's
    arrays begin with "head.". The head fits if the run's model has all of these arrays, with the
    same shapes.
    """
    head: dict[str, Tensor] = {}
    for name, target in state.items():
        if not name.startswith(_HEAD):
            continue
        array = run_model.arrays.get(name)
        if array is None or array.shape != target.shape:
            return {}
        head[name] = array
    return head


@dataclass(frozen=True)
class DistilReport:
    """A report on a network that learned a ViT's tokens by distillation."""

    losses: tuple[float, ...]  # per epoch, the share of the tokens' variance left unexplained

    def summary(self) -> str:
        """Format the report in one line: the epochs, and the variance explained after the last."""
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
    """Train the encoder of ``network``, in place, to predict the tokens of a run's ViT.

    A linear layer is trained with the encoder and dropped afterwards. It converts the encoder's
    last feature map to the ViT's token of each patch (Romero et al. 2015, FitNets, equation 3). The
    ViT's tokens are normalised over their channels (Wei et al. 2022, feature distillation).

    Args:
        network: the student, on the compute device.
        source: the run whose ViT is the teacher.
        images: the training images. Their labels are ignored.
        settings: the settings of the training.
        compute: the device and the precision.
        epochs: the number of epochs, at least 1.

    Returns:
        A report with the loss of each epoch.

    Raises:
        SettingError: the run's ViT cannot be built for images of this size.
    """
    # The FedEFM paper initialises UNet and SwinUnet from its foundation ViT, but does not say how
    shape = tuple(images.inputs.shape[1:])
    teacher = compute.place(build_run_vit(source, settings, shape)).eval()
    # The number of channels of the student's last map (2, channels, rows, columns) is not among its
    # settings, so a small batch is mapped to find it
    with torch.no_grad():
        channels = network.coarsest(compute.bring(images.inputs[:2]).float()).shape[1]
    with seed_generators(settings.seed, "distil"):
        project = compute.place(nn.Conv2d(channels, teacher.vit.embed_dim, 1))

    def objective(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            tokens = teacher.encode_with_map(inputs)[1]
        return token_loss(project(network.coarsest(inputs)), tokens)

    # One module, so that one optimiser trains the encoder together with the linear layer
    both = nn.ModuleList([network, project])
    losses = cosine_epochs(
        both, objective, images, settings, compute, epochs=epochs, purpose="distil"
    )
    return DistilReport(tuple(losses))


def token_loss(maps: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean squared error between predicted tokens and the ViT's tokens, a scalar.

    Each token of the ViT is first normalised over its channels to mean 0 and variance 1. The
    predictions are resized to the ViT's grid of patches, but they are not normalised.

    Args:
        maps: the predictions (batch, c, h, w).
        tokens: the ViT's tokens (batch, rows, columns, c).
    """
    # Normalised, so that predicting zeros gives a loss of 1
    targets = nn.functional.layer_norm(tokens.float(), tokens.shape[-1:])
    predictions = resize_maps(maps.float(), tokens.shape[1:3]).permute(0, 2, 3, 1)
    return nn.functional.mse_loss(predictions, targets)


def build_run_vit(
    source: RunModel, settings: CommonSettings, input_shape: tuple[int, ...]
) -> PromptedViT:
    """Build a run's ViT on the CPU, with the run's weights and without gradients.

    The settings of the network are the run's, and all other settings are those of fine-tuning. If
    the run's images have another size, its position embeddings are resampled. Any other array of
    the run is copied only if its shape fits. If the run trained only prompts, its pretrained
    backbone is loaded first. All remaining arrays keep random values.

    Args:
        source: the run's model.
        settings: the settings of fine-tuning.
        input_shape: the shape of the images, (channels, height, width).

    Raises:
        SettingError: none of the encoder's arrays fits, or the backbone of a run that trained only
            prompts cannot be loaded.
    """
    own: dict[str, Any] = {}
    for field, key in keys_of(CommonSettings).items():
        if key in NETWORK_KEYS:
            own[field] = getattr(source.common, field)
    own |= {"network": "vit", "train_backbone": True, "backbone_weights": "random"}
    common = dataclasses.replace(settings, **own)
    vit = cast(PromptedViT, build_classifier(common, NetworkShape(input_shape, source.classes[1])))
    transfer(vit, source, common, source.classes)
    return vit.requires_grad_(False)
