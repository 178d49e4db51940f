"""Made-up data of every data set that reads files, a few samples each, laid out as the real ones.

``MADE`` has their writers; ``write_data`` takes any data set of the registry.
"""

import gzip
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from tests.support.colour import write_cifar10, write_cifar100, write_gtsrb
from tests.support.data_folders import (
    SITES,
    save_picture,
    write_arrays,
    write_images,
    write_sorted,
    write_tables,
)

_ISIC = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"
_FORMATS = ("png", "jpg", "bmp", "webp", "tif")
# What makes a silo of a data set small; of others nothing is needed
SMALL: dict[str, dict[str, Value]] = {
    "pneumoniamnist": {"data.intensity-profiles": False},
    "mini-mias": {"data.image-size": 16},
    "isic2019": {"data.image-size": 16},
    **{
        name: {"split.silos": 2, "split.silo-train-size": 10, "split.silo-test-size": 1}
        for name in ("mnist", "fmnist", "cifar10", "cifar100", "gtsrb", *MEDMNIST)
    },
}


def write_data(name: str, folder: Path) -> None:
    """Write the files of a data set; of one without a writer those that it names, with no sense."""
    if name in MADE:
        MADE[name](folder)
    elif files := data_set(name).files:
        for file in files.files:
            path = folder / files.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1,2,3\n" * 20)


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> Path:
    """Write bytes as a gzipped IDX file."""
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + array.tobytes(), mtime=0))
    return path


def _write_mnist(folder: Path) -> None:
    for part, first, count in (("train", 0, 60), ("t10k", 60, 20)):
        values = np.arange(first, first + count, dtype=np.uint8)
        images = np.repeat(values, 16 * 16).reshape(count, 16, 16)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", values % 10)


