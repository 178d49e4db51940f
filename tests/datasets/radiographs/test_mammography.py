import dataclasses
import logging
import os
from collections.abc import Callable
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
from fedsilo.datasets.images.manifests import IMAGES
from fedsilo.datasets.radiographs.mammography import MAMMOGRAPHY
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_names
from fedsilo.datasets.silo.declared_silos import read_declared
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.networks.encoders import float_inputs
from tests.support.data_folders import rewrite
from tests.support.errors import refuses

OWN = CommonSettings(dataset="mammography")
DECLARATION = """\
sites: {north: north/list.csv, south: south.csv}
classes: {benign: [B, N], malignant: [M]}
image-size: 16
"""


def mammogram(number: int) -> npt.NDArray[Any]:
    """Return 16 x 16 levels, with a dark upper right corner, of which the last is the number."""
    levels = np.random.default_rng(number).integers(20000, 65536, (16, 16)).astype(np.uint16)
    levels[:4, 10:] = 0
    levels[-1, -1] = 30000 + number
    return levels


def write_dicom(path: Path, levels: npt.NDArray[Any], photometric: str = "MONOCHROME2") -> None:
    dataset = FileDataset("", {}, file_meta=FileMetaDataset(), preamble=b"\0" * 128)
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["fedsilo"])
    dataset.Rows, dataset.Columns = levels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, photometric
    dataset.BitsAllocated = dataset.BitsStored = 16
    dataset.HighBit, dataset.PixelRepresentation = 15, 0
    dataset.PixelData = levels.tobytes()
    dataset.save_as(path, enforce_file_format=True)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return two hospitals: north has PNG of 10 patients with two images each, south one DICOM."""
    folder = tmp_path / "data"
    (folder / "north" / "scans").mkdir(parents=True)
    (folder / "mammography.yaml").write_text(DECLARATION)
    rows = []
    for number in range(20):
        Image.fromarray(mammogram(number)).save(folder / "north" / "scans" / f"{number}.png")
        rows.append(f"scans/{number}.png,{'M' if number < 8 else 'N'},P{number // 2}\n")
    (folder / "north" / "list.csv").write_text("path,label,patient\n" + "".join(rows))
    for number in range(4):
        write_dicom(folder / f"IM{number}", mammogram(number))
    rows = [f"IM{number},N\n" for number in range(4)]
    (folder / "south.csv").write_text("path,label\n" + "".join(rows))
    return Places(folder, tmp_path / "cache")


def load(places: Places, site: str = "north", **changes: Any) -> Silo:
    return load_silo(site, dataclasses.replace(OWN, **changes), places)


def refused(places: Places, site: str = "north", **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(places, site, **changes)
    assert not [path for path in places.cache.rglob("*") if path.is_file()]
    return str(caught.value)


def numbers(silo: Silo) -> list[list[int]]:
    return [[int(p[0, -1, -1]) + 32768 - 30000 for p in s.inputs] for s in silo.splits().values()]


def test_a_silo_keeps_16_bits_and_a_patient_on_one_side(places: Places) -> None:
    silo = load(places, val_folds=4)
    assert (silo.classes, silo.shape.input_shape) == (("benign", "malignant"), (1, 16, 16))
    assert silo.train.inputs.dtype == torch.int16
    parts = numbers(silo)
    assert sorted(number for part in parts for number in part) == list(range(20))
    assert len(parts[2]) == 4, "a fifth is test data"
    patients = [{number // 2 for number in part} for part in parts]
    assert all(a.isdisjoint(b) for a in patients for b in patients if a is not b)
    for split, part in zip(silo.splits().values(), parts, strict=True):
        assert split.labels.tolist() == [int(number < 8) for number in part]
        for image, number in zip(split.inputs, part, strict=True):
            assert (image[0].numpy().astype(int) + 32768 == mammogram(number)).all(), "to the bit"
    standardised = float_inputs(silo.train.inputs)
    assert standardised.mean(dim=(1, 2, 3)).abs().max() < 1e-5


def test_dicoms_are_known_by_content_and_a_site_without_positives_takes_part(
    places: Places,
) -> None:
    silo = load(places, "south")
    assert silo.label_counts() == {"train": [3, 0], "val": [0, 0], "test": [1, 0]}
    found = {image.numpy().tobytes() for split in silo.splits().values() for image in split.inputs}
    made = [(mammogram(number).astype(int) - 32768).astype(np.int16) for number in range(4)]
    assert found == {image.tobytes() for image in made}


def test_monochrome1_and_2_of_one_picture_are_equal(places: Places) -> None:
    assert places.data is not None
    write_dicom(places.data / "IM3", 65535 - mammogram(2), "MONOCHROME1")
    found = MAMMOGRAPHY.decode(MAMMOGRAPHY.index("south", OWN, places), 16, OWN)
    assert (found.images[3] == found.images[2]).all()
    assert (found.images.shape, found.images.dtype) == ((4, 1, 16, 16), np.int16)


def test_the_declared_size_share_and_bits_have_defaults(places: Places) -> None:
    assert silo_names(dataclasses.replace(OWN, data_dir=str(places.data))) == ["north", "south"]
    assert places.data is not None
    path = places.data / MAMMOGRAPHY.file
    rewrite(places, MAMMOGRAPHY.file, lambda text: text.replace("image-size: 16\n", ""))
    found = read_declared(path, MAMMOGRAPHY.model)
    assert (found.image_size, found.test_share, found.bits) == (2048, 0.2, 16)
    rewrite(
        places, MAMMOGRAPHY.file, lambda text: text + "image-size: 4096\ntest-share: 0\nbits: 12\n"
    )
    found = read_declared(path, MAMMOGRAPHY.model)
    assert (found.image_size, found.test_share, found.bits) == (4096, 0, 12)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("bits: 7\n", "'bits' must be a whole number from 8 to 16"),
        ("bits: 17\n", "'bits' must be a whole number from 8 to 16"),
        ("bits: high\n", "'bits' must be a whole number from 8 to 16"),
        ("bit: 8\n", "unknown key 'bit'; did you mean 'bits'"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(places: Places, added: str, said: str) -> None:
    rewrite(places, "mammography.yaml", lambda text: text + added)
    assert said in refused(places)


def test_a_size_beyond_4096_is_refused(places: Places) -> None:
    rewrite(places, "mammography.yaml", lambda text: text.replace(": 16", ": 4097"))
    assert "'image-size' must be a whole number from 16 to 4096" in refused(places)


def test_bits_mean_nothing_to_images_of_8(places: Places) -> None:
    assert places.data is not None
    (places.data / "images.yaml").write_text(DECLARATION + "bits: 8\n")
    with refuses(DataError, "bits"):
        IMAGES.declaration(places)


def test_declaring_other_bits_makes_another_silo(places: Places) -> None:
    before = load(places)
    rewrite(places, "mammography.yaml", lambda text: text + "bits: 16\n")
    assert load(places).fingerprints == before.fingerprints
    rewrite(places, "mammography.yaml", lambda text: text.replace("bits: 16", "bits: 12"))
    with refuses(DataError, 4095, 12):
        load(places)


def test_images_that_cannot_be_used_are_told_by_line_and_never_by_name(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    assert places.data is not None
    scans = places.data / "north" / "scans"
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(scans / "0.png")
    Image.fromarray(np.full((4, 4), 9, np.uint8)).save(scans / "1.png")
    (scans / "2.png").unlink()
    Image.new("RGB", (4, 4)).save(scans / "3.png")
    (scans / "4.png").write_bytes(bytes(128) + b"DICM")
    with caplog.at_level(logging.WARNING):
        told = refused(places)
    reasons = [
        "5 of 20 images cannot be used",
        "the image of line 2 is empty: all its pixels are equal",
        "the image of line 3 has 8 bits a pixel, but 16 are declared",
        "the image of line 4 is missing",
        "the image of line 5 is not grey of 8 or 16 bits",
        "the image of line 6 is a DICOM without pixel data",
        "set 'data.broken-images' to 'skip'",
    ]
    assert all(reason in told for reason in reasons)
    assert ".png" not in told
    assert "the image of line 4 is north/scans/2.png" in caplog.text, "the site's own log"
    silo = load(places, broken_images="skip")
    assert silo.dropped == 5
    assert sum(sum(counts) for counts in silo.label_counts().values()) == 15


def test_a_pipe_among_the_images_is_told_by_its_line_and_not_waited_for(places: Places) -> None:
    assert places.data is not None
    pipe = places.data / "north" / "scans" / "0.png"
    pipe.unlink()
    os.mkfifo(pipe)
    assert "1 of 20 images cannot be used: the image of line 2 is not a file: fix" in refused(
        places
    )


def test_a_given_split_is_kept_and_a_patient_in_two_parts_is_refused(places: Places) -> None:
    def given(parts: list[str]) -> Callable[[str], str]:
        lines = [f"scans/{n}.png,N,P{n // 2},{part}\n" for n, part in enumerate(parts)]
        return lambda _: "path,label,patient,split\n" + "".join(lines)

    rewrite(places, "north/list.csv", given(["train"] * 4 + ["val", "val", "test", "test"]))
    assert numbers(load(places)) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    rewrite(places, "north/list.csv", given(["train"] * 3 + ["test"] * 3))
    with pytest.raises(DataError) as caught:
        load(places)
    assert "a patient is in two parts, in lines 4 (train) and 5 (test)" in str(caught.value)
    assert "P1" not in str(caught.value)


def test_other_faults_of_a_manifest_are_those_of_images_and_name_this_declaration(
    places: Places,
) -> None:
    rewrite(places, "south.csv", lambda text: text.replace("IM0,N", "IM0,Meier"))
    told = refused(places, "south")
    assert "line 2, column 'label': this label is not one of 'B', 'N', 'M'" in told
    assert "under 'classes' in mammography.yaml" in told
    assert "Meier" not in told
    rewrite(places, "mammography.yaml", lambda text: text.replace("[M]", f"[M, {'n' * 290}]"))
    told = refused(places, "south")
    assert "this label is not one of 'B', 'N', 'M', 'nnn" in told
    assert told.count("n") < 200
    with refuses(DataError, "mammography", "mammography.yaml"):
        load(dataclasses.replace(places, data=None))


def test_settings_of_colour_and_of_made_up_vendors_mean_nothing(places: Places) -> None:
    for change in ({"colour_constancy": True}, {"intensity_profiles": False}):
        with refuses(SettingError, "mammography"):
            check_data_settings(dataclasses.replace(OWN, **change))


def test_the_documentations_example_and_keys_are_those_that_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "mammograms.md").read_text()
    path = tmp_path / "mammography.yaml"
    path.write_text(text.split("```yaml\n")[1].split("```")[0])
    found = read_declared(path, MAMMOGRAPHY.model)
    assert (found.image_size, found.test_share, found.bits) == (2048, 0.2, 16)
    assert list(found.classes) == ["not-malignant", "malignant"]
    assert all(
        f"`{key}`" in text for key in ("sites", "classes", "data.image-size", "test-share", "bits")
    )
