"""A new image's file becomes what the site's own files became."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import find_places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.registry import DATA_SETS, data_set, image_reader, load_silo, silo_names
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from tests.support.data_folders import save_picture, write_images
from tests.support.errors import refuses
from tests.support.made_data import MADE

SMALL = ("images", "mammography", "endovascular", "folder", "masks")
OWN = {"images": 8, "mammography": 16, "endovascular": 8}
IMAGES = [name for name in DATA_SETS if name != "arrays" and not data_set(name).is_table]


def settings_for(name: str, data: Path, **changes: Any) -> CommonSettings:
    return CommonSettings(dataset=name, data_dir=str(data), **changes)


@pytest.mark.parametrize("name", OWN)
def test_files_of_a_hospitals_own_are_read_as_its_silo_was(name: str, tmp_path: Path) -> None:
    write_images(tmp_path, f"{name}.yaml", OWN[name])
    settings = settings_for(name, tmp_path)
    silo, read = load_silo("north", settings), image_reader("north", settings)
    held = np.concatenate([split.inputs.numpy() for split in silo.splits().values()])
    new = np.stack([read(path) for path in sorted((tmp_path / "north").glob("*.png"))])
    assert new.dtype == held.dtype
    assert sorted(map(bytes, new)) == sorted(map(bytes, held))


@pytest.mark.parametrize(("name", "site"), [("isic2019", "rosendahl"), ("mini-mias", "dense")])
def test_real_files_are_read_as_the_silo_was(name: str, site: str, real_data: Path) -> None:
    settings = settings_for(name, real_data, image_size=32)
    places = find_places(str(real_data), "")
    data = data_set(name)
    assert isinstance(data, ImageDataSet)
    index = data.index(site, settings, places).take(np.arange(3))
    read = image_reader(site, settings)
    new = np.stack([read(index.folder / file) for file in index.names])
    assert np.array_equal(new, data.decode(index, 32, settings).images)


@pytest.mark.parametrize("name", IMAGES)
def test_every_data_set_of_images_reads_a_file_into_its_own_shape(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    data, site = _data_and_site(name, tmp_path, request)
    settings = settings_for(name, data, sample_share=_share(name), silos=2, **_sizes(name))
    settings = replace(settings, task=data_set(name).tasks[0])
    path = tmp_path / "new.png"
    deep = name in ("mammography", "mammography-phantom")
    save_picture(path, np.random.default_rng(0), bits=16 if deep else 8)
    image, own = image_reader(site, settings)(path), load_silo(site, settings)
    assert image.shape == own.shape.input_shape
    assert image.dtype == own.train.inputs.numpy().dtype
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(BrokenImageError):
        image_reader(site, settings)(tmp_path / "text.png")


def _data_and_site(name: str, folder: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    if name in ("cifar10", "cifar100", "gtsrb", "folder", "masks", *MEDMNIST):
        MADE[name](folder)
        return folder, silo_names(settings_for(name, folder))[0]
    if name in OWN:
        return write_images(folder, f"{name}.yaml", OWN[name]), "north"
    data = data_set(name)
    needs = data.files is not None or name in ("isic2019", "mini-mias")
    real: Path = request.getfixturevalue("real_data") if needs else folder
    return real, silo_names(settings_for(name, real))[0]


def _share(name: str) -> float:
    own = "split.sample-share" in data_set(name).settings
    return (
        {"isic2019": 0.03, "mini-mias": 0.1}.get(name, 0.01) if own and name not in SMALL else 1.0
    )


def _sizes(name: str) -> dict[str, int]:
    return (
        {"silo_train_size": 10, "silo_test_size": 1}
        if "split.silos" in data_set(name).settings
        else {}
    )


def test_a_site_of_shifted_images_shifts_new_ones_too(tmp_path: Path) -> None:
    """The same upright bar is upright at s1a and turned at s2a, which turns all its images."""
    bar = np.zeros((16, 16), np.uint8)
    bar[2:14, 7:9] = 255
    Image.fromarray(bar).save(tmp_path / "bar.png")
    settings = CommonSettings(dataset="digits", pixel_scale="raw", silos=3)
    plain, turned = (image_reader(s, settings)(tmp_path / "bar.png") for s in ("s1a", "s2a"))
    assert np.array_equal(plain[0], bar)
    assert not np.array_equal(turned[0], bar)
    assert turned[0, 7:9, 7:9].min() > 200


def test_a_radiograph_of_mini_mias_may_be_a_dicom(tmp_path: Path) -> None:
    """The same pixels as PNG and as DICOM are the same image, vendor's profile and noise too."""
    pixels = np.random.default_rng(1).integers(0, 256, (40, 36)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "mdb001.png")
    write_dicom(tmp_path / "mdb001.dcm", pixels)
    read = image_reader("dense", CommonSettings(dataset="mini-mias", image_size=32))
    assert np.array_equal(read(tmp_path / "mdb001.png"), read(tmp_path / "mdb001.dcm"))


def write_dicom(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    """Write a grey DICOM of 8 bits."""
    dataset = FileDataset("", {}, file_meta=FileMetaDataset(), preamble=b"\0" * 128)
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["fedsilo"])
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.PixelRepresentation = 0
    dataset.PixelData = pixels.tobytes()
    dataset.save_as(path, enforce_file_format=True)


def test_a_table_reads_no_images() -> None:
    with refuses(DataError, "heart"):
        image_reader("va", CommonSettings(dataset="heart"))
