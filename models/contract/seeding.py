"""Random numbers as a function of (seed, round, site, purpose), never of call order.

Node ids are random and replies arrive in any order, so no generator is shared between sites,
rounds or purposes: each draw starts from its own key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """Return a 63-bit seed for ``key`` under ``seed``, the same on every machine and version."""
    parts = [str(part).replace("\\", "\\\\").replace("/", "\\/") for part in key]
    named = [f"{type(one).__name__}:{part}" for one, part in zip(key, parts, strict=True)]
    text = "/".join([str(seed), *named])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *key: int | str) -> torch.Generator:
    """Return a CPU generator keyed on ``(seed, *key)``."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *key))


@contextmanager
def seed_generators(
    seed: int, *key: int | str, device: torch.device | None = None
) -> Iterator[None]:
    """Run a block with torch's global generators keyed on ``(seed, *key)``, then restore them.

    Dropout and weight initialisation only know the global generators, hence this block.
    """
    import torch

    cuda = device is not None and device.type == "cuda"
    devices = [device] if cuda else []
    with torch.random.fork_rng(devices=devices):
        drawn = derive_seed(seed, *key)
        # Not torch.manual_seed: for each kind of GPU that is not in use it keeps a stack trace
        torch.default_generator.manual_seed(drawn)
        if cuda:
            torch.cuda.manual_seed_all(drawn)
        yield
