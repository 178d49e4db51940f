"""States (the server's checkpoints, a site's private state): arrays and facts in one file.

A state is a safetensors file whose metadata have the facts as JSON, and a digest over everything,
so a file that is cut short or altered is refused.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.atomic_files import open_regular, write_atomically
from fedsilo.core.files.unpacked_size import unpacked_fault

Arrays = Mapping[str, npt.NDArray[Any]]

_ENTRY = "fedsilo"


def state_digest(arrays: Arrays, facts: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of arrays and facts, in hexadecimal.

    The digest covers the names, types, shapes and bytes of the arrays, and the facts as JSON. The
    order of the arrays and of the keys in ``facts`` does not matter.

    Args:
        arrays: arrays by name.
        facts: further values by name, such as numbers and strings.

    Raises:
        TypeError: JSON cannot represent a value in ``facts``.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def save_state(path: Path, arrays: Arrays, facts: Mapping[str, Any], mode: int = 0o644) -> None:
    """Write arrays and facts to one safetensors file, with a digest that shows later changes.

    An existing file is replaced atomically, and missing parent folders are made. Equal arrays and
    facts give files with equal bytes. ``load_state`` reads the file and checks the digest.

    Args:
        path: the file.
        arrays: arrays by name.
        facts: further values by name, which JSON must be able to represent.
        mode: the permissions of the file.

    Raises:
        TypeError: JSON cannot represent a value in ``facts``.
        OSError: the file cannot be written.
    """
    content = {"facts": dict(facts), "sha256": state_digest(arrays, facts)}
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    # One entry only: safetensors writes several in random order, and equal states are equal bytes.
    write_atomically(path, save(contiguous, {_ENTRY: json.dumps(content, sort_keys=True)}), mode)


def load_state(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the facts that ``save_state`` stored, and check their digest.

    Returns:
        The arrays by name, and the facts by name. Tuples among the facts come back as lists.

    Raises:
        CheckpointError: the file is missing, cut short, altered, not a state file, or larger than
            ``most_unpacked`` allows (1 GiB by default).
    """
    try:
        # Only to refuse a pipe, because safetensors would wait for its writer
        os.close(open_regular(path, os.O_RDONLY))
        # Its arrays are as long as the file, which may be sparse: next to nothing on the disk
        fault = unpacked_fault(path, path.stat().st_size)
        if fault:
            raise CheckpointError(f"{path} {fault}")
        with safe_open(path, framework="numpy") as file:
            content = json.loads((file.metadata() or {}).get(_ENTRY, "{}"))
            if not isinstance(content, dict) or not isinstance(content.get("facts"), dict):
                raise ValueError("its metadata are not fedsilo's")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        # TypeError: numpy has no such type of numbers, RecursionError: lists within lists
        raise CheckpointError(f"{path} is truncated or not a state file ({error})") from None
    facts = content["facts"]
    if content.get("sha256") != state_digest(arrays, facts):
        raise CheckpointError(f"{path} was altered: its checksum does not match its content")
    return arrays, facts
