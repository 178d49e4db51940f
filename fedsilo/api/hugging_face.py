"""Downloads data sets of Hugging Face by name into the data directory.

Images are sorted into ``{train,val,test}/CLASS/``, which ``dataset=folder`` reads; rows become a
table. Either is a single silo, which a partition can cut. Needs the package ``datasets``.
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
    """Download a data set and write it into a folder of ``data_dir``; yield lines about it.

    Args:
        name: the data set's name on the Hub, or a folder that ``save_to_disk`` wrote.
        data_dir: the data directory.
        label: the column of the labels.

    Raises:
        DataError: the package is missing, the data set cannot be loaded or used, or its folder
            already exists.
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
    build_folder(target, lambda work: kinds.append(_write_parts(work, parts, label)))
    dataset = {"images": "folder"}.get(kinds[0], kinds[0])
    counts = ", ".join(f"{len(part)} {called}" for called, part in parts.items())
    yield f"{target}: {counts}"
    yield f"--set dataset={dataset} --set data.dir={target} --set split.partition=dirichlet"


def _write_parts(folder: Path, parts: dict[str, Any], label: str) -> str:
    """Write rows as one table, or pictures into a folder for each part; return the data set."""
    if not image_columns(next(iter(parts.values())).features):
        rows = _library().concatenate_datasets(list(parts.values()))
        return write_silos(folder, {ALONE: rows}, label, "drop")
    by_split = {}
    for called, part in parts.items():
        if called not in _PARTS:
            raise DataError(f"part '{called}' must be one of {', '.join(_PARTS)}")
        by_split[_PARTS[called]] = part
    return write_silos(folder, by_split, label, "drop")


def _keep_labelled(part: Any, label: str) -> Any:
    """Keep only the samples that have a label; for named classes, -1 means no label."""
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
    """Load the parts of a data set, by name; a data set without parts is all ``train``."""
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
    """Import the package ``datasets``; in a checkout, fedsilo's folder of that name hides it."""
    with suppress(ImportError):
        library = import_module("datasets")
        if hasattr(library, "load_dataset"):
            return library
    needed = missing_extra("a data set of Hugging Face", "huggingface")
    raise DataError(f"{needed}, and run outside of a checkout of fedsilo")
