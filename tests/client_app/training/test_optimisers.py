"""Optimisers by name: PyTorch's own steps, and what is refused before training."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedsilo.client_app.training.optimisers import check_optimiser, open_optimiser, refuse_forgetful
from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from tests.support.errors import refuses
from tests.support.fixes import refused

GRADIENTS = (1.0, -0.5, 2.0)


def stepped(optimiser: torch.optim.Optimizer, weight: nn.Parameter) -> float:
    for gradient in GRADIENTS:
        weight.grad = torch.tensor([gradient])
        optimiser.step()
    return weight.item()


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "options"),
    [
        ("rmsprop", "{alpha: 0.9, momentum: 0.5}", "RMSprop", {"alpha": 0.9, "momentum": 0.5}),
        ("RMSprop", "", "RMSprop", {}),
        ("adam", "{betas: [0.5, 0.9], eps: 1e-3}", "Adam", {"betas": (0.5, 0.9), "eps": 1e-3}),
        ("nadam", '{"momentum_decay": 0.1}', "NAdam", {"momentum_decay": 0.1}),
        ("SGD", "{momentum: 0.9, nesterov: true}", "SGD", {"momentum": 0.9, "nesterov": True}),
        ("adagrad", "", "Adagrad", {}),
        ("rprop", "", "Rprop", {}),
    ],
)
def test_an_optimiser_takes_the_steps_of_pytorchs_with_its_arguments(
    name: str, arguments: str, kind: str, options: dict[str, Any]
) -> None:
    settings = CommonSettings(optimiser=name, optimiser_arguments=arguments, learning_rate=0.1)
    check_optimiser(settings)
    ours, theirs = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimiser = open_optimiser(nn.ParameterList([ours]), settings)
    expected = getattr(torch.optim, kind)([theirs], lr=0.1, **options)
    assert stepped(optimiser, ours) == stepped(expected, theirs) != 1.0


def test_momentum_by_hand() -> None:
    settings = CommonSettings(
        optimiser="sgd", optimiser_arguments="{momentum: 0.5}", learning_rate=0.1
    )
    weight = nn.Parameter(torch.ones(1))
    ended = stepped(open_optimiser(nn.ParameterList([weight]), settings), weight)
    # velocities 1, 0.5 - 0.5 = 0, 0 + 2
    assert ended == pytest.approx(1 - 0.1 * (1 + 0 + 2))


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("adamm", "", "unknown optimiser 'adamm'"),
        ("sparseadam", "", "does not support dense gradients"),
        ("lbfgs", "", "'closure'"),
        ("muon", "", "2D parameters"),
        ("adam", "{beta: 0.9}", "'beta'"),
        ("adam", "{betas: 3}", "does not take these settings"),
        ("adam", "[betas]", "it must be a mapping, as {momentum: 0.9}"),
        ("adam", "{betas: ", "it is not valid YAML"),
        ("adam", "{weight_decay: 0.1}", "set 'train.weight-decay' instead"),
    ],
)
def test_an_optimiser_that_cannot_train_is_refused_in_one_line(
    name: str, arguments: str, told: str
) -> None:
    settings = CommonSettings(optimiser=name, optimiser_arguments=arguments)
    said = refused(lambda: check_optimiser(settings))
    assert told in said
    assert "\n" not in said


def test_a_state_that_sites_cannot_keep_is_refused_where_they_would() -> None:
    settings = CommonSettings(optimiser="adafactor")
    check_optimiser(settings)
    with refuses(SettingError, "train.optimiser-state", "round"):
        check_optimiser(replace(settings, optimiser_state="run"))
    check_optimiser(CommonSettings(optimiser="nadam", optimiser_state="run"))


@pytest.mark.parametrize(
    "name",
    [
        *("adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "sgd", "asgd", "adagrad"),
        *("adadelta", "adafactor", "rprop"),
    ],
)
@pytest.mark.parametrize("steps", [2, 50])
def test_each_step_of_a_usual_optimiser_counts(name: str, steps: int) -> None:
    decay = 1e-4 * (name != "rprop")
    refuse_forgetful(CommonSettings(optimiser=name, weight_decay=decay), steps)
    refuse_forgetful(CommonSettings(optimiser=name, learning_rate=0.1), steps)
