"""Small files that unpack to gigabytes: each is refused in one line, before it takes the memory.

Each file is read by the reader of its form in a process of its own, whose memory is measured. The
limit is lowered there, so that the files of this test are made in a moment; that the usual limit
stands is looked at by the sizes alone. These processes are forks of one that has imported every
reader, because the imports take longer than the reading.
"""

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.unpacked_size import TIMES, USUAL, VARIABLE, check_unpacked, most_unpacked

LIMIT = 8 * 2**20  # bytes, in the processes
UNPACKED = 64 * 2**20  # bytes that each file would take, at least
MOST_TAKEN = 48 * 2**20  # bytes of memory that reading it may take beyond its libraries
ZEROS = bytes(2**20)


def npy(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.encode() + b"\n"


def zip_of(path: Path, name: str, start: bytes = b"", method: int = zipfile.ZIP_DEFLATED) -> None:
    with (
        zipfile.ZipFile(path, "w", method, compresslevel=1) as archive,
        archive.open(name, "w", force_zip64=True) as file,
    ):
        file.write(start)
        for _ in range(UNPACKED // len(ZEROS)):
            file.write(ZEROS)


def arrays_that_are_large(path: Path) -> None:
    zip_of(path, "x.npy", npy((UNPACKED // 100, 1, 10, 10)))


def arrays_whose_header_lies(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy((UNPACKED, 2, 10, 10)) + bytes(100))


def arrays_of_long_texts(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy((2,), "<U100000000") + bytes(100))


def archive_of_zeros(path: Path) -> None:
    zip_of(path, "f")


def archive_packed_by_bzip2(path: Path) -> None:
    zip_of(path, "f", method=zipfile.ZIP_BZIP2)


def archive_of_many(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(UNPACKED // len(ZEROS)):
            archive.writestr(f"f{number}", ZEROS)


def archive_whose_sizes_lie(path: Path) -> None:
    """Write an archive that says of its file that it is of 4 bytes."""
    zip_of(path, "f")
    data = path.read_bytes()
    large = struct.pack("<Q", UNPACKED)
    assert large in data
    path.write_bytes(data.replace(large, struct.pack("<Q", 4)))


def tar_of_zeros(path: Path) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        entry = tarfile.TarInfo("f")
        entry.size = UNPACKED
        archive.addfile(entry, io.BytesIO(bytes(UNPACKED)))


def tar_of_one_header(path: Path, kind: bytes) -> None:
    """Write a tar with a header of that size, which tarfile would take into memory."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, UNPACKED
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        for _ in range(UNPACKED // len(ZEROS)):
            file.write(ZEROS)
        file.write(tarfile.TarInfo("f").tobuf() + bytes(1024))


def tar_of_a_long_pax_header(path: Path) -> None:
    tar_of_one_header(path, tarfile.XHDTYPE)


def tar_of_a_long_name(path: Path) -> None:
    tar_of_one_header(path, tarfile.GNUTYPE_LONGNAME)


def tar_of_many_empty_files(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        block = b"".join(tarfile.TarInfo(f"{number:06}").tobuf() for number in range(1000))
        for _ in range(UNPACKED // len(block) // 3):
            file.write(block)
        file.write(bytes(1024))


def parquet_of_rows(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.table({"age": pa.array([1.0] * 10**6)})
    with pq.ParquetWriter(path, rows.schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(rows)


def parquet_of_one_long_text(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * (UNPACKED // 20_000), pa.int32()), ["a" * 20_000]
    )
    pq.write_table(pa.table({"name": texts}), path, compression="zstd")
    plain = pq.read_table(path).cast(pa.schema([("name", pa.string())]))
    pq.write_table(plain, path, compression="zstd")


def parquet_of_lists(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = UNPACKED // 8
    values = pa.ListArray.from_arrays([0, count], pa.array(np.zeros(count)))
    pq.write_table(pa.table({"age": values}), path, compression="zstd")


def parquet_of(path: Path, values: list[object], kind: object) -> None:
    """Write a column of equal values, of which Parquet stores one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"age": pa.array(values, kind)}), path, compression="zstd")


def parquet_of_one_long_value(path: Path) -> None:
    import pyarrow as pa

    parquet_of(path, [b"a" * 20_000] * (UNPACKED // 20_000), pa.binary())


def parquet_of_one_long_value_of_fixed_length(path: Path) -> None:
    import pyarrow as pa

    parquet_of(path, [b"a" * 20_000] * (UNPACKED // 20_000), pa.binary(20_000))


def parquet_of_lists_of_one_long_text(path: Path) -> None:
    import pyarrow as pa

    parquet_of(path, [["a" * 20_000]] * (UNPACKED // 20_000), pa.list_(pa.string()))


SHEET = b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'


def workbook(path: Path, start: bytes, row: bytes, rows: int) -> None:
    """Write a workbook whose sheet has a row that often."""
    import openpyxl

    book = openpyxl.Workbook()
    book.save(path)
    whole = {}
    with zipfile.ZipFile(path) as before:
        whole = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
        for name, content in whole.items():
            if name != "xl/worksheets/sheet1.xml":
                after.writestr(name, content)
        with after.open("xl/worksheets/sheet1.xml", "w", force_zip64=True) as sheet:
            sheet.write(start + SHEET)
            for _ in range(rows // 1000):
                sheet.write(row * 1000)
            sheet.write(b"</sheetData></worksheet>")


def workbook_of_texts(path: Path) -> None:
    cell = b'<row><c t="inlineStr"><is><t>' + b"a" * 1000 + b"</t></is></c></row>"
    workbook(path, b"", cell, UNPACKED // 1000)


def workbook_of_two_cells_far_apart(path: Path) -> None:
    near = b'<row r="1"><c r="A1"><v>1</v></c></row>'
    far = b'<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>'
    workbook(path, b"", near + far, 1000)


def workbook_in_utf16(path: Path) -> None:
    far = '<row r="1"><c r="A1"/></row><row r="1048576"><c r="&#88;FD1048576"><v>1</v></c></row>'
    workbook(path, b"", b"", 0)
    with zipfile.ZipFile(path) as before:
        whole = {name: before.read(name) for name in before.namelist()}
    text = f'<?xml version="1.0" encoding="UTF-16"?>{SHEET.decode()}{far}</sheetData></worksheet>'
    whole["xl/worksheets/sheet1.xml"] = text.encode("utf-16")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
        for name, content in whole.items():
            after.writestr(name, content)


def workbook_whose_sheet_is_called_as_the_texts(path: Path) -> None:
    far = b'<row r="1"><c r="A1"/></row><row r="1048576"><c r="XFD1048576"><v>1</v></c></row>'
    workbook(path, b"", b"", 0)
    with zipfile.ZipFile(path) as before:
        whole = {name: before.read(name) for name in before.namelist()}
    del whole["xl/worksheets/sheet1.xml"]
    whole["xl/sharedStrings.xml"] = SHEET + far + b"</sheetData></worksheet>"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
        for name, content in whole.items():
            places = content.replace(b"worksheets/sheet1.xml", b"sharedStrings.xml")
            after.writestr(name, places)


def workbook_of_one_far_row(path: Path) -> None:
    workbook(path, b"", b'<row r="30000000"/>', 1000)


def workbook_of_one_far_row_as_a_float(path: Path) -> None:
    workbook(path, b"", b'<row r="3e7"><c r="A1"><v>1</v></c></row>', 1000)


def idx_of_zeros(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, UNPACKED // 784, 28, 28))
        for _ in range(UNPACKED // len(ZEROS)):
            file.write(ZEROS)


def idx_longer_than_its_header(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, 60, 28, 28))
        for _ in range(UNPACKED // len(ZEROS)):
            file.write(ZEROS)


def state_that_is_sparse(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [UNPACKED // 4], "data_offsets": [0, UNPACKED]}
    header = json.dumps({"a": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + UNPACKED)


def weights_that_are_packed(path: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(UNPACKED // 4)}, path)
    with zipfile.ZipFile(path) as before:
        whole = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as after:
        for name, content in whole.items():
            after.writestr(name, content)


def weights_of_one_number(path: Path) -> None:
    import torch

    torch.save({"pos_embed": torch.zeros(1).expand(1, UNPACKED // 4, 4)}, path)


def picture_of_large_tiles(path: Path) -> None:
    side = 12_288
    packer = zlib.compressobj(1)
    data = packer.compress(bytes(side * side)) + packer.flush()
    wide, short = "<HHII", "<HHIHxx"
    tags = [struct.pack(wide, tag, 4, 1, 64) for tag in (256, 257)]  # width and height
    for tag, value in ((258, 8), (259, 8), (262, 1), (277, 1)):  # 8 bits, deflate, grey, 1 channel
        tags.append(struct.pack(short, tag, 3, 1, value))
    for tag, value in ((322, side), (323, side), (324, 8), (325, len(data))):  # tiles
        tags.append(struct.pack(wide, tag, 4, 1, value))
    start = b"II*\0" + struct.pack("<I", 8 + len(data))
    path.write_bytes(start + data + struct.pack("<H", len(tags)) + b"".join(tags) + bytes(4))


def kit_packed_by_bzip2(path: Path) -> None:
    """Write a kit whose card is packed by what unpacks all at once, and is said to be short."""
    zip_of(path, "kit.json", method=zipfile.ZIP_BZIP2)
    data = path.read_bytes()
    for form in ("<Q", "<I"):
        data = data.replace(struct.pack(form, UNPACKED), struct.pack(form, 4))
    path.write_bytes(data)
    path.chmod(0o600)


def picture_of_many_pixels(path: Path) -> None:
    from PIL import Image

    Image.new("1", (12_000, 12_000)).save(path)


Made = Callable[[Path], None]
ARRAYS = "array_files.read_arrays(path, ['x'], 2**40)"
ARCHIVE = "download.unpack(path, path.parent / 'out')"
TABLE = "table_files.read_table(path)"
IDX = "idx.read_idx(path)"
STATE = "state_files.load_state(path)"
WEIGHTS = "backbones.file_state(path)"
PICTURE = "decoding.decode_image(path, 32)"
KIT = "kit.read_kit(path)"
FILES: list[tuple[str, Made, str]] = [
    ("a.npz", arrays_that_are_large, ARRAYS),
    ("b.npz", arrays_whose_header_lies, ARRAYS),
    ("c.npz", arrays_of_long_texts, ARRAYS),
    ("a.zip", archive_of_zeros, ARCHIVE),
    ("b.zip", archive_packed_by_bzip2, ARCHIVE),
    ("c.zip", archive_of_many, ARCHIVE),
    ("d.zip", archive_whose_sizes_lie, ARCHIVE),
    ("a.tar.gz", tar_of_zeros, ARCHIVE),
    ("a.parquet", parquet_of_rows, TABLE),
    ("b.parquet", parquet_of_one_long_text, TABLE),
    ("c.parquet", parquet_of_lists, TABLE),
    ("a.xlsx", workbook_of_texts, TABLE),
    ("b.xlsx", workbook_of_two_cells_far_apart, TABLE),
    ("c.xlsx", workbook_in_utf16, TABLE),
    ("a.gz", idx_of_zeros, IDX),
    ("b.gz", idx_longer_than_its_header, IDX),
    ("a.safetensors", state_that_is_sparse, STATE),
    ("a.pth", weights_that_are_packed, WEIGHTS),
    ("a.png", picture_of_many_pixels, PICTURE),
    ("b.tar.gz", tar_of_a_long_pax_header, ARCHIVE),
    ("c.tar.gz", tar_of_a_long_name, ARCHIVE),
    ("d.tar.gz", tar_of_many_empty_files, ARCHIVE),
    ("d.parquet", parquet_of_one_long_value, TABLE),
    ("e.parquet", parquet_of_one_long_value_of_fixed_length, TABLE),
    ("f.parquet", parquet_of_lists_of_one_long_text, TABLE),
    ("d.xlsx", workbook_whose_sheet_is_called_as_the_texts, TABLE),
    ("e.xlsx", workbook_of_one_far_row, TABLE),
    ("f.xlsx", workbook_of_one_far_row_as_a_float, TABLE),
    ("b.pth", weights_of_one_number, WEIGHTS),
    ("a.tif", picture_of_large_tiles, PICTURE),
    ("kit.zip", kit_packed_by_bzip2, KIT),
]

# Reads lines of a path, a tab and a call; answers each by the bytes taken, a tab and what was said
PROGRAM = """
import os, resource, sys
from pathlib import Path
import pandas, openpyxl, pyarrow.parquet, timm.models, PIL.Image, PIL.PngImagePlugin
from fedsilo.core.errors import FedsiloError
from fedsilo.core.files import array_files, state_files
from fedsilo.datasets.downloads import download
from fedsilo.datasets.images import decoding
from fedsilo.datasets.shifted import idx
from fedsilo.datasets.tables import table_files
from fedsilo.datasets.weights import backbones
from fedsilo.deployment import kit

def most_taken():
    # Not ru_maxrss, which begins with the peak of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def answer(path, call):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
    before = most_taken()
    try:
        eval(call)
        said = "TAKEN"
    except (FedsiloError, decoding.BrokenImageError) as error:
        said = str(error)
    print(1024 * (most_taken() - before), repr(said), sep="\\t", flush=True)

for line in sys.stdin:
    path, call = line.rstrip().split("\\t")
    child = os.fork()
    if not child:
        answer(Path(path), call)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(0, f"ended with status {status}", sep="\\t", flush=True)
os._exit(0)
"""
Ask = Callable[[Path, str], tuple[int, str]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return a function that has a file read by a call in a fork: bytes of memory, what it said."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {VARIABLE: str(LIMIT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as readers:
        assert readers.stdin is not None
        assert readers.stdout is not None
        asked, told = readers.stdin, readers.stdout

        def ask(path: Path, call: str) -> tuple[int, str]:
            print(path, call, sep="\t", file=asked, flush=True)
            taken, said = told.readline().rstrip().split("\t")
            return int(taken), said

        yield ask
        asked.close()


@pytest.mark.parametrize(("name", "make", "reader"), FILES, ids=[f[1].__name__ for f in FILES])
def test_a_file_that_unpacks_to_too_much_is_refused_before_it_does(
    name: str, make: Made, reader: str, ask: Ask, tmp_path: Path
) -> None:
    path = tmp_path / name
    make(path)
    assert path.stat().st_blocks * 512 < LIMIT / 2, "the file itself is small"
    taken, said = ask(path, reader)
    assert said.startswith(("'", '"')), said
    assert said != "'TAKEN'"
    assert taken < MOST_TAKEN
    assert not (tmp_path / "out" / "f").exists()


def test_a_file_that_is_read_whole_takes_more_memory_than_that(ask: Ask, tmp_path: Path) -> None:
    tar_of_zeros(tmp_path / "a.gz")
    taken, said = ask(tmp_path / "a.gz", "len(__import__('gzip').open(path).read())")
    assert said == "'TAKEN'"
    assert taken > MOST_TAKEN


def test_the_line_names_file_size_limit_and_how_to_raise_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"x")
    with pytest.raises(DataError) as raised:
        check_unpacked(path, USUAL + 1)
    said = str(raised.value)
    assert all(part in said for part in (str(path), f"{USUAL + 1:,}", f"{USUAL:,}", VARIABLE))
    check_unpacked(path, USUAL)


def test_a_large_file_may_take_a_multiple_of_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(os.urandom(2**16))
    monkeypatch.setenv(VARIABLE, "1000")
    on_disk = path.stat().st_blocks * 512
    assert on_disk >= 2**16
    assert most_unpacked(path) == TIMES * on_disk
    monkeypatch.setenv(VARIABLE, str(2**40))
    assert most_unpacked(path) == 2**40


@pytest.mark.parametrize("given", ["a lot", "-1", "0", "1e9"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(SettingError):
        most_unpacked(tmp_path)


def test_honest_tables_are_read_as_before(tmp_path: Path) -> None:
    import pandas as pd

    from fedsilo.datasets.tables.table_files import read_table

    frame = pd.DataFrame(
        {"age": [63, 41, None], "name": ["x", " y", None], "ill": [True, False, True]}
    )
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    names = ["age", "name", "ill"]
    assert read_table(tmp_path / "t.parquet") == [
        (0, names),
        (1, ["63.0", "x", "True"]),
        (2, ["41.0", "y", "False"]),
        (3, ["", "", "True"]),
    ]
    assert read_table(tmp_path / "t.xlsx") == [
        (1, names),
        (2, ["63", "x", "True"]),
        (3, ["41", "y", "False"]),
        (4, ["", "", "True"]),
    ]
