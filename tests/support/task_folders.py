"""A folder with made-up data of every task but classification, as hospitals keep their own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fedsilo.core.settings_schema import Value

SIDE, COUNT = 16, 40  # pixels of an image's side; samples of a site
FINDINGS = ("nodule", "effusion")
# The data set that reads each task's part of the folder
DATA: Mapping[str, Mapping[str, Value]] = {
    "regression": {"dataset": "images", "task": "regression", "network.name": "auto"},
    "multi-label": {"dataset": "arrays", "task": "multi-label"},
    "segmentation": {"dataset": "masks", "task": "segmentation", "data.image-size": SIDE},
    "survival": {"dataset": "table", "task": "survival"},
}
_SCHEMA = """\
columns:
  - {name: age, mean: 60.0, std: 10.0}
  - {name: dose, mean: 1.0, std: 0.5}
  - {name: treated, mean: 0.5, std: 0.5}
label: {column: died, task: survival, time: months, classes: {alive: [0], dead: [1]}}
"""


def write_tasks(folder: Path, sites: Sequence[str]) -> Path:
    """Write the declarations of all data sets, and each site's data.

    The table has 60 patients a site, of whom more than ten had the event.
    """
    folder.mkdir(parents=True)
    listed = {
        "schema.yaml": (_SCHEMA, "{}.csv"),
        "images.yaml": ("task: regression\noutcome: age\nunit: years\n", "{}/numbers.csv"),
        "masks.yaml": ("classes: {background: [0], vessel: [255]}\n", "{}/masks.csv"),
    }
    for name, (declared, place) in listed.items():
        files = {site: place.format(site) for site in sites}
        size = "" if name == "schema.yaml" else f"image-size: {SIDE}\n"
        text = f"{declared}{size}sites: {json.dumps(files, ensure_ascii=False)}\n"
        (folder / name).write_text(text, encoding="utf-8")
    for number, site in enumerate(sites):
        _write_site(folder, site, np.random.default_rng(number))
    return folder


def _write_site(folder: Path, site: str, rng: np.random.Generator) -> None:
    """Write a site's table, its pictures with numbers and masks, and its array with findings."""
    (folder / site).mkdir()
    _write_patients(folder / f"{site}.csv", rng)
    pictures = rng.integers(0, 200, (COUNT, SIDE, SIDE)).astype(np.uint8)
    marked = np.zeros_like(pictures)
    for number in range(COUNT):
        marked[number, number % 8 : number % 8 + 5] = 255
    pictures += marked // 5
    numbers, masks = ["path,label,patient"], ["image,mask,patient"]
    for number in range(COUNT):
        image, mask = f"{number}.png", f"{number}-mask.png"
        Image.fromarray(pictures[number]).save(folder / site / image)
        Image.fromarray(marked[number]).save(folder / site / mask)
        numbers.append(f"{image},{40 + 4 * (number % 8) + rng.normal():.1f},P{number}")
        masks.append(f"{image},{mask},P{number}")
    (folder / site / "numbers.csv").write_text("\n".join(numbers) + "\n")
    (folder / site / "masks.csv").write_text("\n".join(masks) + "\n")
    findings = rng.integers(0, 2, (COUNT, len(FINDINGS)))
    np.savez(folder / f"{site}.npz", x=pictures[:, None], y=findings, classes=np.array(FINDINGS))


def _write_patients(path: Path, rng: np.random.Generator, count: int = 60) -> None:
    age, treated = rng.normal(60, 10, count).round(1), rng.integers(0, 2, count)
    dose = (1 + 0.4 * treated + rng.normal(0, 0.5, count)).round(2)
    event = rng.exponential(30 * np.exp(-0.04 * (age - 60) + 0.5 * dose - 0.5))
    end = rng.uniform(20, 80, count)
    months, died = np.minimum(event, end).round(1), (event <= end).astype(int)
    rows = zip(age, dose, treated, months, died, strict=True)
    lines = ["age,dose,treated,months,died", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
