"""Random numbers as a function of (seed, round, site, purpose), never of call order.

Node ids are random and replies arrive in any order, so no generator is shared between sites, rounds
or purposes. Each draw starts from its own key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """Derive a seed from ``seed`` and ``key`` by SHA-256, so it is the same on every machine.

    The result is from 0 to 2^63 - 1.

    Args:
        seed: the run's seed. Callers give 0 for random numbers that must be the same in every run.
        key: the purpose of the random numbers, followed by details such as the site and the round.
            Order and types count: 1 and "1" give different seeds.
    """
    # Without escapes and types the keys ("a/b",) and ("a", "b"), or 1 and "1", would share numbers
    parts = [str(part).replace("\\", "\\\\").replace("/", "\\/") for part in key]
    named = [f"{type(one).__name__}:{part}" for one, part in zip(key, parts, strict=True)]
    text = "/".join([str(seed), *named])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *key: int | str) -> torch.Generator:
    """Return a new torch generator on the CPU, seeded by ``(seed, *key)``."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *key))


@contextmanager
def seed_generators(
    seed: int, *key: int | str, device: torch.device | None = None
) -> Iterator[None]:
    """Seed torch's global generators by ``(seed, *key)`` inside the ``with`` block.

    Dropout and weight initialisation read only the global generators. The CPU's generator is always
    seeded. If ``device`` is a CUDA device, the generators of all GPUs are seeded too. After the
    block, the generators of the CPU and of ``device`` are as before. Those of other GPUs are not
    restored.
    """
    import torch

    cuda = device is not None and device.type == "cuda"
    devices = [device] if cuda else []
    with torch.random.fork_rng(devices=devices):
        drawn = derive_seed(seed, *key)
        # torch.manual_seed would keep a stack trace for each kind of GPU that is not in use
        torch.default_generator.manual_seed(drawn)
        if cuda:
            torch.cuda.manual_seed_all(drawn)
        yield
