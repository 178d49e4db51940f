"""Runs that are refused or fail, and their fixes."""

from pathlib import Path

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import silo_names
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.meeting import waiting
from tests.support.fixes import HEART, Case, Values, changed, check, refused, tiny
from tests.support.setting_keys import as_keys
from tests.support.tiny import TINY_METHOD, VIT

# Parts of the errors that the functions below try
TRIED = (
    "start more, or lower",
    "start fewer SuperNodes",
    "exists: choose another",
    "holds a run with other settings",
)
CASES = [
    Case(
        "does not take data set 'heart-synthetic', which is a table",
        HEART | {"method": "fedavg", "network": "conv", "rounds": 1},
        {"'network.name' to logistic": {"network": "logistic"}, "or mlp": {"network": "mlp"}},
    ),
    Case(
        "does not take data set 'digits', which is images",
        tiny("fedavg", network="mlp"),
        {"'network.name' to conv": {"network": "conv"}, "resnet22": {"network": "resnet22"}},
    ),
    Case(
        "has no validation samples, on which UEFL judges uncertainty",
        HEART | {"method": "uefl", "train.mc-passes": 2, "rounds": 2} | TINY_METHOD["uefl"],
        {
            "set 'split.val-folds'": {"split.val-folds": 4},
            "set 'uefl.max-iterations' to 1": {"uefl.max-iterations": 1},
        },
    ),
    Case(
        "codewords: lower 'uefl.codes'",
        tiny("uefl") | {"uefl.codes": 5000},
        {
            "lower 'uefl.codes'": {"uefl.codes": 8},
            "set 'uefl.refresh' to 'none'": {"uefl.refresh": "none"},
        },
    ),
    Case(
        "training diverged, its loss is",
        tiny("fedavg", learning_rate=1e30, optimiser="sgd"),
        {"lower 'train.learning-rate'": {"train.learning-rate": 0.001}},
    ),
    Case(
        "not a finite number: if training has diverged",
        tiny("fedavg", learning_rate=1e6, optimiser="sgd", local_steps=2),
        {"lower 'train.learning-rate'": {"train.learning-rate": 0.001}},
    ),
    Case(
        "contains non-finite values: if training has diverged",
        tiny("fedavg", learning_rate=1e6, optimiser="sgd"),
        {"lower 'train.learning-rate'": {"train.learning-rate": 0.001}},
    ),
    Case(
        "has a number beyond",
        tiny("fedavg", learning_rate=1e6),
        {"lower 'train.learning-rate'": {"train.learning-rate": 0.001}},
    ),
    Case(
        "and what the message asks for would make it",
        tiny("fedavg", sample_clip_norm=1.0, noise_multiplier=0.5, max_epsilon=3.0),
        {"'max-epsilon'": {"max-epsilon": 500.0}},
    ),
    Case(
        "network 'vit' needs weights for its backbone",
        tiny("fedavg", network="vit"),
        {"to 'random'": VIT},
    ),
    Case(
        "t-prompts would have no layer",
        tiny("fedevprompt", basic_layers=2),
        {
            "lower it": {"vit.basic-layers": 1},
            "set 'vit.prompt-sets' to 'g'": {"vit.prompt-sets": "g"},
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused_run_with_fix_ends(case: Case, tmp_path: Path) -> None:
    names = iter(range(100))

    def attempt(values: Values) -> None:
        named = {"run.out": str(tmp_path), "run.name": f"run{next(names)}"}
        settings = resolve(changed(values, named))
        run_inline(settings, len(silo_names(settings.common)))

    check(case, attempt)


@pytest.mark.parametrize(
    ("nodes", "wrong", "told", "fix"),
    [
        (2, {"run.min-sites": 3}, "start more, or lower 'run.min-sites'", {"run.min-sites": 2}),
        (4, {"silos": 3}, "start fewer SuperNodes, or raise 'split.silos'", {"silos": 4}),
    ],
)
def test_run_with_setting_for_its_nodes_ends(
    nodes: int,
    wrong: Values,
    told: str,
    fix: Values,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "_JOIN_SECONDS", 0.1)
    values = {**tiny("fedavg", rounds=1), "out": str(tmp_path)}

    def attempt(more: Values) -> None:
        run_inline(resolve(as_keys({**values, **more})), nodes)

    assert told in refused(lambda: attempt(wrong))
    assert not refused(lambda: attempt({**wrong, **fix}))


def test_existing_run_directory_is_resumed_or_another_is_made(tmp_path: Path) -> None:
    values = {**tiny("fedavg", rounds=1), "run.out": str(tmp_path), "run.name": "run"}

    def attempt(**more: Value) -> str:
        named = as_keys(more)
        return refused(lambda: run_inline(resolve(as_keys({**values, **named})), 3))

    assert not attempt()
    assert "choose another 'run.name', set 'run.resume' to true to continue it" in attempt()
    assert not attempt(resume=True)
    assert not attempt(run_name="other")
    said = attempt(resume=True, learning_rate=0.5)
    assert "holds a run with other settings" in said
    assert not attempt(run_name="another", learning_rate=0.5)
