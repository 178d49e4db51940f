"""``fedsilo new``: a folder with an experiment file, a network to change, and a README."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.server_app.run.arguments import AnyPath, as_word


def new(project: AnyPath) -> Iterator[str]:
    """Make a folder for experiments of your own; all that its README shows runs.

    Raises:
        RunDirectoryError: there is such a folder, with files in it.
    """
    folder = Path(project)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirectoryError(f"{folder} exists and is not empty: choose another name")
    made = Path(__file__).with_name("project")
    copytree(made, folder, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for path in sorted(folder.iterdir()):
        yield str(path)
    yield f"next:  cd {as_word(folder)} && fedsilo simulate first"
