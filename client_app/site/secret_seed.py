"""A hospital's own seed, so that no server knows the order of its samples and its dropout.

A server that knew the seed would know which patients are in each step. A simulation uses the run's
seed instead, so that runs repeat.
"""

import secrets
from pathlib import Path

from pydantic import NonNegativeInt

from fedsilo.client_app.site.own_file import OwnFile

_BITS = 62


def secret_seed(folder: Path) -> int:
    """Return the seed in ``folder``; the first call draws it, and it never changes.

    Raises:
        CheckpointError: its file is damaged, or cannot be written.
    """
    file: OwnFile[int | None] = OwnFile(
        folder / "seed",
        NonNegativeInt,
        "the hospital's own seed 'seed'",
        "bring it back, or remove the file: a new one is drawn, and running runs lose their order",
    )
    with file.lock():  # two messages at once must not both draw
        seed = file.read(None)
        if seed is None:
            seed = secrets.randbits(_BITS)
            file.write(seed)
    return seed
