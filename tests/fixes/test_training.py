"""Settings of training that are refused before anything trains, and their fixes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsilo import load_run
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import silo_names
from fedsilo.datasets.silo.silos import Split
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.settings import resolve
from tests.support.fixes import GONE, HEART, Case, Values, changed, check, refused, tiny

# Parts of the errors that the functions below try
TRIED = (
    "no step had finite gradients in fp16: set",
    "a run keeps it only with 'server.early-stopping-metric' and a shared",
)
PRIVATE: Values = {"privacy.sample-clip-norm": 1.0, "privacy.noise-multiplier": 1.0}
SCHEDULED: Values = {"schedule": "cosine"}
STOPPED: Values = {"server.early-stopping-metric": "auc"}
BINARY = "average-precision"  # defined for two classes; digits have ten


def fedavg(**more: object) -> Values:
    return tiny("fedavg", **more)  # type: ignore[arg-type]


CASES = [
    Case(
        "sites are trained as one only if it is",
        fedavg(vectorised=2, class_weights="balanced"),
        {
            "set 'machine.vectorised' to 1": {"vectorised": 1},
            "if it is none": {"train.class-weights": "none"},
        },
    ),
    Case(
        "has training steps that sites cannot take as one: set",
        tiny("feddbe", vectorised=2),
        {"set 'machine.vectorised' to 1": {"vectorised": 1}},
    ),
    Case(
        "does not take these settings (",
        fedavg(optimiser="lbfgs"),
        {"change 'train.optimiser'": {"optimiser": "SGD"}},
    ),
    Case(
        "Invalid momentum value: -1): change 'train.optimiser', 'train.optimiser-arguments' or",
        fedavg(optimiser="sgd", optimiser_arguments="{momentum: -1}"),
        {"'train.optimiser-arguments'": {"train.optimiser-arguments": "{momentum: 0.5}"}},
    ),
    Case(
        "unexpected keyword argument 'weight_decay'",
        fedavg(optimiser="rprop", weight_decay=0.1),
        {"or 'train.weight-decay'": {"train.weight-decay": GONE}},
    ),
    Case(
        "'train.optimiser-arguments' has 'lr': set 'train.learning-rate' instead",
        fedavg(optimiser_arguments="{lr: 1}"),
        {
            "set 'train.learning-rate'": {
                "train.learning-rate": 1.0,
                "train.optimiser-arguments": GONE,
            }
        },
    ),
    Case(
        "has a state of other shapes than its weights, which sites cannot keep over rounds: set",
        fedavg(optimiser="adafactor", optimiser_state="run"),
        {
            "set 'train.optimiser-state' to 'round'": {"train.optimiser-state": "round"},
            "choose another 'train.optimiser'": {"optimiser": "adam"},
        },
    ),
    Case(
        "takes eta_min: remove what it does not take",
        fedavg(schedule="cosine", schedule_arguments="{eta: 1}"),
        {"remove what it does not take": {"train.schedule-arguments": "{eta_min: 1e-5}"}},
    ),
    Case(
        "both set the learning rate: set",
        fedavg(schedule="cosine", rate_decay="inverse-sqrt"),
        {
            "set 'train.rate-decay' to 'none'": {"train.rate-decay": "none"},
            "remove 'train.schedule' and 'train.warm-up'": {"schedule": GONE},
        },
    ),
    Case(
        "warms up by itself: remove 'train.warm-up', or set pct_start, its share, in",
        fedavg(schedule="one-cycle", warm_up=0.5),
        {
            "remove 'train.warm-up'": {"train.warm-up": GONE},
            "set pct_start": {
                "train.warm-up": GONE,
                "train.schedule-arguments": "{pct_start: 0.1}",
            },
        },
    ),
    Case(
        "rounds: lower it below 'rounds'",
        fedavg(warm_up=2.0),
        {"lower it below 'rounds'": {"train.warm-up": 1.0}},
    ),
    Case(
        "needs the rounds of a step, above 0: set 'train.schedule-arguments' to",
        fedavg(schedule="step"),
        {
            "to {step_size: 10, gamma: 0.1}": {
                "train.schedule-arguments": "{step_size: 10, gamma: 0.1}"
            }
        },
    ),
    Case(
        "cannot be made (",
        fedavg(schedule="step", schedule_arguments="{step_size: x}"),
        {"change 'train.schedule-arguments'": {"train.schedule-arguments": "{step_size: 1}"}},
    ),
    Case(
        "a learning rate would be negative or infinite",
        fedavg(schedule="cosine", schedule_arguments="{eta_min: -1}"),
        {"change 'train.schedule-arguments'": {"train.schedule-arguments": GONE}},
    ),
    Case(
        "' is refused (",
        fedavg(augmentation="[{RandomRotation: {degres: 5}}]"),
        {"change 'train.augmentation'": {"augmentation": "[{RandomRotation: {degrees: 5}}]"}},
    ),
    Case(
        "is for images, but data set 'heart-synthetic' is a table: remove",
        {**HEART, "method": "fedavg", "augmentation": "[RandomHorizontalFlip]"},
        {"remove 'train.augmentation'": {"augmentation": GONE}},
    ),
    Case(
        "are for the cross-entropy, but the loss is evidential: set",
        fedavg(class_weights="balanced", loss="evidential"),
        {
            "set 'train.loss' to 'cross-entropy'": {"loss": "cross-entropy"},
            "'train.class-weights' to 'none'": {"train.class-weights": "none"},
        },
    ),
    Case(
        "these weights come from counts of patients without noise; set",
        fedavg(class_weights="balanced", **PRIVATE),
        {
            "set 'train.class-weights' to numbers": {"train.class-weights": "1,1,1,1,1,1,1,1,1,2"},
            "to 'none'": {"train.class-weights": "none"},
        },
    ),
    Case(
        "gradients of single samples are not scaled and would become 0; set",
        fedavg(precision="fp16", **PRIVATE),
        {
            "set 'machine.precision' to 'bf16'": {"precision": "bf16"},
            "to 'fp32'": {"precision": "fp32"},
        },
    ),
    Case(
        "aligns by a loss that is not scaled, as fp16 needs it: set",
        tiny("fedaligncl", precision="fp16"),
        {
            "set 'machine.precision' to 'bf16'": {"precision": "bf16"},
            "to 'fp32'": {"precision": "fp32"},
        },
    ),
    Case(
        "has no effect without a metric: set 'server.early-stopping-metric'",
        fedavg(patience=3),
        {"set 'server.early-stopping-metric'": STOPPED},
    ),
    Case(
        "has noise or is not reported: remove",
        fedavg(secure_aggregation="secagg", clip_norm=1.0, trust="sums", **STOPPED),
        {
            "remove 'server.early-stopping-metric'": {"server.early-stopping-metric": GONE},
            "at trust 'sums' choose accuracy": {"server.early-stopping-metric": "accuracy"},
        },
    ),
    Case(
        "no round is measured: set 'server.evaluate-every' to 1",
        fedavg(evaluate_every=0, **STOPPED),
        {"set 'server.evaluate-every' to 1": {"server.evaluate-every": 1}},
    ),
]
RUN = [
    Case(
        "this site computes on its CPU: set it to 'bf16', 'fp32' or",
        fedavg(precision="fp16", rounds=1),
        {name: {"precision": name.strip("'")} for name in ("'bf16'", "'fp32'", "'auto'")},
    ),
    Case(
        "images must keep size and type; change 'train.augmentation'",
        fedavg(augmentation="[{CenterCrop: {size: 12}}]", rounds=1),
        {"change 'train.augmentation'": {"augmentation": "[{CenterCrop: {size: 16}}]"}},
    ),
    Case(
        "but no site measures on validation samples: set 'split.val-folds', or remove",
        {**HEART, "method": "fedavg", "rounds": 1, **STOPPED},
        {
            "set 'split.val-folds'": {"split.val-folds": 5},
            "remove 'server.early-stopping-metric'": {"server.early-stopping-metric": GONE},
        },
    ),
    Case(
        "but no site's validation samples define it for task",
        fedavg(rounds=1, **{"server.early-stopping-metric": BINARY}),
        {
            "choose 'loss'": {"server.early-stopping-metric": "loss"},
            "remove 'server.early-stopping-metric'": {"server.early-stopping-metric": GONE},
        },
    ),
]
CASES += RUN


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[[Values], None]:
    """Return a function that runs settings under a new name."""
    names = iter(range(100))

    def run(values: Values) -> None:
        named = {"run.out": str(tmp_path), "run.name": f"run{next(names)}"}
        settings = resolve(changed(values, named))
        run_inline(settings, len(silo_names(settings.common)))

    return run


@pytest.mark.parametrize("case", [case for case in CASES if case not in RUN], ids=str)
def test_refused_training_settings_with_fix_pass(case: Case) -> None:
    check(case, resolve)


@pytest.mark.parametrize("case", RUN, ids=str)
def test_run_that_site_refuses_with_fix_ends(case: Case, attempt: Callable[[Values], None]) -> None:
    check(case, attempt)


def test_training_that_overflows_in_fp16_continues_in_fp32() -> None:
    settings = CommonSettings(optimiser="sgd", learning_rate=1e-37, local_epochs=1)
    network = build_classifier(CommonSettings(network="logistic"), NetworkShape((2,), 2))
    split = Split(torch.full((4, 2), 30.0), torch.zeros(4, dtype=torch.long))

    def steep(inputs: Tensor, labels: Tensor) -> Tensor:
        return 1e36 * network.loss(inputs, labels)  # the scale is 2^10

    def attempt(half: bool) -> str:
        compute = Compute(torch.device("cpu"), bf16=False, fp16=half)
        training = LocalTraining(network, split, settings, compute, (1,), objective=steep)
        return refused(training.run)

    assert "set 'machine.precision' to 'fp32'" in attempt(half=True)
    assert not attempt(half=False)


def test_run_without_best_model_opens_without_best(
    attempt: Callable[[Values], None], tmp_path: Path
) -> None:
    attempt(fedavg(rounds=1))
    run = load_run(tmp_path / "run0")
    said = refused(lambda: run.model("s1a", best=True))
    assert "a run keeps it only with 'server.early-stopping-metric' and a shared model" in said
    assert not refused(lambda: run.model("s1a"))
    attempt(fedavg(rounds=1, early_stopping_metric="accuracy"))
    assert not refused(lambda: load_run(tmp_path / "run1").model("s1a", best=True))
