"""Kinds ``files-<data set>`` and ``cache-<data set>``: a file of data or of a cache, mutated.

A silo is either refused in one line or is one: labels of its classes, inputs of its task. From a
mutated cache comes what was there before, or it is refused.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.radiographs.masked_images import load_masked_silo, masked_data_sets
from fedsilo.datasets.registry import DATA_SETS, data_set, load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.server_app.config.settings import resolve
from tests.fuzz.driver import Kind, Trial
from tests.fuzz.file_mutations import mutate_file
from tests.fuzz.oracle import line_faults
from tests.fuzz.replies import listening
from tests.support.made_data import MADE, SMALL, write_data
from tests.support.setting_keys import as_keys
from tests.support.tiny import TINY

_DIGITS = ("split.silos", "split.silo-train-size", "split.silo-test-size")
# Of what needs no files the smallest: a cache is a cache
_MADE_UP: dict[str, dict[str, Value]] = {
    "digits": {key: TINY[key] for key in _DIGITS},
    "heart-synthetic": {},
}

_SIDE = re.compile(r"image-size['\"]?\s*:\s*([\d_]{1,6})")
_USUAL = {"images.yaml": 224, "endovascular.yaml": 224, "mammography.yaml": 2048}
_LARGEST = 4096  # pixels of a side; what is larger is refused
_IMAGES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm", ".bmp", ".webp"}


def kinds() -> list[Kind]:
    """Return a kind of files for each data set that has some, and kinds of caches."""
    with_files = [n for n in DATA_SETS if n in MADE or data_set(n).files]
    files = [Kind(f"files-{name}", lambda f, n=name: _files(f, n), 4) for name in with_files]
    cached = [*_MADE_UP, "table", "images", "mammography", "endovascular"]
    return [*files, *(Kind(f"cache-{n}", lambda f, n=n: _cached(f, n), 4) for n in cached)]


def _settings(name: str, data: Path, **more: Value) -> CommonSettings:
    own = SMALL.get(name, {}) | _MADE_UP.get(name, {})
    named = as_keys(more)
    task = data_set(name).tasks[0]
    values: dict[str, Value] = {
        "dataset": name,
        "task": task,
        "data.dir": str(data),
        **own,
        **named,
    }
    return resolve({"method": "fedavg", **values}).common


def _files(folder: Path, name: str) -> Callable[[Trial], None]:
    write_data(name, folder)
    if name in MADE:  # else what is written there is refused whatever is done to it
        _loaded(name, _settings(name, folder), folder.parent / "honest")
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    lists = [file for file in files if Path(file).suffix in (".csv", ".yaml", "")]

    def trial(one: Trial) -> None:
        data = one.folder / "data"
        shutil.copytree(folder, data)
        names = lists if lists and one.rng.random() < 0.4 else files
        mutate_file(one.rng, data / one.rng.choice(names), one.done)
        one.megabytes = _asked_for(data)
        more: dict[str, Value] = {}
        if "data.broken-images" in data_set(name).settings and one.rng.random() < 0.5:
            more["broken_images"] = "skip"
        try:
            with listening(one):
                one.faults += _loaded(name, _settings(name, data, **more), one.folder / "cache")
        except FedsiloError as error:
            one.faults += line_faults(str(error))
            raise
        finally:
            strays = {path.name for path in one.folder.iterdir()} - {"data", "cache"}
            one.faults += [f"outside the cache: {stray!r}" for stray in strays]

    return trial


def _asked_for(data: Path) -> float:
    """Return the megabytes of all images at the largest size that a declaration asks for.

    They are made in memory, written, and read where they were written.
    """
    files = [path for path in data.glob("*.yaml") if path.is_file()]  # no folder, no pipe
    declared = {path.name: path.read_text(errors="replace") for path in files}
    sides = [int(side) for text in declared.values() for side in _SIDE.findall(text)]
    sides = sides or [_USUAL[name] for name in declared if name in _USUAL]
    images = sum(path.suffix in _IMAGES for path in data.rglob("*"))
    return max((2 * 3 * images * s**2 / 1e6 for s in sides if s <= _LARGEST), default=0.0)


def _cached(folder: Path, name: str) -> Callable[[Trial], None]:
    data, cache = folder / "data", folder / "cache"
    data.mkdir()
    write_data(name, data)
    settings = _settings(name, data)
    site = silo_names(settings)[0]
    honest = load_silo(site, settings, Places(data, cache))

    def trial(one: Trial) -> None:
        own = one.folder / "cache"
        shutil.copytree(cache, own)
        files = sorted(path for path in own.rglob("*") if path.is_file())
        mutate_file(one.rng, one.rng.choice(files), one.done)
        try:
            with listening(one):
                found = load_silo(site, settings, Places(data, own))
        except FedsiloError as error:
            one.faults += line_faults(str(error))
            raise
        one.faults += [] if _same(honest, found) else ["an altered cache was used"]

    return trial


def _same(one: Silo, other: Silo) -> bool:
    pairs = zip(one.splits().values(), other.splits().values(), strict=True)
    equal = all(
        a.inputs.shape == b.inputs.shape
        and torch.equal(a.inputs.nan_to_num(), b.inputs.nan_to_num())
        and torch.equal(a.labels, b.labels)
        for a, b in pairs
    )
    facts = [
        (s.name, s.distribution, s.shape, s.fingerprints, s.features, s.classes, s.dropped)
        for s in (one, other)
    ]
    return equal and facts[0] == facts[1]


def _loaded(name: str, settings: CommonSettings, cache: Path) -> list[str]:
    """Load every silo, masked ones too, and return what is wrong with them."""
    places, faults = Places(Path(settings.data_dir), cache), []
    for site in silo_names(settings)[:2]:
        silo = load_silo(site, settings, places)
        for split in silo.splits().values():
            if split.inputs.shape[1:] != silo.shape.input_shape:
                faults.append(f"inputs {split.inputs.shape} of a task of {silo.shape.input_shape}")
            if (
                len(split)
                and not 0 <= int(split.labels.min()) <= int(split.labels.max()) < silo.shape.outputs
            ):
                faults.append("labels out of range")
            if split.inputs.is_floating_point() and split.inputs.isinf().any():
                faults.append("infinite inputs")
        data_set(name).measures(silo, settings, places)
        data_set(name).file_measures(site, settings, places)
        if name in masked_data_sets():
            load_masked_silo(site, settings, places)
    return faults
