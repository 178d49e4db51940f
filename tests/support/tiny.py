"""Runs that take seconds: settings for every method, and variants worth a run of their own."""

from typing import Any

from fedsilo.models.contract.methods import METHODS
from fedsilo.models.contract.settings_schema import Value

# Small enough for seconds: 3 silos (one per distribution) of 40 training and 10 test digits.
TINY: dict[str, Value] = {
    "dataset": "digits",
    "silos": 3,
    "silo-train-size": 40,
    "silo-test-size": 10,
    "rounds": 2,
    "local-epochs": 1,
    "batch-size": 16,
    "width": 4,
    "mc-passes": 3,
    "device": "cpu",
    "seed": 7,
    "aggregation": "mean",  # of real sites too, whose runs are held against simulated ones
}
# A prompted ViT of 2 blocks, for methods that take any network
VIT: dict[str, Value] = {
    "network": "vit",
    "backbone-weights": "random",
    "backbone-width": 16,
    "backbone-depth": 2,
    "backbone-heads": 2,
    "backbone-patch": 4,
    "prompt-length": 3,
    "basic-layers": 1,
}
# The same by the names of ``CommonSettings``
VIT_FIELDS: dict[str, Any] = {key.replace("-", "_"): value for key, value in VIT.items()}
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
        "epoch-steps": 2,
        "pace": 2,
        "local-epochs": 2,
        "batch-size": 32,
        "fedaligncl.warmup-epochs": 0,
        "fedaligncl.shared-embeddings": 8,
    },
    "fedavg-ft": {"fedavg-ft.finetune-rounds": 1},
    "fedbabu": {"fedavg-ft.finetune-rounds": 1},
    "fedswa": {"fedswa.averaged-rounds": 2},
    "feddistill": {"feddistill.class-min-count": 1, "sums-min-count": 1},
    "fedevprompt": VIT | {"fedevprompt.distillation-weight": 1.0, "fedevprompt.buffer-maps": 2},
    "fedproto": {"fedproto.class-min-count": 1, "sums-min-count": 1},
    "picsr": {"picsr.expert-rounds": 1},
}
# A round is half an epoch, so that the site keeps optimiser, order and place
HALF_EPOCHS: dict[str, Value] = {
    "epoch-steps": 4,
    "pace": 2,
    "local-epochs": 2,
    "batch-size": 32,
}
VARIANTS: dict[str, dict[str, Value]] = {
    method: {"method": method} for method in sorted(METHODS)
} | {
    "distrans-embedding": {"method": "distrans", "distrans.offset-aggregation": "embedding"},
    "distrans-none": {"method": "distrans", "distrans.offset-aggregation": "none"},
    "fedaligncl-others": {"method": "fedaligncl", "fedaligncl.align-target": "others"},
    "fedaligncl-half-epochs": {"method": "fedaligncl", "epoch-steps": 4, "network": "resnet22"},
    "fedavg-optimiser-state": {"method": "fedavg", "optimiser-state": "run"},
    "fedavg-scheduled": {
        "method": "fedavg",
        "optimiser": "nadam",
        "optimiser-arguments": "{betas: [0.8, 0.9]}",
        "optimiser-state": "run",
        "schedule": "cosine",
        "warm-up": 1.0,
        "class-weights": "balanced",
        "augmentation": "[{RandomRotation: {degrees: 10}}]",
        "early-stopping-metric": "loss",
        "patience": 1,
    },
    "fedavg-half-epochs": {"method": "fedavg"} | HALF_EPOCHS,
    "fedefm-ring-vit": {"method": "fedefm", "fedefm.topology": "ring", "train-backbone": True}
    | VIT,
    "feddistill-vit": {"method": "feddistill"} | VIT,
    "fedevprompt-all": {"method": "fedevprompt", "fedevprompt.shared-prompts": "all"},
    "fedevprompt-b-random": {
        "method": "fedevprompt",
        "fedevprompt.shared-prompts": "b",
        "fedevprompt.buffer-selection": "random",
    },
    "fedavg-secure": {"method": "fedavg", "clip-norm": 2.0, "secure-aggregation": "secagg"},
    "fedevprompt-g": {"method": "fedevprompt", "prompt-sets": "g", "optimiser-state": "run"},
    "local-half-epochs": {"method": "local"} | HALF_EPOCHS,
    "mix-half-epochs": {"method": "mix"} | HALF_EPOCHS,
    "fedproto-nearest": {"method": "fedproto", "fedproto.inference": "prototype"},
    "fedproto-vit": {"method": "fedproto"} | VIT,
    "uefl-segments": {"method": "uefl", "uefl.segments": 2},
    "picsr-equal": {"method": "picsr", "picsr.router-average": "equal"},
    "fedavg-bf16": {"method": "fedavg", "wire-precision": "bf16"},
    "scaffold-bf16": {"method": "scaffold", "wire-precision": "bf16", "wire-down": "bf16"},
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
