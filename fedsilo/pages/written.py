"""Writes a page to a file, but not over another file."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import write_atomically


def write_page(out: Path, page: Callable[[], str], *, overwrite: bool = False) -> Path:
    """Write a page and return its file.

    Args:
        out: the file to write.
        page: a function that builds the page; it is called only if the file may be written.
        overwrite: whether to replace a file that exists.

    Raises:
        SettingError: the file is a folder or exists; then nothing is written.
    """
    if out.is_dir():
        raise SettingError(f"{out} is a folder: name a file, such as {out / 'report.html'}")
    if out.exists() and not overwrite:
        raise SettingError(f"{out} exists: choose another --out, or say --overwrite")
    write_atomically(out, page())
    return out


def refuse_twice(paths: Sequence[Path], option: str) -> None:
    """Raise a SettingError if a file would be written twice; ``option`` sets another name."""
    for path in paths:
        if paths.count(path) > 1:
            raise SettingError(f"{path} would be written twice: give {option} another name")
