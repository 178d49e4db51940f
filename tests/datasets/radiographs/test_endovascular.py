import dataclasses
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.radiographs.endovascular import ENDOVASCULAR, read_picture
from fedsilo.datasets.radiographs.masked_images import load_masked_silo
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from tests.support.errors import refuses

OWN = CommonSettings(dataset="endovascular")
DECLARATION = """\
sites: {human: human/list.csv, animal: animal.csv}
classes: [human, animal]
image-size: 16
"""
COUNT = 12  # images of the human source; the first nine have masks


def level(number: int) -> npt.NDArray[Any]:
    """Return an image of 20 x 16 pixels (width x height), the two outer columns black and white."""
    pixels = np.full((16, 20), 10 * number, dtype=np.uint8)
    pixels[:, :2], pixels[:, -2:] = 0, 255
    return pixels


def marked(number: int) -> npt.NDArray[Any]:
    """Return a mask: row ``number`` of the image, and the columns that are cropped."""
    mask = np.zeros((16, 20), dtype=np.uint8)
    mask[number], mask[:, :2] = 255, 255
    return mask


@pytest.fixture
def places(tmp_path: Path) -> Places:
    folder = tmp_path / "data"
    (folder / "human" / "frames").mkdir(parents=True)
    (folder / "endovascular.yaml").write_text(DECLARATION)
    rows = []
    for number in range(COUNT):
        Image.fromarray(level(number)).save(folder / "human" / "frames" / f"doe-{number}.png")
        mask = f"frames/mask-doe-{number}.png" if number < 9 else ""
        if mask:
            Image.fromarray(marked(number)).save(folder / "human" / mask)
        rows.append(f"frames/doe-{number}.png,human,P{number},{mask}\n")
    (folder / "human" / "list.csv").write_text("path,label,patient,mask\n" + "".join(rows))
    (folder / "animal.csv").write_text(
        "path,label\n" + "".join(f"human/frames/doe-{n}.png,animal\n" for n in range(4))
    )
    return Places(folder, tmp_path / "cache")


@pytest.fixture
def write(places: Places) -> Callable[..., Path]:
    """Return what saves an array as a file of the human source."""

    def save(name: str, pixels: npt.NDArray[Any], **options: Any) -> Path:
        assert places.data is not None
        path = places.data / "human" / name
        Image.fromarray(pixels).save(path, **options)
        return path

    return save


def rewrite(places: Places, change: Callable[[str], str], name: str = "human/list.csv") -> None:
    assert places.data is not None
    path = places.data / name
    path.write_text(change(path.read_text()))


def load(places: Places, **changes: Any) -> Silo:
    return load_masked_silo("human", dataclasses.replace(OWN, **changes), places)


