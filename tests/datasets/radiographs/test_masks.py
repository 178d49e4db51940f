"""Images with masks of classes, from manifests and from folders, and every fault of their files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.masks import MASK_IMAGES
from fedsilo.datasets.silo.silos import Silo
from tests.support.errors import refuses

OWN = CommonSettings(dataset="masks")
MANIFEST = """\
sites: {north: north/list.csv, south: south}
classes: {background: [0], vessel: [128, 200], stent: [255]}
image-size: 16
"""
COUNT = 8


def picture(number: int) -> npt.NDArray[np.uint8]:
    """Return an image of 20 x 16 pixels (width x height) in one grey."""
    return np.full((16, 20), 20 * number, dtype=np.uint8)


def mask(number: int) -> npt.NDArray[np.uint8]:
    """Return its mask: row ``number`` vessel, the row below stent, and edges that are cropped."""
    pixels = np.zeros((16, 20), dtype=np.uint8)
    pixels[number], pixels[number + 1], pixels[:, :2] = 128, 255, 200
    return pixels


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Two sites: one lists its files in a manifest, the other has them in folders."""
    folder = tmp_path / "data"
    for site in ("north", "south"):
        for kind in ("images", "masks"):
            (folder / site / kind).mkdir(parents=True)
        for number in range(COUNT):
            Image.fromarray(picture(number)).save(folder / site / "images" / f"doe-{number}.png")
            Image.fromarray(mask(number)).save(folder / site / "masks" / f"doe-{number}.tif")
    (folder / "masks.yaml").write_text(MANIFEST)
    rows = "".join(f"images/doe-{n}.png,masks/doe-{n}.tif,P{n // 2}\n" for n in range(COUNT))
    (folder / "north" / "list.csv").write_text("image,mask,patient\n" + rows)
    return Places(folder, tmp_path / "cache")


def data_of(places: Places) -> Path:
    assert places.data is not None
    return places.data


def load(places: Places, site: str = "north") -> Silo:
    return MASK_IMAGES.load(site, OWN, places)


@pytest.mark.parametrize("site", ["north", "south"])
def test_masks_become_labels_of_classes_beside_their_images(places: Places, site: str) -> None:
    silo = load(places, site)
    assert MASK_IMAGES.silo_names(OWN, places) == ["north", "south"]
    assert silo.class_names() == ("background", "vessel", "stent")
    assert silo.train.inputs.shape == (6, 1, 16, 16)
    for split in (silo.train, silo.test):
        assert split.labels.shape == (len(split), 16, 16)
        for image, labels in zip(split.inputs, split.labels, strict=True):
            number = int(image[0, 0, 0]) // 20
            expected = np.zeros((16, 16))
            expected[number], expected[number + 1] = 1, 2
            assert (labels.numpy() == expected).all()


def test_without_a_declaration_the_folders_name_the_sites(places: Places) -> None:
    (data_of(places) / "masks.yaml").unlink()
    for path in data_of(places).rglob("masks/*"):
        Image.fromarray((np.array(Image.open(path)) == 255).astype(np.uint8)).save(path)
    assert MASK_IMAGES.silo_names(OWN, places) == ["north", "south"]
    silo = MASK_IMAGES.load("north", CommonSettings(dataset="masks", image_size=16), places)
    assert silo.class_names() == ("background", "foreground")
    assert silo.train.labels.unique().tolist() == [0, 1]


def test_parts_of_folders_are_the_split(places: Places) -> None:
    south = data_of(places) / "south"
    for kind in ("images", "masks"):
        for number, path in enumerate(sorted((south / kind).iterdir())):
            target = south / ("train" if number < 6 else "test") / kind / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        (south / kind).rmdir()
    silo = load(places, "south")
    assert (len(silo.train), len(silo.val), len(silo.test)) == (6, 0, 2)


def test_colour_images_have_three_channels_and_dicom_is_refused_there(places: Places) -> None:
    folder = data_of(places)
    (folder / "masks.yaml").write_text(MANIFEST + "colour: true\n")
    assert load(places, "south").train.inputs.shape == (6, 3, 16, 16)
    (folder / "south" / "images" / "doe-3.png").rename(folder / "south" / "images" / "doe-3.dcm")
    with refuses(DataError, "image 4", "'colour'"):
        load(places, "south")


