"""Another release of this checkout, as ``release/version.py`` would write it."""

import re
import runpy
from collections.abc import Mapping
from pathlib import Path

from fedsilo.core.processes import app_folder
from fedsilo.core.versions import FEDSILO


def released_as(version: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files, by path in the checkout, with another version where they have one."""
    places = runpy.run_path(str(app_folder() / "release" / "version.py"))["PLACES"]
    released = dict(files)
    for name in places.keys() & files.keys():
        pattern = f"({places[name]}){re.escape(FEDSILO)}"
        text = re.sub(pattern, rf"\g<1>{version}", files[name].decode(), flags=re.MULTILINE)
        released[name] = text.encode()
    return released


def write_release(version: str, app: Path) -> None:
    """Write a version into the checkout in ``app``, which may lack the files of images."""
    places = runpy.run_path(str(app_folder() / "release" / "version.py"))["PLACES"]
    present = {name: (app / name).read_bytes() for name in places if (app / name).is_file()}
    for name, data in released_as(version, present).items():
        (app / name).write_bytes(data)