def refused(places: Places, **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(places, **changes)
    assert not [path for path in places.cache.rglob("*") if path.is_file()]
    assert "doe" not in str(caught.value)
    assert "P3" not in str(caught.value)
    return str(caught.value)


def held(parts: Mapping[str, Any]) -> dict[str, set[int]]:
    """Return the images of each part by their number."""
    return {
        name: {round(int(p[0, 0, 8]) / 10) for p in part.inputs} for name, part in parts.items()
    }


def test_a_silo_has_all_images_and_its_masked_one_those_with_masks(places: Places) -> None:
    assert silo_names(dataclasses.replace(OWN, data_dir=str(places.data))) == ["human", "animal"]
    silo, masked = load_silo("human", OWN, places), load(places)
    assert (silo.classes, silo.shape.input_shape) == (("human", "animal"), (1, 16, 16))
    assert silo.train.inputs.dtype == torch.uint8
    assert (masked.name, masked.classes) == ("human", ("background", "catheter"))
    whole, some = held(silo.splits()), held(masked.splits())
    assert set().union(*whole.values()) == set(range(COUNT))
    assert {name: found & set(range(9)) for name, found in whole.items()} == some
    assert whole["test"]


def test_the_mask_is_cropped_as_its_image_and_has_two_values(places: Places) -> None:
    for part in load(places).splits().values():
        assert part.labels.dtype == torch.uint8
        for image, mask in zip(part.inputs, part.labels, strict=True):
            number = round(int(image[0, 0, 8]) / 10)
            assert (image == 10 * number).all()  # the outer columns are gone
            assert (mask[number] == 1).all()
            assert int(mask.sum()) == 16


def test_a_mask_is_found_whatever_form_its_images_umlaut_has(places: Places) -> None:
    """A Mac stores NFD, and a spreadsheet writes NFC: the mask was lost without a word."""
    assert places.data is not None
    frames = places.data / "human" / "frames"
    before = load(places).splits()
    for name in ("doe-0.png", "mask-doe-0.png"):
        (frames / name).rename(frames / unicodedata.normalize("NFD", f"ä{name}"))
    rewrite(places, lambda text: re.sub(r"(mask-)?doe-0\.", r"ä\1doe-0.", text))
    assert {part: len(split.labels) for part, split in load(places).splits().items()} == {
        part: len(split.labels) for part, split in before.items()
    }


def test_a_mask_is_resized_to_the_nearest_pixel(places: Places, write: Callable[..., Path]) -> None:
    blocks = np.kron(np.eye(4), np.ones((8, 8))).astype(np.uint8)
    for number in range(9):
        write(f"frames/doe-{number}.png", np.full((32, 32), 10 * number, dtype=np.uint8))
        write(f"frames/mask-doe-{number}.png", blocks)
    for size in (16, 32, 64):
        half = np.kron(np.eye(4), np.ones((size // 4, size // 4)))
        for part in load(places, image_size=size).splits().values():
            assert (part.labels.numpy() == half).all()


@pytest.mark.parametrize(
    "mask",
    [
        Image.fromarray(marked(3)),
        Image.fromarray(np.minimum(marked(3), 1)),
        Image.fromarray(marked(3) > 0),
        Image.fromarray(marked(3).astype(np.uint16) * 100),
        Image.fromarray(marked(3)).convert("P"),
        Image.merge("RGB", [Image.fromarray(m) for m in (marked(3), 0 * marked(3), 0 * marked(3))]),
        Image.merge("LA", [Image.fromarray(marked(3)), Image.new("L", (20, 16), 255)]),
    ],
    ids=["grey", "ones", "bits", "deep", "palette", "colours", "opaque"],
)
def test_whatever_is_not_0_is_catheter(places: Places, mask: Image.Image) -> None:
    assert places.data is not None
    rewrite(places, lambda text: re.sub(r"mask-doe-\d+", "one", text))
    mask.save(places.data / "human" / "frames" / "one.png")
    for part in load(places).splits().values():
        assert (part.labels[:, 3] == 1).all()
        assert part.labels.sum() == 16 * len(part)


def test_masks_need_no_column_for_training_but_for_segmentation(places: Places) -> None:
    assert len(load_silo("animal", OWN, places).train) == 3
    with pytest.raises(DataError) as caught:
        load_masked_silo("animal", OWN, places)
    said = "animal.csv, column 'mask': no image in use has a mask, but segmentation needs some"
    assert said in str(caught.value)


def test_too_few_training_images_with_masks_are_told(places: Places) -> None:
    rewrite(places, lambda text: re.sub(r"frames/mask-doe-[1-8].png", "", text))
    assert "human/list.csv: " in (said := refused(places, test_folds=0))
    assert "at least 2 are needed" in said


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "has a mask that is missing"),
        (lambda path: path.write_bytes(b"no image"), "has a mask that is not an image (PNG)"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-30]),
            "has a mask that is truncated or damaged",
        ),
        (
            lambda path: Image.new("L", (16, 20)).save(path),
            "has a mask that has 16x20 pixels, but its image 20x16",
        ),
    ],
    ids=["missing", "no-image", "cut-short", "size"],
)
def test_an_unusable_mask_is_told_by_its_line_and_can_be_left_out(
    places: Places, spoil: Callable[[Path], None], reason: str
) -> None:
    assert places.data is not None
    spoil(places.data / "human" / "frames" / "mask-doe-3.png")
    said = refused(places)
    assert f"human/list.csv: 1 of 12 images cannot be used: the image of line 5 {reason}" in said
    parts = held(load(places, broken_images="skip").splits())
    assert set().union(*parts.values()) == set(range(9)) - {3}
    assert len(load_silo("human", OWN, places).train) == 9, "classification reads no mask"


def test_an_unusable_image_is_told_by_its_line_too(places: Places) -> None:
    assert places.data is not None
    (places.data / "human" / "frames" / "doe-3.png").unlink()
    assert "the image of line 5 is missing" in refused(places)


@pytest.mark.parametrize("path", ["../../secret/doe.png", "/etc/doe.png", "../.."])
def test_a_mask_outside_the_data_directory_is_refused(places: Places, path: str) -> None:
    rewrite(places, lambda text: text.replace("frames/mask-doe-3.png", path))
    assert "list.csv, line 5, column 'mask': the file is outside the data dir" in refused(places)