def test_a_new_image_is_read_without_a_mask(places: Places) -> None:
    path = data_of(places) / "north" / "images" / "doe-5.png"
    pixels = MASK_IMAGES.image_reader("north", OWN, places)(path)
    assert (pixels.shape, pixels.max()) == ((1, 16, 16), 100)


def test_all_masks_of_a_site_may_be_empty_and_the_log_says_so(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (data_of(places) / "south" / "masks").iterdir():
        Image.fromarray(np.zeros((16, 20), dtype=np.uint8)).save(path)
    with caplog.at_level("WARNING", "flwr"):
        assert not load(places, "south").train.labels.any()
    assert any("south" in record.message for record in caplog.records)


def spoil(pixels: npt.NDArray[Any]) -> Callable[[Path], None]:
    return lambda data: Image.fromarray(pixels).save(data / "north" / "masks" / "doe-3.tif")


def append(text: str) -> Callable[[Path], None]:
    def change(data: Path) -> None:
        with (data / "north" / "list.csv").open("a") as manifest:
            manifest.write(text)

    return change


WITHOUT_A_CLASS = mask(3)
WITHOUT_A_CLASS[0, 0] = 7


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (spoil(mask(3)[:10]), ("line 5", "20x10", "20x16")),
        (spoil(WITHOUT_A_CLASS), ("line 5", "7", "0, 128, 200, 255")),
        (spoil(np.stack([mask(3), mask(3), mask(4)], axis=2)), ("line 5", "colour")),
        (lambda data: (data / "north" / "masks" / "doe-3.tif").unlink(), ("line 5", "missing")),
        (append("images/doe-9.png,,P9\n"), ("line 10", "'mask'")),
        (append("images/doe-9.png,../../out.png,P9\n"), ("line 10", "'mask'")),
        (append("images/doe-0.png,masks/doe-1.tif,P9\n"), ("line 10", "'image'", "line 2")),
    ],
)
def test_a_fault_of_a_mask_is_one_line_with_its_manifest_and_no_name(
    places: Places, change: Callable[[Path], None], facts: tuple[str, ...]
) -> None:
    change(data_of(places))
    with refuses(DataError, "north/list.csv", *facts) as caught:
        load(places)
    assert "doe" not in str(caught.value)
    assert not [path for path in places.cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("gone", "facts"),
    [
        ("masks/doe-3.tif", ("south/images", "1 file", "'masks'")),
        ("images/doe-3.png", ("south/masks", "1 file", "'images'")),
    ],
)
def test_a_file_without_its_partner_is_refused(
    places: Places, gone: str, facts: tuple[str, ...]
) -> None:
    (data_of(places) / "south" / gone).unlink()
    with refuses(DataError, *facts) as caught:
        load(places, "south")
    assert "doe" not in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "facts"),
    [
        ("classes: {background: [0], vessel: [one]}", ("'classes'", "65535")),
        ("classes: {background: [0], vessel: [0]}", ("'classes'",)),
        ("classes: [vessel, vessel]", ("'classes'",)),
        ("classes: [background, vessel]\ncolour: 3", ("'colour'",)),
    ],
)
def test_a_wrong_declaration_is_refused(
    places: Places, declared: str, facts: tuple[str, ...]
) -> None:
    text = f"sites: {{north: north/list.csv}}\n{declared}\n"
    (data_of(places) / "masks.yaml").write_text(text)
    with refuses(DataError, "masks.yaml", *facts):
        load(places)


def test_a_folder_whose_name_no_site_may_have_is_refused_and_named(places: Places) -> None:
    (data_of(places) / "masks.yaml").unlink()
    (data_of(places) / "north").rename(data_of(places) / "all")
    with pytest.raises(DataError, match="all"):
        MASK_IMAGES.silo_names(OWN, places)


def test_a_folder_without_masks_is_refused(places: Places) -> None:
    (data_of(places) / "masks.yaml").unlink()
    for site in ("north", "south"):
        (data_of(places) / site / "masks").rename(data_of(places) / site / "labels")
    with refuses(DataError, "masks.yaml"):
        load(places)
