"""Optimisers by their names in torch.optim, and their moments as named arrays.

With these arrays an optimiser can continue in another round and in another process.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedsilo.core.errors import RefusedError, SettingError, unknown_name
from fedsilo.core.files.yaml_text import parse_structure
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import CommonSettings

_GUARDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_OWN_KEYS = {
    "lr": "train.learning-rate",
    "weight_decay": "train.weight-decay",
    "fused": "machine.fused-optimiser",
}
SMALLEST_PART = 0.01  # a step below this share of the largest hides no other step's gradient
_TRIED = 5  # the most steps to try; RAdam, for one, makes later ones a hundred times smaller
_WITHOUT_DECAY = ("lbfgs", "rprop", "sparseadam")
_EXAMPLE = "{momentum: 0.9}"


def _optimiser_classes() -> Mapping[str, Callable[..., Optimizer]]:
    """Return PyTorch's optimiser classes, each under its name in lower case, such as "adamw".

    All subclasses of ``Optimizer`` in ``torch.optim`` are included.
    """
    classes = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            classes[name.lower()] = kind
    return classes


_KINDS = _optimiser_classes()


def open_optimiser(module: nn.Module, settings: CommonSettings) -> Optimizer:
    """Build the optimiser that the settings choose, for the trainable parameters of ``module``.

    If ``module`` has a method ``slow_parameters()``, the parameters that it returns get the
    learning rate 'vit.basic-learning-rate'. If it has a method ``apart_parameters()``, the
    parameters that it returns are left out, because the federated method trains them with a second
    optimiser.

    Raises:
        SettingError: PyTorch has no optimiser of that name, or the optimiser refuses the arguments.
    """
    slow: set[nn.Parameter] = set(getattr(module, "slow_parameters", list)())
    apart: set[nn.Parameter] = set(getattr(module, "apart_parameters", list)())
    usual: list[nn.Parameter] = []
    slowed: list[nn.Parameter] = []
    for parameter in module.parameters():
        if not parameter.requires_grad or parameter in apart:
            continue
        if parameter in slow:
            slowed.append(parameter)
        else:
            usual.append(parameter)
    groups: list[dict[str, Any]] = [{"params": usual}]
    if slow:
        groups.append({"params": slowed, "lr": settings.basic_learning_rate})
    name = settings.optimiser.lower()
    if name not in _KINDS:
        raise unknown_name("optimiser", settings.optimiser, _KINDS)
    options: dict[str, Any] = {"lr": settings.learning_rate}
    if settings.weight_decay or name not in _WITHOUT_DECAY:
        options["weight_decay"] = settings.weight_decay
    if settings.fused_optimiser:
        options["fused"] = True
    if settings.optimiser_arguments:
        options |= _own_arguments(settings)
    try:
        return eager(_KINDS[name])(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(settings, error) from None


def _own_arguments(settings: CommonSettings) -> dict[str, Any]:
    """Read 'train.optimiser-arguments' as keyword arguments for the optimiser.

    Lists, such as Adam's betas, become tuples. Whether the optimiser takes the arguments is not
    checked here.

    Raises:
        SettingError: the text is malformed, or it has an argument that another setting sets, such
            as the learning rate.
    """
    chosen: dict[str, Any] = parse_structure(
        "train.optimiser-arguments", settings.optimiser_arguments, _EXAMPLE
    )
    for name, key in _OWN_KEYS.items():
        if name in chosen:
            raise SettingError(f"'train.optimiser-arguments' has '{name}': set '{key}' instead")
    for name, value in chosen.items():
        if isinstance(value, list):
            chosen[name] = tuple(value)
    return chosen


def _refusal(settings: CommonSettings, error: Exception) -> SettingError:
    return SettingError(
        f"PyTorch's optimiser '{settings.optimiser}' does not take these settings "
        f"({one_line(error, 200)}): change 'train.optimiser', 'train.optimiser-arguments' or "
        "'train.weight-decay'"
    )


def check_optimiser(settings: CommonSettings) -> None:
    """Check that the run's optimiser can be built, and can take a step on small tensors.

    The tensors have the shapes (2,) and (2, 3), so an optimiser that fails only on larger ones
    passes. If 'train.optimiser-state' is "run", a site stores the optimiser's state over rounds.
    Each tensor of the state must then have the shape of its weight or be a scalar.

    Raises:
        SettingError: the optimiser cannot be built, cannot take a step, or has a state of other
            shapes that must be stored.
    """
    weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in ((2,), (2, 3))])
    optimiser = open_optimiser(weights, settings)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    try:
        optimiser.step()
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise _refusal(settings, error) from None
    other_shapes = set()
    for weight in weights:
        for value in optimiser.state[weight].values():
            # Step counts are scalars
            if isinstance(value, Tensor) and value.shape not in (weight.shape, torch.Size()):
                other_shapes.add(value.shape)
    if settings.optimiser_state == "run" and other_shapes:
        raise SettingError(
            f"optimiser '{settings.optimiser}' has a state of other shapes than its weights, which "
            "sites cannot keep over rounds: set 'train.optimiser-state' to 'round', or choose "
            "another 'train.optimiser'"
        )


def refuse_forgetful(settings: CommonSettings, least: int, pull: float = 0.0) -> None:
    """Check that the optimiser's settings let each of the first steps have an effect on the result.

    Otherwise a single step, and so a few patients, could nearly decide the reply. A strong
    momentum, decay or penalty can cause that. The check trains a single weight without data, and
    trains it again for each step with the gradient of that step negated. Each negation must change
    the result by at least a hundredth of the largest change.

    Args:
        settings: the run's settings.
        least: the number of steps to check; at most 5 are checked, and 0 or 1 always passes.
        pull: the factor of a penalty's gradient towards the initial weights; 0 for no penalty.

    Raises:
        RefusedError: a step has too little effect. The error gives the number of steps and the
            number that have enough effect.
        SettingError: the optimiser cannot be built.
    """
    steps = min(least, _TRIED)  # a simulated site's floor is 1, so nothing is refused there
    weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(steps + 1)])
    optimiser = open_optimiser(weights, settings)
    for step in range(steps):
        for number, weight in enumerate(weights):
            gradient = 1.0
            if number == step:
                gradient = -1.0
            weight.grad = gradient + pull * weight.detach()
        optimiser.step()
    # Weight number i had the opposite gradient in step i; the last weight never did
    *turned, plain = (weight.item() for weight in weights)
    moved = [abs(one - plain) for one in turned]
    counted = sum(one >= SMALLEST_PART * max(moved) for one in moved)
    if counted < steps:
        raise RefusedError(
            f"of {steps} optimiser steps only {counted} would decide what leaves, but all must "
            "('minimum-steps-per-reply'): change the run's 'train.optimiser-arguments', or lower "
            "'train.weight-decay', 'train.learning-rate' or the weight of the method's penalty, or "
            "leave the site out"
        )


@cache
def eager(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return a subclass of the optimiser class ``kind`` with the same results but a faster start.

    PyTorch wraps some methods of its optimisers, such as ``step``, to guard them against
    ``torch.compile``. At the first call these guards import a large module, which takes more than a
    second in every process. The subclass has the methods without guards. It is made once per class.
    """
    base = cast(type[Optimizer], kind)
    methods: dict[str, Any] = {}
    for name in _GUARDED:
        methods[name] = inspect.unwrap(getattr(base, name))
    methods["step"] = torch.no_grad()(inspect.unwrap(base.step))
    return type(base.__name__, (base,), methods)


