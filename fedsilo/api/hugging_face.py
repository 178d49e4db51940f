"""Downloads data sets of Hugging Face by name into the data directory.

Images are sorted into ``{train,val,test}/CLASS/``, which ``dataset=folder`` reads. Rows of a table
become a table. The result is a single silo, which a partition can divide. Needs the package
``datasets``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fedsilo.api.own_silos import ALONE, image_columns, write_silos
from fedsilo.core.errors import DataError, missing_extra
from fedsilo.core.files.atomic_files import build_folder
from fedsilo.core.one_line import format_count, one_line

_PARTS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


def fetch_named(name: str, data_dir: Path, label: str = "label") -> Iterator[str]:
    """Write a data set of Hugging Face into a new folder below ``data_dir``.

    Samples without a label are left out. The folder has the data set's name, with ``--`` in place
    of ``/``. It appears only when it is complete.

    Args:
        name: the name of a data set on the Hub, which is downloaded. It may also be a local folder
            that ``save_to_disk`` wrote.
        data_dir: the data directory.
        label: the column of the labels.

    Yields:
        Lines with the licence, the source, the number of samples left out (if any), the folder with
        the number of samples in each part, and the settings that use the data.

    Raises:
        DataError: the package ``datasets`` is missing, the data set cannot be loaded or used, no
            sample has a label, or the folder already exists.
    """
    loaded = _load_parts(name)
    parts, lost = {}, 0
    for called, part in loaded.items():
        labelled = _keep_labelled(part, label)
        lost += len(part) - len(labelled)
        if len(labelled):
            parts[called] = labelled
    if not parts:
        raise DataError(f"data set '{name}' has no sample with a label")
    target = data_dir / name.strip("/").replace("/", "--")
    if target.exists():
        raise DataError(f"{target} already exists: remove it to write it again")
    info = next(iter(parts.values())).info
    yield f"licence: {one_line(info.license or 'not stated', 100)}"
    yield f"source: {one_line(info.homepage or name, 200)}"
    if lost:
        yield f"left out: {format_count(lost, 'sample')} without a label"
    kinds: list[str] = []
    # build_folder returns nothing, so the name of the data set is passed through a list
    build_folder(target, lambda work: kinds.append(_write_parts(work, parts, label)))
    # Pictures in train, val and test are read by the data set 'folder', which takes these as splits
    dataset = {"images": "folder"}.get(kinds[0], kinds[0])
    counts = ", ".join(f"{len(part)} {called}" for called, part in parts.items())
    yield f"{target}: {counts}"
    yield f"--set dataset={dataset} --set data.dir={target} --set split.partition=dirichlet"


def _write_parts(folder: Path, parts: dict[str, Any], label: str) -> str:
    """Write the parts of a Hugging Face data set into ``folder``, and return their kind.

    The first part decides the kind for all parts. If it has a column of images, the kind is
    'images', and each part becomes a folder train, val or test. Otherwise the rows of all parts are
    joined into one table, without rows that have missing values, and the kind is 'table'.

    Args:
        folder: an empty folder.
        parts: name of each part -> its samples. Of images, 'validation' and 'valid' become val.
        label: the column of the labels.

    Raises:
        DataError: a part with images is not named train, validation, valid, val or test. Also
            raised if the samples or their labels cannot be used.
    """
    # The parts of a table are joined, because fedsilo makes the splits of a table itself
    if not image_columns(next(iter(parts.values())).features):
        rows = _library().concatenate_datasets(list(parts.values()))
        return write_silos(folder, {ALONE: rows}, label, "drop")
    by_split = {}
    # Any name is allowed for a part on the Hub, so an unknown name is refused instead of guessed
    for called, part in parts.items():
        if called not in _PARTS:
            raise DataError(f"part '{called}' must be one of {', '.join(_PARTS)}")
        by_split[_PARTS[called]] = part
    return write_silos(folder, by_split, label, "drop")


def _keep_labelled(part: Any, label: str) -> Any:
    """Return a part of a Hugging Face data set with only the samples that have a label.

    A sample has no label if its label is None. If the classes have names, a label below 0 is no
    label either, because the Hub stores unknown labels as -1. If the part has no column ``label``,
    it is returned unchanged.
    """
    if label not in part.features:  # the writer of the silo reports a missing column
        return part
    names = getattr(part.features[label], "names", None)
    kept = []
    for place, value in enumerate(part[label]):
        if value is not None and not (names and value < 0):
            kept.append(place)
    if len(kept) == len(part):
        return part
    return part.select(kept)


def _load_parts(name: str) -> dict[str, Any]:
    """Load a data set from a folder or from the Hugging Face Hub: name of each part -> its samples.

    If ``name`` is an existing folder, it must be one that ``save_to_disk`` wrote. Otherwise the
    data set of this name is downloaded. A data set without parts becomes one part named ``train``.

    Raises:
        DataError: the package ``datasets`` is missing, or the data set cannot be loaded.
    """
    library = _library()
    load = library.load_dataset
    if Path(name).is_dir():
        load = library.load_from_disk
    try:
        loaded = load(name)
    except Exception as error:  # the Hub, the network and damaged files raise errors of many types
        raise DataError(f"data set '{name}' cannot be loaded ({one_line(error, 200)})") from None
    if isinstance(loaded, dict):
        return dict(loaded)
    return {"train": loaded}


def _library() -> Any:
    """Import Hugging Face's package ``datasets`` and return it.

    Raises:
        DataError: the package is not installed, or another package named ``datasets`` was imported
            in its place, as happens in a checkout of fedsilo.
    """
    with suppress(ImportError):
        library = import_module("datasets")
        if hasattr(library, "load_dataset"):
            return library
    needed = missing_extra("a data set of Hugging Face", "huggingface")
    raise DataError(f"{needed}, and run outside of a checkout of fedsilo")
