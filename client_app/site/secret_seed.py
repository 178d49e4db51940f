"""A hospital's own seed: which samples a step sees and what dropout leaves out, no server knows.

A server that knew the seed would know which patients are behind each step. In a simulation it is
the run's, so that runs repeat.
"""

import secrets
from pathlib import Path

from pydantic import NonNegativeInt

from fedsilo.client_app.site.own_file import OwnFile

_BITS = 62


def secret_seed(folder: Path) -> int:
    """Return the seed in ``folder``, which is made at the first call and never changes.

    Raises:
        CheckpointError: its file is damaged, or cannot be written.
    """
    file: OwnFile[int | None] = OwnFile(
        folder / "seed",
        NonNegativeInt,
        "the hospital's own seed 'seed'",
        "bring it back, or remove the file: a new one is drawn, and running runs lose their order",
    )
    with file.locked():  # of two messages at once only one draws
        seed = file.read(None)
        if seed is None:
            seed = secrets.randbits(_BITS)
            file.write(seed)
    return seed
