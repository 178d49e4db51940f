"""Runs that take seconds: settings for every method, and variants worth a run of their own."""

from typing import Any

from fedsilo.core.methods import METHODS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, keys_of

# Small enough for seconds: 3 silos (one per distribution) of 40 training and 10 test digits.
TINY: dict[str, Value] = {
    "dataset": "digits",
    "split.silos": 3,
    "split.silo-train-size": 40,
    "split.silo-test-size": 10,
    "rounds": 2,
    "train.local-epochs": 1,
    "train.batch-size": 16,
    "network.width": 4,
    "train.mc-passes": 3,
    "machine.device": "cpu",
    "seed": 7,
    "server.aggregation": "mean",  # of real sites too, whose runs are held against simulated ones
}
# A prompted ViT of 2 blocks, for methods that take any network
VIT: dict[str, Value] = {
    "network.name": "vit",
    "vit.backbone-weights": "random",
    "vit.backbone-width": 16,
    "vit.backbone-depth": 2,
    "vit.backbone-heads": 2,
    "vit.backbone-patch": 4,
    "vit.prompt-length": 3,
    "vit.basic-layers": 1,
}
# The same by the names of ``CommonSettings``
VIT_FIELDS: dict[str, Any] = {
    name: VIT[key] for name, key in keys_of(CommonSettings).items() if key in VIT
}
# What a method needs on top for its special phases to happen within the rounds of TINY.
TINY_METHOD: dict[str, dict[str, Value]] = {
    "uefl": {
        "uefl.iteration-rounds": 1,
        "uefl.extension-rounds": 1,
        "uefl.gamma": 0.0,
        "uefl.codes": 4,
        "uefl.centroid-min-count": 1,
        "uefl.stop-when-certain": False,
    },
    "fedaligncl": {
        # A round is an epoch of two steps, and those of TINY mean nothing
        "train.epoch-steps": 2,
        "train.pace": 2,
        "train.local-epochs": 2,
        "train.batch-size": 32,
        "fedaligncl.warmup-epochs": 0,
        "fedaligncl.shared-embeddings": 8,
    },
    "fedavg-ft": {"fedavg-ft.finetune-rounds": 1},
    "fedbabu": {"fedavg-ft.finetune-rounds": 1},
    "fedswa": {"fedswa.averaged-rounds": 2},
    "feddistill": {"feddistill.class-min-count": 1, "privacy.sums-min-count": 1},
    "fedevprompt": VIT | {"fedevprompt.distillation-weight": 1.0, "fedevprompt.buffer-maps": 2},
    "fedpac": {"fedpac.class-min-count": 1, "privacy.sums-min-count": 1},
    "fedproto": {"fedproto.class-min-count": 1, "privacy.sums-min-count": 1},
    "picsr": {"picsr.expert-rounds": 1},
}
# A round is half an epoch, so that the site keeps optimiser, order and place
HALF_EPOCHS: dict[str, Value] = {
    "train.epoch-steps": 4,
    "train.pace": 2,
    "train.local-epochs": 2,
    "train.batch-size": 32,
}
VARIANTS: dict[str, dict[str, Value]] = {
    method: {"method": method} for method in sorted(METHODS)
} | {
    "distrans-embedding": {"method": "distrans", "distrans.offset-aggregation": "embedding"},
    "distrans-none": {"method": "distrans", "distrans.offset-aggregation": "none"},
    "fedaligncl-others": {"method": "fedaligncl", "fedaligncl.align-target": "others"},
    "fedaligncl-half-epochs": {
        "method": "fedaligncl",
        "train.epoch-steps": 4,
        "network.name": "resnet22",
    },
    "fedavg-optimiser-state": {"method": "fedavg", "train.optimiser-state": "run"},
    "fedavg-scheduled": {
        "method": "fedavg",
        "train.optimiser": "nadam",
        "train.optimiser-arguments": "{betas: [0.8, 0.9]}",
        "train.optimiser-state": "run",
        "train.schedule": "cosine",
        "train.warm-up": 1.0,
        "train.class-weights": "balanced",
        "train.augmentation": "[{RandomRotation: {degrees: 10}}]",
        "server.early-stopping-metric": "loss",
        "server.patience": 1,
    },
    "fedavg-half-epochs": {"method": "fedavg"} | HALF_EPOCHS,
    "fedefm-ring-vit": {"method": "fedefm", "fedefm.topology": "ring", "vit.train-backbone": True}
    | VIT,
    "feddistill-vit": {"method": "feddistill"} | VIT,
    "fedevprompt-all": {"method": "fedevprompt", "fedevprompt.shared-prompts": "all"},
    "fedevprompt-b-random": {
        "method": "fedevprompt",
        "fedevprompt.shared-prompts": "b",
        "fedevprompt.buffer-selection": "random",
    },
    "fedavg-secure": {"method": "fedavg", "secure.clip-norm": 2.0, "secure.aggregation": "secagg"},
    "fedevprompt-g": {
        "method": "fedevprompt",
        "vit.prompt-sets": "g",
        "train.optimiser-state": "run",
    },
    "local-half-epochs": {"method": "local"} | HALF_EPOCHS,
    "mix-half-epochs": {"method": "mix"} | HALF_EPOCHS,
    "fedproto-nearest": {"method": "fedproto", "fedproto.inference": "prototype"},
    "fedproto-vit": {"method": "fedproto"} | VIT,
    "uefl-segments": {"method": "uefl", "uefl.segments": 2},
    "picsr-equal": {"method": "picsr", "picsr.router-average": "equal"},
    "fedavg-bf16": {"method": "fedavg", "server.wire-precision": "bf16"},
    "scaffold-bf16": {
        "method": "scaffold",
        "server.wire-precision": "bf16",
        "server.wire-down": "bf16",
    },
}
# What FedEvPrompt's paper trains, by the names of ``CommonSettings``: its tables stand beside this
DERMOSCOPY: dict[str, Any] = {
    "dataset": "isic2019",
    "network": "vit",
    "backbone_weights": "timm",
    "rounds": 5,
    "local_epochs": 15,
    "optimiser": "adamw",
    "learning_rate": 5e-4,
    "basic_learning_rate": 2.5e-4,
    "weight_decay": 1e-2,
}
