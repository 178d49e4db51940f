"""The settings of a run's rounds and of local training, which ``CommonSettings`` begins with.

They are a class of their own, because all settings in one file would be too long to read. Mappings
and lists are texts of YAML, because Flower's run config has neither; files may have them as such.
"""

from dataclasses import dataclass
from functools import partial

from fedsilo.models.contract.plugs import plugs
from fedsilo.models.contract.settings_schema import choice, setting

_count = partial(setting, minimum=0)
_positive = partial(setting, minimum=1)
_combining = partial(setting, roles="combining")
_step = partial(setting, roles="step")
_STRUCTURED = ("training", "structured")


@dataclass(frozen=True)
class TrainingSettings:
    """Method and data set of a run, its aggregation, its network and the training at a site."""

    method: str = setting("uefl", "federated method, or a plug: module or module:Class")
    dataset: str = setting("digits", "data set of silos, or a plug: module:object", roles="data")
    plugin: str = setting(
        "",
        "files FILE.py or modules with plugs, with commas between; at a hospital its own alone",
        roles=("circumstance", "own"),
    )
    plugin_digests: str = setting(
        "", "SHA-256 of each plug's file or package, or empty for those here"
    )
    plugin_settings: str = setting(
        "", "a plugged method's settings, as JSON, for 'flwr run'", roles="circumstance"
    )
    seed: int = _count(42, "seed of every random number", roles="seed")
    rounds: int = _positive(30, "communication rounds", roles="course")
    silos: int = _positive(
        9, "silos that images are divided into", roles=("partition", "silo"), maximum=100_000
    )
    min_sites: int = _count(
        0, "sites that must answer each round (0: all that joined)", roles="circumstance"
    )
    sites_per_round: int = _count(0, "sites sampled for each round (0: all)", roles="course")
    aggregation: str = choice(
        *("auto", "mean", "norm-clip", "median", "trimmed", "multikrum"),
        help="how the sites' weights are combined: auto, norm-clip of real sites where the method "
        "averages and nothing is summed in secret, else mean; mean, weighted by samples; "
        "norm-clip, the same with updates clipped to the median norm; or, with equal weights for "
        "all sites, median, trimmed (mean of each number but the least and the largest) and "
        "multikrum (all but the site farthest from the others)",
        roles="combining",
    )
    max_update_norm: float = _combining(
        100.0,
        "a site's update is refused if its norm is more than this many times the round's median; "
        "needs three sites, does not apply to secagg (0: no limit)",
        minimum=0,
    )
    local_epochs: int = _positive(2, "passes over a site's training data per round")
    local_steps: int = _count(0, "optimiser steps per round at every site (0: local-epochs)")
    epoch_steps: int = _count(
        0, "optimiser steps of an epoch that spans rounds (0: none)", maximum=100_000
    )
    pace: int = _positive(40, "with epoch-steps: steps per round, a divisor of it")
    batch_size: int = _step(32, "samples per optimiser step", minimum=2)
    micro_batch: int = _step(
        0, "samples computed at once; a step accumulates their gradients (0: all)", minimum=0
    )
    gradient_checkpointing: bool = setting(
        False, "resnet22: save memory by computing activations twice", roles="network"
    )
    learning_rate: float = _step(1e-3, "step size of the optimiser", above=0.0, maximum=1e30)
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
    optimiser_state: str = choice(
        "round", "run", help="how long a site keeps its optimiser's state; with epoch-steps: run"
    )
    schedule: str = choice(
        *("constant", "cosine", "step", "one-cycle"),
        help="learning rate over the steps of all rounds, by torch's scheduler of that name",
    )
    schedule_arguments: str = setting(
        "",
        "its arguments: a mapping; step: {step_size: 10, gamma: 0.1}, step_size in rounds",
        roles=_STRUCTURED,
    )
    warm_up: float = _count(
        0.0, "rounds in which the learning rate rises linearly; below 1: share of all"
    )
    rate_decay: str = choice(
        "none", "inverse-sqrt", help="learning rate: constant, or divided by the root of all steps"
    )
    weight_decay: float = _step(0.0, "L2 penalty; with adamw, decoupled weight decay", minimum=0)
    network: str = choice(
        *("auto", "conv", "vgg16-bn", "resnet22", "vit", "logistic", "mlp"),
        help="auto: conv for images, vgg16-bn for cifar10, cifar100, gtsrb, logistic for tables",
        roles="network",
        **plugs("network", "timm:NAME"),
    )
    width: int = _positive(
        16,
        "channels of the first stage (UEFL's conv 128, resnet22 16), twice those of vgg16-bn "
        "(published: 128), or hidden units of mlp",
        roles="network",
    )
    leading_norm: bool = setting(
        True, "conv: batch norm after each stage's first convolution, unlike UEFL", roles="network"
    )
    dropout: float = _count(0.1, "dropout rate of the head", roles="network", below=1.0)
    classifier: str = choice(
        "seed", "published", help="resnet22: new last layers, or Wu et al.'s own", roles="network"
    )
    mc_passes: int = _count(20, "Monte Carlo dropout passes (0: one pass without dropout)")
    loss: str = choice(
        "auto", "cross-entropy", "evidential", help="auto: evidential for vit, else cross-entropy"
    )
    evidence: str = choice("softplus", "relu", help="evidential loss: how logits become evidence")
    class_weights: str = setting(
        "none",
        "weights of the classes in the cross-entropy: none, balanced (by the site's own training "
        "samples), or a number each, such as 0.2,0.8",
        roles=_STRUCTURED,
    )
    augmentation: str = setting(
        "",
        "transforms of torchvision v2 for training images: a list, such as "
        "[{RandomHorizontalFlip: {p: 0.5}}]",
        roles=_STRUCTURED,
    )
