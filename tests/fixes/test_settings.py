"""Settings that are refused before anything runs, and their fixes."""

import pytest

from fedsilo.server_app.config.settings import resolve
from tests.support.fixes import GONE, HEART, PHANTOM, Case, check, refused, tiny
from tests.support.tiny import TINY

# Parts of the errors that the functions below try
TRIED = ("but both are given: remove",)
CASES = [
    Case(
        "setting 'network.gradient-checkpointing' has no effect with network",
        tiny("fedavg", gradient_checkpointing=True),
        {
            "remove it": {"network.gradient-checkpointing": GONE},
            "set 'network.name' to 'resnet22'": {"network": "resnet22"},
        },
    ),
    Case(
        "setting 'network.classifier' has no effect with network",
        tiny("fedavg", classifier="published"),
        {
            "remove it": {"classifier": GONE},
            "set 'network.name' to 'resnet22'": {
                "network": "resnet22",
                "backbone-weights": "weights.safetensors",
            },
        },
    ),
    Case(
        "setting 'network.classifier' is 'published', and 'vit.backbone-weights' names no file",
        tiny("fedavg", classifier="published", network="resnet22"),
        {
            "set 'vit.backbone-weights' to Wu et al.'s file": {
                "backbone-weights": "weights.safetensors"
            },
            "'network.classifier' to 'seed'": {"classifier": "seed"},
        },
    ),
    Case(
        "setting 'network.leading-norm' has no effect with network",
        tiny("fedavg", leading_norm=False, network="resnet22"),
        {
            "remove it": {"network.leading-norm": GONE},
            "set 'network.name' to 'conv'": {"network": "conv"},
        },
    ),
    Case(
        "setting 'vit.prompt-length' has no effect with network",
        tiny("fedavg", prompt_length=3),
        {
            "remove it": {"vit.prompt-length": GONE},
            "set 'network.name' to 'vit'": {"network": "vit"},
        },
    ),
    Case(
        "setting 'train.evidence' has no effect with cross-entropy",
        tiny("fedavg", evidence="relu"),
        {
            "remove it": {"evidence": GONE},
            "set 'train.loss' to 'evidential'": {"loss": "evidential"},
        },
    ),
    Case(
        "there is no epsilon without",
        tiny("fedavg", max_epsilon=4.0),
        {
            "set both": {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 2.0},
            "remove 'privacy.max-epsilon'": {"max-epsilon": GONE},
        },
    ),
    Case(
        "differential privacy needs both above 0; set both, or neither",
        tiny("fedavg", sample_clip_norm=1.0),
        {
            "set both": {"privacy.noise-multiplier": 2.0},
            "or neither": {"privacy.sample-clip-norm": GONE},
        },
    ),
    Case(
        "means and deviations of a site's rows have no noise; set",
        HEART
        | {"method": "fedavg", "privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 1.0},
        {"set 'data.standardise' to 'declared'": {"standardise": "declared"}},
    ),
    Case(
        "private batches are drawn anew for each step, a gradient at a time; leave",
        tiny("fedavg", sample_clip_norm=1.0, noise_multiplier=1.0)
        | {"network.name": "resnet22", "network.gradient-checkpointing": True},
        {"leave 'network.gradient-checkpointing'": {"network.gradient-checkpointing": GONE}},
    ),
    Case(
        "and centroids of a site's features have no",
        tiny("uefl", sample_clip_norm=1.0, noise_multiplier=1.0),
        {
            "set 'uefl.codeword-start' to 'gaussian' and 'uefl.refresh' to 'none'": {
                "uefl.codeword-start": "gaussian",
                "uefl.refresh": "none",
            }
        },
    ),
    Case(
        "and the centroids of a first book have no",
        tiny("uefl", sample_clip_norm=1.0, noise_multiplier=1.0)
        | {"uefl.codeword-start": "gaussian", "uefl.refresh": "none", "uefl.first-book": "kmeans"},
        {"set 'uefl.first-book' to 'gaussian'": {"uefl.first-book": GONE}},
    ),
    Case(
        "has no effect with data set 'digits'",
        tiny("fedavg", image_size=32),
        {"remove it": {"data.image-size": GONE}},
    ),
    Case(
        "has no effect without partition 'unseen'",
        PHANTOM | {"method": "fedavg", "unseen": 0.5},
        {
            "remove it": {"unseen": GONE},
            "set 'split.partition' to 'unseen'": {"partition": "unseen"},
        },
    ),
    Case(
        "is a table, and partition 'unseen' cuts images by label",
        HEART | {"method": "fedavg", "partition": "unseen"},
        {
            "choose another data set": {"dataset": "digits", "network": "auto"},
            "set 'split.partition' to 'own'": {"partition": "own"},
        },
    ),
    Case(
        "does not take 'train.epoch-steps', epochs that span rounds",
        tiny("uefl", local_epochs=2, batch_size=32, epoch_steps=4, pace=2),
        {"set it to 0": {"train.epoch-steps": 0, "train.pace": GONE}},
    ),
    Case(
        "mixes probabilities, which are not evidence",
        tiny("picsr", rounds=14, loss="evidential"),
        {"leave 'train.loss' at 'auto'": {"loss": "auto"}},
    ),
    Case(
        "is of images, and data set 'heart-synthetic' is a table",
        HEART | {"method": "distrans"},
        {"choose another": {"method": "fedavg"}},
    ),
    Case(
        ": set 'privacy.sample-clip-norm' and 'privacy.noise-multiplier' to 0, or choose another "
        "method",
        tiny("mix", sample_clip_norm=1.0, noise_multiplier=1.0),
        {
            "set 'privacy.sample-clip-norm' and 'privacy.noise-multiplier' to 0": {
                "privacy.sample-clip-norm": 0,
                "privacy.noise-multiplier": 0,
            },
            "choose another method": {"method": "fedavg"},
        },
    ),
    Case(
        "counts its epochs in steps",
        TINY
        | {"method": "fedaligncl", "rounds": 40, "train.local-epochs": 2, "train.batch-size": 32},
        {"set 'train.epoch-steps' (120": {"train.epoch-steps": 120, "train.pace": 40}},
    ),
    Case(
        "alignment and curriculum would never begin",
        tiny("fedaligncl", fedaligncl__warmup_epochs=5),
        {
            "lower it": {"fedaligncl.warmup-epochs": 0},
            "raise 'rounds'": {"rounds": 20},
        },
    ),
    Case(
        "no round of FedAvg is left",
        tiny("fedavg-ft", fedavg_ft__finetune_rounds=2) | {"fedavg-ft.finetune-rounds": 2},
        {
            "raise 'rounds'": {"rounds": 4},
            "choose 'local'": {"method": "local", "fedavg-ft.finetune-rounds": GONE},
        },
    ),
    Case(
        "prompts a frozen ViT",
        tiny("fedevprompt", train_backbone=True),
        {"'vit.train-backbone' to false": {"vit.train-backbone": False}},
    ),
    Case(
        "which has no b-prompts",
        tiny("fedevprompt") | {"fedevprompt.shared-prompts": "b", "vit.prompt-sets": "g"},
        {
            "set 'vit.prompt-sets' to 'b-t'": {"vit.prompt-sets": "b-t"},
            "'fedevprompt.shared-prompts' to 'all'": {"fedevprompt.shared-prompts": "all"},
        },
    ),
    Case(
        "all prototypes are equal",
        HEART | {"method": "picsr", "standardise": "site"},
        {
            "set it to 'pooled'": {"standardise": "pooled"},
            "or 'declared'": {"standardise": "declared"},
        },
    ),
    Case(
        "a site that is too small for a prototype would send its sums",
        HEART | {"method": "picsr", "picsr.prototype-min-count": 20},
        {"raise 'privacy.sums-min-count'": {"sums-min-count": 20}},
    ),
    Case(
        "none is left for the router",
        tiny("picsr", rounds=2) | {"picsr.expert-rounds": 10},
        {
            "setting 'rounds' is 2": {"rounds": 40},
            "'picsr.expert-rounds'": {"picsr.expert-rounds": 1},
        },
    ),
    Case(
        "no codebook would ever be extended",
        tiny("uefl") | {"uefl.iteration-rounds": 5},
        {
            "raise 'rounds'": {"rounds": 12},
            "lower 'uefl.iteration-rounds'": {"uefl.iteration-rounds": 1},
            "set 'uefl.max-iterations' to 1": {"uefl.max-iterations": 1},
        },
    ),
    Case(
        "method 'fedavg' has no setting",
        {"method": "fedavg", "uefl.gamma": 0.2},
        {"remove it": {"uefl.gamma": GONE}},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused_settings_with_fix_pass(case: Case) -> None:
    check(case, resolve)


def test_setting_under_both_names_passes_without_the_old_one() -> None:
    both = {**tiny("fedavg"), "learning-rate": 0.1, "train.learning-rate": 0.1}
    assert "remove 'learning-rate'" in refused(lambda: resolve(both))
    del both["learning-rate"]
    assert not refused(lambda: resolve(both))
