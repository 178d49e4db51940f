"""Mutations of a data folder's files, by its kind: texts, pictures, DICOM, IDX, npz, caches."""

import gzip
import io
import json
import struct
import zipfile
import zlib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml
from PIL import Image

from tests.fuzz.mutations import hostile_text, mutate_bytes, mutate_text, mutate_tree
from tests.fuzz.reply_mutations import npy

_TEXTS = {".csv", ".yaml", ".json", ".toml", ".txt", ".data", ""}
_TREES = {".yaml", ".json"}
_PICTURES = {".png", ".jpg", ".bmp", ".webp", ".tif", ".ppm"}
_MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F")
_SYNTAXES = ("", ".5", ".4.50", ".1.99", ".4.90", ".2", ".4.70", ".4.80")
_ELEMENTS: dict[str, tuple[Any, ...]] = {
    "Rows": (0, 1, 65535, 2**16 - 1),
    "Columns": (0, 1, 65535),
    "BitsAllocated": (0, 1, 8, 32, 64, 65535),
    "BitsStored": (0, 1, 17, 64, 65535),
    "HighBit": (0, 65535),
    "SamplesPerPixel": (0, 3, 65535),
    "PixelRepresentation": (1, 65535),
    "NumberOfFrames": ("0", "2", "99999999", "-1"),
    "PhotometricInterpretation": ("MONOCHROME1", "RGB", "PALETTE COLOR", "", "x" * 900),
    "WindowCenter": ("nan", "1e308", "-1e308", "0", ["1", "2"]),
    "WindowWidth": ("0", "-1", "1e308", "1e-300", "inf"),
    "RescaleSlope": ("0", "-1", "1e308", "nan", "1e-300"),
    "RescaleIntercept": ("1e308", "nan", "-1e308"),
    "PixelPaddingValue": (0, 65535),
    "VOILUTFunction": ("SIGMOID", "LINEAR_EXACT", "x"),
    "PixelData": (b"", b"\0", b"\0" * 99_999),
}


def mutate_file(rng: Random, path: Path, done: list[str]) -> None:
    """Change one file in a way of its kind or as bytes; sometimes it is no such file any more."""
    done.append(path.name)
    chance = rng.random()
    if chance < 0.06:
        _replaced_by(rng, path, done)
    elif chance < 0.3 and path.suffix not in _TEXTS:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), done))
    elif path.suffix in _TEXTS:
        _text(rng, path, done)
    elif path.suffix in _PICTURES:
        _picture(rng, path, done)
    elif path.suffix == ".dcm":
        _dicom(rng, path, done)
    elif path.suffix == ".gz":
        inner = gzip.decompress(path.read_bytes())
        more = _zeros_in_gzip() if rng.random() < 0.1 else b""  # a second member is read on
        path.write_bytes(gzip.compress(_idx(rng, inner, done), 1) + more)
    elif path.suffix == ".npz":
        _npz(rng, path, done)
    elif path.suffix == ".npy":
        path.write_bytes(_npy(rng, path.read_bytes(), done))
    else:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), done))


def _replaced_by(rng: Random, path: Path, done: list[str]) -> None:
    way = rng.choice(["nothing", "folder", "empty", "link to itself", "unreadable name", "device"])
    done.append(way)
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "empty":
        path.touch()
    elif way == "link to itself":
        path.symlink_to(path.name)
    elif way == "device":
        path.symlink_to("/dev/null")
    elif way == "unreadable name":
        (path.parent / "\udce9\x1b[31m.png").touch()


def _text(rng: Random, path: Path, done: list[str]) -> None:
    text = path.read_text()
    if path.suffix in _TREES and rng.random() < 0.5:
        tree = mutate_tree(rng, yaml.safe_load(text), done)
        try:
            changed = json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree)
        except (yaml.YAMLError, RecursionError):
            changed = json.dumps(str(tree)[:5000])
    else:
        changed = mutate_text(rng, text, done)
    path.write_bytes(changed.encode("utf-8", "surrogatepass"))


def _picture(rng: Random, path: Path, done: list[str]) -> None:
    way = rng.choice(["png header", "mode", "size", "pages", "bomb", "exif", "chunk"])
    done.append(way)
    if way in ("png header", "bomb"):
        side = rng.choice([0, 1, 3000, 9460, 50_000, 2**31 - 1])
        depth, kind = rng.choice([(8, 0), (16, 0), (1, 0), (8, 2), (8, 3), (16, 6), (3, 0)])
        rows = _zeros() if way == "bomb" else zlib.compress(bytes(100))
        path.write_bytes(_png(side, rng.choice([side, 1]), depth, kind, rows))
    elif way == "chunk":
        content = path.read_bytes()
        if content.startswith(b"\x89PNG"):
            extra = _chunk(rng.choice([b"zTXt", b"iCCP"]), b"key\0\0" + _zeros())
            path.write_bytes(content[:33] + extra + content[33:])
    else:
        _saved_anew(rng, path, way)


