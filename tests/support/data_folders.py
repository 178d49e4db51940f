"""Folders of made-up data in the form of each data set that needs files, a few samples each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fedsilo.core.files.locations import Places

SCHEMA = """\
columns:
  - {name: age}
  - {name: kind, kind: categorical, levels: [a, b, c]}
  - {name: record, kind: ignored}
label: {column: ill, classes: {healthy: [0], disease: [1]}}
missing: ["", "NA"]
policy: impute
sites: {north: north.csv, south: south.csv}
"""
SITES = ("north", "south")
_DECLARATION = """\
sites: {north: north/list.csv, south: south/list.csv}
classes: [a, b]
image-size: 32
"""


def write_tables(folder: Path, rows: int = 30) -> Path:
    """Write ``schema.yaml`` and two hospitals' tables; every seventh age is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    for offset, site in enumerate(SITES):
        rng = np.random.default_rng(offset)
        lines = ["record,age,kind,ill"]
        for number in range(rows):
            age = "NA" if number % 7 == 6 else f"{rng.normal(50 + 10 * (number % 2), 8):.1f}"
            lines.append(f"p{number},{age},{'abc'[number % 3]},{number % 2}")
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_images(folder: Path, name: str, bits: int = 8, count: int = 16) -> Path:
    """Write the declaration ``name`` and two hospitals' PNG files: grey, or in colour of 8 bits."""
    deep = "" if name == "images.yaml" else f"bits: {bits}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(_DECLARATION + deep)
    for offset, site in enumerate(SITES):
        rng = np.random.default_rng(offset)
        (folder / site).mkdir(exist_ok=True)
        lines = ["path,label"]
        for number in range(count):
            save_picture(folder / site / f"{number}.png", rng, bits, number % 2)
            lines.append(f"{number}.png,{'ab'[number % 2]}")
        (folder / site / "list.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_sorted(folder: Path, count: int = 8) -> Path:
    """Write two hospitals' PNG files sorted into ``SITE/CLASS/``, ``count`` of each class."""
    for offset, site in enumerate(SITES):
        rng = np.random.default_rng(offset)
        for label, name in enumerate(("a", "b")):
            (folder / site / name).mkdir(parents=True)
            for number in range(count):
                save_picture(folder / site / name / f"{number}.png", rng, label=label)
    return folder


def write_arrays(folder: Path) -> Path:
    """Write two ``SITE.npz`` of 20 grey images of 16 x 16 pixels, brighter for label 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for offset, site in enumerate(SITES):
        labels = np.arange(20) % 2
        noise = np.random.default_rng(offset).integers(0, 100, (20, 16, 16))
        images = (noise + 100 * labels[:, None, None]).astype(np.uint8)
        np.savez(folder / f"{site}.npz", x=images, y=labels, classes=np.array(["a", "b"]))
    return folder


def save_picture(path: Path, rng: np.random.Generator, bits: int = 8, label: int = 0) -> None:
    """Write a grey PNG of 40 x 36 pixels of noise, brighter on the left for label 1."""
    top = 2**bits - 1
    pixels = rng.random((36, 40)) * 0.5
    pixels[:, :20] += 0.4 * label
    levels = np.rint(pixels * top).astype(np.uint16 if bits > 8 else np.uint8)
    Image.fromarray(levels).save(path)


def rewrite(places: Places, name: str, change: Callable[[str], str]) -> None:
    """Replace a text file of the data folder by what ``change`` makes of it."""
    assert places.data is not None
    path = places.data / name
    path.write_text(change(path.read_text()))
