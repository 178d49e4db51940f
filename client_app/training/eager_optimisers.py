"""PyTorch's optimisers without ``torch._dynamo``.

PyTorch guards methods of its optimisers against ``torch.compile``, and the guards import
``torch._dynamo`` at the first call: more than a second in every process, and nothing here is
compiled. Each guard names the method that it wraps, so a subclass can have the methods without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch.optim import Optimizer

_GUARDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def eager(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return an optimiser class that computes what ``kind`` does, and is never compiled."""
    base = cast(type[Optimizer], kind)
    methods = {name: inspect.unwrap(getattr(base, name)) for name in _GUARDED}
    methods["step"] = torch.no_grad()(inspect.unwrap(base.step))
    return type(base.__name__, (base,), methods)