def _saved_anew(rng: Random, path: Path, way: str) -> None:
    with Image.open(path) as image:
        image.load()
    options: dict[str, Any] = {}
    form = rng.choice([image.format, "PNG", "TIFF", "JPEG", "GIF", "WEBP"])
    if way == "mode":
        image = image.convert("L").convert(rng.choice(_MODES))
    elif way == "size":
        image = image.resize(rng.choice([(1, 1), (1, 4000), (3000, 2), (2000, 2000)]))
    elif way == "pages":
        options = {"save_all": True, "append_images": [image] * rng.choice([1, 500])}
    elif way == "exif":
        exif = Image.Exif()
        exif[0x0112], exif[0x010E] = rng.choice([3, 6, 99, 0]), hostile_text(rng)[:100]
        options = {"exif": exif}
    try:
        image.save(path, form, **options)
    except Exception:
        path.write_bytes(b"\x89PNG\r\n\x1a\n")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), _chunk(b"IDAT", rows), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@cache
def _zeros() -> bytes:
    """Return what unpacks to 300 MB."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(10**7)) for _ in range(30)) + packer.flush()


@cache
def _zeros_in_gzip() -> bytes:
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packer:
        for _ in range(50):
            packer.write(bytes(10**7))
    return file.getvalue()


def _dicom(rng: Random, path: Path, done: list[str]) -> None:
    import pydicom

    dataset = pydicom.dcmread(path)
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(sorted(_ELEMENTS))
        value = rng.choice([*_ELEMENTS[name], None])
        done.append(f"{name} = {str(value)[:30]!r}")
        try:
            if value is None:
                delattr(dataset, name)
            else:
                setattr(dataset, name, value)
        except Exception:
            done[-1] += " cannot be set"
    if rng.random() < 0.2:
        dataset.file_meta.TransferSyntaxUID = rng.choice(
            ["1.2.3", "", *(f"1.2.840.10008.1.2{n}" for n in _SYNTAXES)]
        )
    try:
        dataset.save_as(path, implicit_vr=False, little_endian=True)
    except Exception:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), done))


def _idx(rng: Random, content: bytes, done: list[str]) -> bytes:
    way = rng.choice(["lengths", "bytes", "dimensions"])
    done.append(f"idx {way}")
    if way == "lengths":
        place = 4 + 4 * rng.randrange(max(content[3], 1))
        value = rng.choice([0, 1, 2**31, 2**32 - 1, 10**8])
        return content[:place] + struct.pack(">I", value) + content[place + 4 :]
    if way == "dimensions":
        return content[:3] + bytes([rng.choice([0, 1, 2, 4, 255])]) + content[4:]
    return mutate_bytes(rng, content, done)


def _npz(rng: Random, path: Path, done: list[str]) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(files))
    done.append(name)
    way = rng.choice(["npy", "npy", "drop", "rename", "text", "bomb"])
    bomb = name if way == "bomb" else ""
    if way == "npy":
        files[name] = _npy(rng, files[name], done)
    elif way == "text":
        files[name] = b"no array"
    elif way in ("drop", "rename"):
        content = files.pop(name)
        if way == "rename":
            files[rng.choice(["../x.npy", "/x.npy", "x"])] = content
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for key, content in files.items():
            with archive.open(key, "w") as member:
                member.write(npy("|u1", "(500000, 28, 28)", b"") if key == bomb else content)
                for _ in range(40 if key == bomb else 0):
                    member.write(bytes(9_800_000))
    path.write_bytes(file.getvalue())


def _npy(rng: Random, content: bytes, done: list[str]) -> bytes:
    array = np.load(io.BytesIO(content))
    way = rng.choice(["dtype", "shape", "bytes", "values", "pickle"])
    done.append(f"npy {way}")
    data = array.tobytes()
    if way == "dtype":
        return npy(
            rng.choice(["<f8", "|O", "<U9", "<M8[s]", "<i2", ">u8"]), repr(array.shape), data
        )
    if way == "shape":
        shape = rng.choice(["(2000000000000,)", "(20, 28, 28, 1)", "(-1,)", "()", "(0,)", "(20,)"])
        return npy(array.dtype.str, shape, data)
    if way == "values":
        file = io.BytesIO()
        np.save(file, np.full_like(array, rng.choice([0, 1, 2, 100])))
        return file.getvalue()
    if way == "pickle":
        return npy("|O", "(1,)", b"\x80\x04N.")
    return mutate_bytes(rng, content, done)
