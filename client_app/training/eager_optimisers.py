"""PyTorch's optimisers without ``torch._dynamo``.

PyTorch guards methods of its optimisers against ``torch.compile``, and the guards import
``torch._dynamo`` at the first call: more than a second in every process, and nothing here is
compiled. Each guard names the method that it wraps, so a subclass can have the methods without it.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch.optim import Optimizer

_GUARDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def eager(kind: type[Optimizer]) -> type[Optimizer]:
    """Return an optimiser class that computes what ``kind`` does, and is never compiled."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _GUARDED}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)
