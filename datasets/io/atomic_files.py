"""Files and folders that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_atomically(
    path: Path, content: bytes | str, mode: int = 0o644, *, lasting: bool = True
) -> None:
    """Write ``content`` to ``path`` so that no reader ever sees a part of it.

    ``lasting``: it is on the disk when this returns, and outlasts a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def build_folder(target: Path, fill: Callable[[Path], None], *, replace: bool = False) -> None:
    """Let ``fill`` write a new folder, then move it to ``target``.

    Args:
        target: where it is to be.
        fill: writes into a folder.
        replace: whether a folder that is there goes; else it, a rival's copy, is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        work = Path(scratch) / "folder"
        work.mkdir()
        fill(work)
        if replace:
            with suppress(FileNotFoundError):  # a rival moved it
                target.rename(Path(scratch) / "before")
        try:
            work.rename(target)
        except OSError:
            # Another process was faster; both built the same content from the same key.
            if not target.is_dir():
                raise
