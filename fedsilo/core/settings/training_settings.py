"""The settings of the network and of its training at a site.

Mappings and lists are texts of YAML, because Flower's run config has neither type. A file may
contain the mapping or list itself.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from fedsilo.core.plugins import PLUGIN, plugin_name
from fedsilo.core.settings_schema import setting

_count = partial(setting, ge=0)
_positive = partial(setting, ge=1)
_step = partial(setting, roles="step")
_structured = partial(setting, roles="structured")
# The settings that a ViT is built from, and among them the sizes of its backbone
_BUILT, _SHAPE = "network", ("network", "shape")

NetworkPlugin = Annotated[str, AfterValidator(partial(plugin_name, "network"))]


@dataclass(frozen=True)
class NetworkSettings:
    """The network that is trained, and its measures."""

    group: ClassVar[str] = "network"

    network: (
        Literal[
            "auto",
            "conv",
            "vgg16-bn",
            "resnet22",
            "vit",
            "logistic",
            "mlp",
            "unet",
            "swin",
            "swinunet",
            "transunet",
        ]
        | NetworkPlugin
    ) = setting(
        "auto",
        "auto: conv for images, vgg16-bn for cifar10, cifar100, gtsrb, logistic for tables, unet "
        "for segmentation",
        wording=f"timm:NAME or {PLUGIN}",
    )
    width: int = _positive(
        16,
        "channels of the first stage (UEFL's conv 128, resnet22 16), twice those of vgg16-bn "
        "(published: 128), or hidden units of mlp",
    )
    leading_norm: bool = setting(
        True, "conv: batch norm after each stage's first convolution, unlike UEFL"
    )
    dropout: float = _count(0.1, "dropout rate of the head", lt=1.0)
    classifier: Literal["seed", "published"] = setting(
        "seed", "resnet22: new last layers, or Wu et al.'s own"
    )
    gradient_checkpointing: bool = setting(
        False, "resnet22: save memory by computing activations twice"
    )


@dataclass(frozen=True)
class ViTSettings:
    """The vision transformer and its prompts, which other networks do not read."""

    group: ClassVar[str] = "vit"

    backbone: str = setting(
        "vit_small_patch16_224",
        "timm's name of the transformer",
        roles=_SHAPE,
        pattern=r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?",
        wording="a name of timm, without a path or an address",
    )
    backbone_weights: str = setting(
        "",
        "a file (also by its name in data.dir or data.cache-dir/backbones), timm, or random; "
        "resnet22: a file, or empty for the seed",
        roles="own",
    )
    backbone_width: int = _count(0, "embedding channels (0: the backbone's)", roles=_SHAPE)
    backbone_depth: int = _count(0, "blocks (0: the backbone's)", roles=_SHAPE)
    backbone_heads: int = _count(0, "attention heads (0: the backbone's)", roles=_SHAPE)
    backbone_patch: int = _count(0, "pixels of a patch (0: the backbone's)", roles=_SHAPE)
    train_backbone: bool = setting(False, "train and exchange the backbone too")
    prompt_sets: Literal["b-t", "g", "none"] = setting(
        "b-t",
        "b-prompts in the first layers and t-prompts in the others, one set g, or none",
        roles=_BUILT,
    )
    prompt_length: int = _positive(50, "prefix keys and values per layer", roles=_BUILT)
    basic_layers: int = _positive(3, "first layers, which take b-prompts", roles=_BUILT)
    basic_learning_rate: float = _step(2.5e-4, "step size of b- and g-prompts", gt=0.0, le=1e30)


@dataclass(frozen=True)
class TrainSettings:
    """How a site trains and measures: steps, optimiser, learning rate and loss."""

    group: ClassVar[str] = "train"

    initial_weights: str = setting(
        "",
        "initial exchanged weights: a safetensors file of a run ('encoder:' before it: its encoder "
        "alone, for other classes), a file of a ViT's or vgg16-bn's weights, or 'timm:' and a name",
    )
    local_epochs: int = _positive(2, "passes over a site's training data per round")
    local_steps: int = _count(0, "optimiser steps per round at every site (0: train.local-epochs)")
    epoch_steps: int = _count(
        0, "optimiser steps of an epoch that spans rounds (0: none)", le=100_000
    )
    pace: int = _positive(40, "with train.epoch-steps: steps per round, a divisor of it")
    batch_size: int = _step(32, "samples per optimiser step", ge=2)
    micro_batch: int = _step(
        0, "samples computed at once; a step accumulates their gradients (0: all)", ge=0
    )
    learning_rate: float = _step(1e-3, "step size of the optimiser", gt=0.0, le=1e30)
    optimiser: str = _step(
        "adam",
        "optimiser of local training, any of torch.optim by name",
        pattern=r"[A-Za-z]\w*",
        wording="the name of an optimiser of torch.optim, such as adam, adamw, sgd or rmsprop",
    )
    optimiser_arguments: str = setting(
        "",
        "its further arguments: a mapping, such as {momentum: 0.9}",
        roles=("step", "structured"),
    )
    optimiser_state: Literal["round", "run"] = setting(
        "round", "how long a site keeps its optimiser's state; with train.epoch-steps: run"
    )
    schedule: Literal["constant", "cosine", "step", "one-cycle"] = setting(
        "constant",
        "learning rate over the steps of all rounds, by torch's scheduler of that name",
    )
    schedule_arguments: str = _structured(
        "", "its arguments: a mapping; step: {step_size: 10, gamma: 0.1}, step_size in rounds"
    )
    warm_up: float = _count(
        0.0, "rounds in which the learning rate rises linearly; below 1: share of all"
    )
    rate_decay: Literal["none", "inverse-sqrt"] = setting(
        "none", "learning rate: constant, or divided by the root of all steps"
    )
    weight_decay: float = _step(0.0, "L2 penalty; with adamw, decoupled weight decay", ge=0)
    loss: Literal["auto", "cross-entropy", "evidential", "squared", "huber"] = setting(
        "auto", "auto: evidential for vit, else cross-entropy; squared for regression"
    )
    evidence: Literal["softplus", "relu"] = setting(
        "softplus", "evidential loss: how logits become evidence"
    )
    dice_weight: float = _count(
        1.0, "segmentation: weight of the soft Dice loss, added to the cross-entropy"
    )
    class_weights: str = _structured(
        "none",
        "weights of the classes in the cross-entropy: none, balanced (by the site's own training "
        "samples), or a number each, such as 0.2,0.8",
    )
    augmentation: str = _structured(
        "",
        "transforms of torchvision v2 for training images: a list, such as "
        "[{RandomHorizontalFlip: {p: 0.5}}]",
    )
    mc_passes: int = _count(20, "Monte Carlo dropout passes (0: one pass without dropout)")
