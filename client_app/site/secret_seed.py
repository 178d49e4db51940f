"""A hospital's own seed: which samples a step sees and what dropout leaves out, no server knows.

A server that knew the seed would know which patients are behind each step. In a simulation it is
the run's, so that runs repeat.
"""

import os
import secrets
from pathlib import Path

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import CheckpointError

_BITS = 62


def secret_seed(folder: Path) -> int:
    """Return the seed in ``folder``, which is made at the first call and never changes.

    Raises:
        CheckpointError: its file is damaged.
    """
    path = folder / "seed"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _draw_once(path)
    try:
        seed = int(path.read_text(encoding="ascii"))
        if seed < 0:
            raise ValueError("below 0")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the hospital's own seed '{path.name}' cannot be read ({type(error).__name__}): bring "
            "it back, or remove the file: a new one is drawn, and running runs lose their order"
        ) from None
    return seed


def _draw_once(path: Path) -> None:
    """Write a new seed, unless another process has in the meantime."""
    drawn = path.with_name(f".seed-{os.getpid()}")
    write_atomically(drawn, f"{secrets.randbits(_BITS)}\n", mode=0o600)
    try:
        os.link(drawn, path)
    except FileExistsError:
        pass
    finally:
        drawn.unlink()