def _write_pneumonia(data: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for part in ("train", "val", "test"):
        numbers = np.arange(20)
        images = np.zeros((20, 28, 28), np.uint8)
        images[:, 0, 0], images[:, 27, 27] = numbers + 1, 255
        arrays |= {f"{part}_images": images, f"{part}_labels": (numbers % 2)[:, None]}
    (data / "pneumoniamnist").mkdir(parents=True)
    np.savez(data / "pneumoniamnist" / "pneumoniamnist.npz", **arrays)  # type: ignore[arg-type]


def write_medmnist(data: Path, name: str, count: int = 60) -> None:
    """Write a file of MedMNIST's form: image i of a part has the level i and the label i mod K."""
    source = MEDMNIST[name]
    form = (28, 28, 3) if len(source.mean) == 3 else (28, 28)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for part in ("train", "val", "test"):
        levels = np.arange(count, dtype=np.uint8)
        images = np.broadcast_to(levels.reshape(-1, *(1 for _ in form)), (count, *form))
        arrays |= {f"{part}_images": images, f"{part}_labels": (levels % source.classes)[:, None]}
    (data / "medmnist").mkdir(parents=True, exist_ok=True)
    np.savez(data / "medmnist" / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def _write_isic(data: Path) -> None:
    folder = data / "isic2019"
    (folder / "images").mkdir(parents=True)
    rows = [f"I{i},0,0,0,0,0,0,0,0,0,{i % 8},{i % 2},train,train_0" for i in range(24)]
    (folder / "train_test_split").write_text("\n".join([_ISIC, *rows]) + "\n")
    lesions = "".join(f"L{i // 2},I{i}\n" for i in range(24))
    (folder / "HAM10000_metadata").write_text("lesion_id,image_id\n" + lesions)
    for i in range(24):
        Image.new("RGB", (32, 32), (i, i, i)).save(folder / "images" / f"I{i}.jpg", quality=100)


def _write_mini_mias(data: Path) -> None:
    folder = data / "mini_mias"
    (folder / "images").mkdir(parents=True)
    lines = ["image,patient,tissue,finding,severity"]
    levels = np.linspace(0, 255, 16 * 16).reshape(16, 16)
    for number in range(24):
        picture = np.roll(levels, number % 8, axis=1).astype(np.uint8)
        Image.fromarray(picture).save(folder / "images" / f"mdb{number:03}.png")
        severity = "M" if number % 2 == 0 else "NB"[number % 4 // 2]
        tissue = "FGD"[number // 8]
        lines.append(f"mdb{number:03}.png,p{number // 2},{tissue},CIRC,{severity}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


def _write_pictures(folder: Path) -> None:
    """Write ``images.yaml`` with a picture of each format."""
    write_images(folder, "images.yaml")
    for site in SITES:
        for number, ending in enumerate(_FORMATS):
            path = folder / site / f"{number}.png"
            with Image.open(path) as image:
                image.convert("RGB").save(path.with_suffix(f".{ending}"))
            listing = folder / site / "list.csv"
            listing.write_text(
                listing.read_text().replace(f"\n{number}.png", f"\n{number}.{ending}")
            )


def _write_mammograms(folder: Path) -> None:
    """Write ``mammography.yaml``, half of its files as DICOM."""
    write_images(folder, "mammography.yaml", bits=16)
    for site in SITES:
        listing = folder / site / "list.csv"
        text = listing.read_text()
        for number in range(0, 16, 2):
            path = folder / site / f"{number}.png"
            with Image.open(path) as image:
                write_dicom(path.with_suffix(".dcm"), np.asarray(image).astype(np.uint16))
            path.unlink()
            text = text.replace(f"\n{number}.png", f"\n{number}.dcm")
        listing.write_text(text)


def _write_angiograms(folder: Path) -> None:
    """Write ``endovascular.yaml``; each image has a mask."""
    write_images(folder, "endovascular.yaml")
    for site in SITES:
        lines = ["path,label,mask"]
        for number in range(16):
            mask = np.zeros((36, 40), np.uint8)
            mask[number] = 255
            Image.fromarray(mask).save(folder / site / f"mask-{number}.png")
            lines.append(f"{number}.png,{'ab'[number % 2]},mask-{number}.png")
        (folder / site / "list.csv").write_text("\n".join(lines) + "\n")


def _write_masks(folder: Path) -> None:
    """Write two hospitals' folders of images and of masks, as ``masks`` reads them."""
    for offset, site in enumerate(SITES):
        rng = np.random.default_rng(offset)
        for number in range(16):
            mask = np.zeros((36, 40), np.uint8)
            mask[number : number + 9] = 255
            for kind in ("images", "masks"):
                (folder / site / kind).mkdir(parents=True, exist_ok=True)
            save_picture(folder / site / "images" / f"{number}.png", rng)
            Image.fromarray(mask).save(folder / site / "masks" / f"{number}.png")


def write_dicom(path: Path, pixels: npt.NDArray[Any]) -> Path:
    """Write a grey DICOM of as many bits as ``pixels`` have."""
    dataset = FileDataset("", {}, file_meta=FileMetaDataset(), preamble=b"\0" * 128)
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["fedsilo"])
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8 * pixels.itemsize
    dataset.HighBit, dataset.PixelRepresentation = dataset.BitsStored - 1, 0
    dataset.WindowCenter, dataset.WindowWidth = "32768", "65536"
    dataset.RescaleSlope, dataset.RescaleIntercept = "1", "0"
    dataset.PixelData = pixels.tobytes()
    dataset.save_as(path, enforce_file_format=True)
    return path


MADE: dict[str, Callable[[Path], object]] = {
    "mnist": lambda data: _write_mnist(data / "mnist"),
    "fmnist": lambda data: _write_mnist(data / "fashion_mnist"),
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "gtsrb": write_gtsrb,
    "table": write_tables,
    "isic2019": _write_isic,
    "folder": write_sorted,
    "arrays": write_arrays,
    **{name: partial(write_medmnist, name=name) for name in MEDMNIST},
    "images": _write_pictures,
    "mammography": _write_mammograms,
    "mini-mias": _write_mini_mias,
    "pneumoniamnist": _write_pneumonia,
    "endovascular": _write_angiograms,
    "masks": _write_masks,
}