def test_a_misspelt_column_is_refused(places: Places) -> None:
    rewrite(places, lambda text: text.replace(",mask\n", ",maske\n"))
    assert "mask (optional): missing [], 1 unknown" in refused(places)


def test_a_given_split_holds_for_masks_too(places: Places) -> None:
    parts = ["train"] * 6 + ["val"] * 4 + ["test"] * 2

    def with_parts(text: str) -> str:
        lines = text.splitlines()
        given = [f"{line},{part}" for line, part in zip(lines[1:], parts, strict=True)]
        return "\n".join([f"{lines[0]},split", *given])

    rewrite(places, with_parts)
    assert held(load(places).splits()) == {"train": set(range(6)), "val": {6, 7, 8}, "test": set()}


def test_a_changed_mask_is_read_again_and_an_equal_one_is_not(
    places: Places, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(places).train.labels.clone()
    write("frames/mask-doe-0.png", np.full_like(marked(0), 255))
    second = load(places)
    total = sum(int(part.labels.sum()) for part in second.splits().values())
    assert total == 8 * 16 + 16 * 16
    assert len(second.train) == len(first)
    monkeypatch.setattr("fedsilo.datasets.radiographs.endovascular.read_picture", None)
    assert torch.equal(load(places).train.labels, second.train.labels)


def test_sample_share_leaves_masks_with_their_images(places: Places) -> None:
    some = load(places, sample_share=0.7)
    assert 2 <= sum(map(len, some.splits().values())) < 9
    for part in some.splits().values():
        for image, mask in zip(part.inputs, part.labels, strict=True):
            assert mask[round(int(image[0, 0, 0]) / 10)].all()


def test_colours_become_grey_and_a_photograph_stands_upright(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[274] = 6  # turned by a quarter
    Image.new("RGB", (32, 16), (255, 255, 255)).save(path, exif=exif)
    picture = read_picture(path, 8)
    assert (picture.shape, picture.dtype.name) == ((32, 16), "float32")
    assert (picture == 1).all()


def test_16_bits_are_read_in_full_and_kept_with_8(
    places: Places, write: Callable[..., Path]
) -> None:
    rewrite(places, lambda text: text + "bits: 16\n", "endovascular.yaml")
    for number in range(COUNT):
        write(f"frames/doe-{number}.png", np.full((16, 20), 2570 * number, dtype=np.uint16))
    assert set().union(*held(load_silo("human", OWN, places).splits()).values()) == set(range(12))
    assert set().union(*held(load(places).splits()).values()) == set(range(9))


def test_a_dicom_is_read_as_a_picture(tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["fedsilo"])
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.Rows, dataset.Columns = levels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 16
    dataset.HighBit, dataset.PixelRepresentation = 15, 0
    dataset.PixelData = levels.tobytes()
    dataset.save_as(tmp_path / "a", enforce_file_format=True)
    assert read_picture(tmp_path / "a", 16) == pytest.approx(levels / 65535, abs=1e-6)


def test_a_file_of_another_depth_is_refused(tmp_path: Path) -> None:
    deep, flat = tmp_path / "deep.png", tmp_path / "flat.png"
    Image.fromarray(np.full((16, 16), 900, dtype=np.uint16)).save(deep)
    Image.new("L", (16, 16)).save(flat)
    with pytest.raises(BrokenImageError, match=r"must have 8 bits per pixel, as .* but has more"):
        read_picture(deep, 8)
    with pytest.raises(BrokenImageError, match="has 8 bits a pixel, but 16 are declared"):
        read_picture(flat, 16)
    with pytest.raises(BrokenImageError, match="is missing"):
        read_picture(tmp_path / "none.png", 8)


def test_the_declaration_has_the_papers_size_unless_it_says_otherwise(places: Places) -> None:
    assert ENDOVASCULAR.own_size(places) == 16
    rewrite(places, lambda text: text.replace("image-size: 16\n", ""), "endovascular.yaml")
    assert ENDOVASCULAR.own_size(places) == 224


def test_colour_constancy_means_nothing_to_grey_images() -> None:
    check_data_settings(dataclasses.replace(OWN, broken_images="skip", image_size=32))
    with refuses(SettingError, "data.colour-constancy"):
        check_data_settings(dataclasses.replace(OWN, colour_constancy=True))
