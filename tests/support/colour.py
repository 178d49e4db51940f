"""Tiny data sets in colour, in the layouts of the public ones; colours tell an image's place."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError

Planes = npt.NDArray[np.uint8]
Read = TypeVar("Read")


def read_or_refused(read: Callable[[], Read]) -> Read | None:
    """Return what is read, None if it is refused by a ``DataError``, which is to be a line."""
    try:
        return read()
    except DataError as error:
        if "\n" in str(error):
            raise AssertionError(f"a refusal of several lines: {error}") from None
        return None


def flat_planes(first: int, count: int) -> Planes:
    """Return rows of three flat planes (count, 3072): image i is i red, i+1 green, i+2 blue."""
    colours = np.arange(first, first + count)[:, None] + np.arange(3)
    return np.repeat(colours.astype(np.uint8), 1024, axis=1)


def write_binary(path: Path, planes: Planes, labels: Sequence[Sequence[int]]) -> Path:
    """Write a binary batch; ``labels`` are the bytes before each image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [bytes(own) + row.tobytes() for own, row in zip(labels, planes, strict=True)]
    path.write_bytes(b"".join(records))
    return path


def write_cifar10(data: Path) -> Path:
    """Write two training batches of 60 and 40 images, and 20 test images; label i modulo 10."""
    folder = data / "cifar-10-batches-bin"
    for name, first, count in (
        ("data_batch_1", 0, 60),
        ("data_batch_2", 60, 40),
        ("test_batch", 200, 20),
    ):
        labels = [[i % 10] for i in range(first, first + count)]
        write_binary(folder / f"{name}.bin", flat_planes(first, count), labels)
    return folder


def write_cifar100(data: Path) -> Path:
    """Write 60 training and 20 test images; fine label i, its coarse one before it."""
    folder = data / "cifar-100-binary"
    for name, count in (("train", 60), ("test", 20)):
        labels = [[i // 5, i] for i in range(count)]
        write_binary(folder / f"{name}.bin", flat_planes(0, count), labels)
    return folder


def _text(content: bytes) -> bytes:
    """Return the opcode of one of Python 2's texts."""
    short = len(content) < 256
    return (b"U" + bytes([len(content)]) if short else b"T" + struct.pack("<I", len(content))) + (
        content
    )


def _array(pixels: Planes) -> bytes:
    """Return the opcodes of an array as numpy wrote it under Python 2."""
    shape = b"".join(b"J" + struct.pack("<i", length) for length in pixels.shape)
    dtype = b"cnumpy\ndtype\nq\x07" + _text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + _text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85"
    made += _text(b"b") + b"\x87R"
    return made + b"(K\x01" + shape + b"\x86" + dtype + b"\x89" + _text(pixels.tobytes()) + b"tb"


def python2_batch(planes: Planes, labels: Sequence[int], key: bytes = b"labels") -> bytes:
    """Return a python batch as CIFAR's were written: a pickle of Python 2, protocol 2."""
    items = {
        b"batch_label": _text(b"training batch 1 of 5"),
        key: b"]q\x02(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
        b"data": _array(planes),
        b"filenames": b"]q\x03(" + b"".join(_text(b"leptodactylus.png") for _ in labels) + b"e",
    }
    pairs = b"".join(_text(name) + value for name, value in items.items())
    return b"\x80\x02}q\x01(" + pairs + b"u."


def ppm(pixels: Planes) -> bytes:
    """Return an image (height, width, 3) as a PPM file, or (height, width) as a grey PGM."""
    kind = b"P6" if pixels.ndim == 3 else b"P5"
    height, width = pixels.shape[:2]
    return kind + f"\n{width} {height}\n255\n".encode() + pixels.tobytes()


def write_signs(folder: Path, csv: Path, names: Sequence[str], label: Sequence[int]) -> None:
    """Write images of 20 x 24 pixels, all of them as red as their class, and their CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    csv.parent.mkdir(parents=True, exist_ok=True)
    lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for name, own in zip(names, label, strict=True):
        pixels = np.zeros((20, 24, 3), np.uint8)
        pixels[..., 0] = own
        (folder / name).write_bytes(ppm(pixels))
        lines.append(f"{name};24;20;5;5;15;15;{own}")
    csv.write_bytes("\r\n".join([*lines, ""]).encode())


def write_gtsrb(data: Path, classes: int = 3, tracks: int = 5, frames: int = 4) -> Path:
    """Write training tracks of each class, and four test images of each."""
    root = data / "GTSRB"
    for own in range(classes):
        names = [f"{t:05d}_{f:05d}.ppm" for t in range(tracks) for f in range(frames)]
        folder = root / "Final_Training" / "Images" / f"{own:05d}"
        write_signs(folder, folder / f"GT-{own:05d}.csv", names, [own] * len(names))
    names = [f"{i:05d}.ppm" for i in range(4 * classes)]
    labels = [i % classes for i in range(4 * classes)]
    csv = root / "Final_Test" / "GT-final_test.csv"
    write_signs(root / "Final_Test" / "Images", csv, names, labels)
    return root
