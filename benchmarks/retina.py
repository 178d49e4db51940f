"""Lay out public retinal photographs with vessel masks as three hospitals of data set ``masks``.

    python benchmarks/retina.py SOURCE TARGET

SOURCE has one folder per data set, as its authors publish it: ``STARE`` (stare-images/,
labels-ah/; Hoover et al. 2000), ``CHASEDB`` (images/, manual/; Fraz et al. 2012, the first
observer's masks) and ``AV-WIDE`` (images/, manual/; Estrada et al. 2015). TARGET gets PNG files, a
manifest per site and ``masks.yaml``. Thin vessels would break up if whole photographs became 64
pixels wide, so four tiles of 128 pixels are cut from the middle of each and halved. Both eyes of a
CHASE_DB1 child are one patient, and so are a photograph's tiles. Nothing is downloaded.

docs/results/segmentation.csv is then made by

    fedsilo compare fedavg-retina fedprox-retina fedbn-retina ditto-retina local-retina mix-retina \
        --seeds 3 --unequal --set data.dir=TARGET --csv docs/results/segmentation.csv
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TILE = 128  # pixels of a side
DECLARATION = """\
sites: {stare: stare/manifest.csv, chase: chase/manifest.csv, wide: wide/manifest.csv}
classes: {background: [0], vessel: [255]}
image-size: 64
test-share: 0.4
"""


@dataclass(frozen=True)
class Pair:
    """A photograph and its mask, with the name of the patient."""

    image: Path
    mask: Path
    patient: str


def pairs_of_stare(folder: Path) -> Iterator[Pair]:
    """Yield STARE's 20 photographs, each of another patient, with the first observer's masks."""
    for image in sorted((folder / "stare-images").glob("*.ppm")):
        mask = next((folder / "labels-ah").glob(f"{image.stem}.*"))
        yield Pair(image, mask, image.stem)


def pairs_of_chase(folder: Path) -> Iterator[Pair]:
    """Yield CHASE_DB1's 28 photographs of 14 children, with the first observer's masks."""
    for image in sorted((folder / "images").glob("*.jpg")):
        yield Pair(image, folder / "manual" / f"{image.stem}_1stHO.png", image.stem[:-1])


def pairs_of_wide(folder: Path) -> Iterator[Pair]:
    """Yield AV-WIDE's 30 wide-field photographs with their masks."""
    for image in sorted((folder / "images").glob("*.png")):
        yield Pair(image, folder / "manual" / f"{image.stem}_vessels.png", image.stem)


SITES = {
    "stare": ("STARE", pairs_of_stare),
    "chase": ("CHASEDB", pairs_of_chase),
    "wide": ("AV-WIDE", pairs_of_wide),
}


def tiles(width: int, height: int) -> list[tuple[int, int, int, int]]:
    """Return the boxes (left, top, right, bottom) of the four tiles around an image's middle."""
    boxes = []
    for column in (-1, 0):
        for row in (-1, 0):
            left, top = width // 2 + column * TILE, height // 2 + row * TILE
            boxes.append((left, top, left + TILE, top + TILE))
    return boxes


def lay_out(source: Path, target: Path) -> dict[str, int]:
    """Write all files of the three sites, and return site -> number of tiles."""
    from PIL import Image

    counts = {}
    for site, (name, pairs) in SITES.items():
        folder = target / site
        folder.mkdir(parents=True)
        rows = []
        for pair in pairs(source / name):
            # The green channel shows vessels best, as all methods for such photographs use
            image = Image.open(pair.image).convert("RGB").getchannel("G")
            mask = Image.open(pair.mask).convert("L").point(lambda value: 255 * (value > 127))
            for number, box in enumerate(tiles(*image.size)):
                files = f"{pair.image.stem}-{number}.png", f"{pair.image.stem}-{number}-mask.png"
                image.crop(box).save(folder / files[0])
                mask.crop(box).save(folder / files[1])
                rows.append([*files, pair.patient])
        with (folder / "manifest.csv").open("w", newline="") as manifest:
            csv.writer(manifest).writerows([["image", "mask", "patient"], *rows])
        counts[site] = len(rows)
    (target / "masks.yaml").write_text(DECLARATION)
    return counts


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(lay_out(Path(sys.argv[1]), Path(sys.argv[2])))