def moments_of(optimiser: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Return an optimiser's state for the parameters of ``module``, as named tensors.

    The names are ``<parameter>/<moment>``, such as "head.weight/exp_avg". Plain numbers become
    tensors. Tensors are not copied, so the optimiser's next step may change them. A parameter
    without state, such as a frozen one, has no entry.
    """
    moments = {}
    for name, parameter in module.named_parameters():
        for moment, value in optimiser.state[parameter].items():
            moments[f"{name}/{moment}"] = torch.as_tensor(value)
    return moments


def restore_moments(optimiser: Optimizer, module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put an optimiser's stored state back into it, so that it continues where it stopped.

    ``stored`` has the arrays of ``moments_of``, which are moved to the device of their parameters.
    Step counts stay on the CPU, unless the optimiser computes them on the GPU. A parameter begins
    without state if nothing is stored for it, or if a stored array is neither a scalar nor of the
    parameter's shape. Arrays for unknown parameters are ignored.
    """
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in stored.items():
        name, _, moment = key.rpartition("/")
        moments.setdefault(name, {})[moment] = value
    # PyTorch does the same: the kernel of a fused optimiser reads step counts on the GPU
    group = optimiser.param_groups[0]
    moves_steps = group.get("fused") or group.get("capturable")
    for name, parameter in module.named_parameters():
        own = moments.get(name, {})
        shapes = (parameter.shape, torch.Size())  # step counts have no shape
        if not own or not all(value.shape in shapes for value in own.values()):
            continue
        for moment, value in own.items():
            if moment != "step" or moves_steps:
                own[moment] = value.to(parameter.device)
        optimiser.state[parameter] = own
