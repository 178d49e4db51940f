"""A full disk: the error names the file and says how to go on, and what was there stays whole."""

import ast
import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedsilo.cli.__main__ import StandardOutput
from fedsilo.cli.main import main
from fedsilo.core.errors import DataError
from fedsilo.core.files import atomic_files
from fedsilo.core.files.atomic_files import build_folder, naming
from fedsilo.datasets.downloads import download
from fedsilo.datasets.downloads.public_files import RemoteFile

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fedsilo", "client_app", "datasets", "models", "server_app", "strategies", "docker")
RUN = (
    *("simulate", "fedavg", "--engine", "inline", "--no-pictures", "--name", "r"),
    *("--set", "dataset=heart-synthetic", "--set", "rounds=3", "--set", "machine.device=cpu"),
)
# Files that do not write by atomic_files, and why the error names a file all the same
OWN_WRITERS = {
    "client_app/site/audit_log.py": "names the log itself",
    "datasets/images/arrays.py": "within build_folder",
    "datasets/shifted/pools.py": "within build_folder",
    "datasets/silo/silos.py": "within build_folder",
    "fedsilo/cli/main.py": "writes to the null device",
    "docker/checks.py": "goes on without the file: its line is in the log",
    "fedsilo/comparison/trials.py": "writes to the null device",
    "fedsilo/core/files/atomic_files.py": "is the writer",
    "fedsilo/core/files/unpacked_size.py": "its caller names the folder",
    "fedsilo/deployment/backup/backup.py": "within the block that names the backup",
    "fedsilo/deployment/backup/sealed_archive.py": "within the block that names the backup",
    "fedsilo/deployment/commands.py": "a log that other processes write",
    "fedsilo/deployment/deployment.py": "an empty lock file",
    "fedsilo/deployment/worker/supernode.py": "writes to standard error",
    "fedsilo/engines/ray_engine.py": "a log that other processes write",
    "fedsilo/inference/export/export.py": "within build_folder",
    "fedsilo/inference/predict/predicted_masks.py": "within build_folder",
    "fedsilo/inference/predict/run_masks.py": "within build_folder",
    "server_app/config/trusted_plugins.py": "tells its failure as a warning, and goes on",
    "server_app/records/failures.py": "names the file itself",
    "server_app/records/recorder.py": "names the table itself",
    "server_app/records/run_directory.py": "an empty lock file",
    "server_app/records/tracking.py": "an empty lock file",
}


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function after which only that many more files reach the disk."""
    flush = os.fsync

    def let(files: int) -> None:
        left = [files]

        def flush_some(handle: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush(handle)

        monkeypatch.setattr(atomic_files.os, "fsync", flush_some)

    return let


def _in_small_files(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in ``folder``, as a user who may write files of at most 1,000 bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_that_the_system_does_not_take_is_named_and_its_old_content_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.csv").write_text("old")
    code = (
        "from pathlib import Path; from fedsilo.core.files.atomic_files import write_atomically\n"
        "try: write_atomically(Path('x.csv'), b'0' * 2000)\n"
        "except OSError as error: print(error.filename, error.strerror)"
    )
    assert _in_small_files(code, tmp_path).stdout == "x.csv File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
    assert (tmp_path / "x.csv").read_text() == "old"


def test_a_folder_of_arrays_that_does_not_fit_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import numpy; from pathlib import Path\n"
        "from fedsilo.core.files.atomic_files import build_folder\n"
        "try: build_folder(Path('made'), lambda work: numpy.save(work / 'a.npy', "
        "numpy.zeros(1000)))\n"
        "except OSError as error: print(error.filename)"
    )
    assert _in_small_files(code, tmp_path).stdout == "made\n"
    assert list(tmp_path.iterdir()) == []
    build_folder(tmp_path / "made", lambda work: np.save(work / "a.npy", np.zeros(3)))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "No such file", "y"), ConnectionResetError(errno.ECONNRESET, "reset")],
)
def test_an_error_that_is_not_of_the_disk_stays_as_it_is(error: OSError) -> None:
    before = error.filename
    with pytest.raises(OSError, match=str(error.strerror)), naming("x.csv"):
        raise error
    assert error.filename == before


def test_a_run_on_a_full_disk_says_what_is_full_and_resumes_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full_after: Callable[[int], None]
) -> None:
    assert main([*RUN, "--out", str(tmp_path / "whole")]) == 0
    full_after(9)  # in the middle of a round, after the first checkpoint
    assert main([*RUN, "--out", str(tmp_path / "small")]) == 1
    told = capsys.readouterr().err
    path = tmp_path / "small" / "r"
    assert f"error[run-directory]: {path}/" in told
    assert f"No space left on device: make room and run: fedsilo resume {path}" in told
    full_after(10**6)
    assert main(["resume", str(path), "--engine", "inline"]) == 0
    for name in ("metrics.csv", "model.safetensors"):
        assert (path / name).read_bytes() == (tmp_path / "whole" / "r" / name).read_bytes()


def test_a_run_that_could_not_begin_leaves_nothing_and_says_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full_after: Callable[[int], None]
) -> None:
    full_after(0)
    assert main([*RUN, "--out", str(tmp_path / "small")]) == 1
    assert "No space left on device: make room and start the run again" in capsys.readouterr().err
    assert not (tmp_path / "small" / "r").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_standard_output_is_named_and_the_run_is_complete(tmp_path: Path) -> None:
    # The notice on these data comes before anything is trained
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fedsilo.cli", *RUN, "--out", str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.count("standard output cannot be written (No space left on device)") == 1
    assert "cannot be kept up to date" not in done.stderr
    assert (tmp_path / "r" / "summary.json").is_file()


def test_a_reader_that_leaves_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """As in ``fedsilo simulate ... | head -1``: the lines after the first find no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    output = StandardOutput(os.fdopen(writer, "wb"), "utf-8")
    console = Console(file=output)
    for _ in range(3):
        console.print("round 1/3")  # Rich would end the process at a broken pipe
        output.flush()  # as multiprocessing does before it starts a process
    assert isinstance(output.fault, BrokenPipeError)
    output.close()
    assert capsys.readouterr().err == ""


def test_a_download_that_does_not_fit_does_not_blame_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> Callable[..., None]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pooch.HTTPDownloader", fill)
    file = RemoteFile("a.csv", "0" * 32)
    with pytest.raises(DataError, match=r"a\.csv cannot be written \(No space .*make room"):
        download._download("https://example.org", file, tmp_path / "a.csv")


def test_every_other_writer_of_a_file_is_known() -> None:
    """Whoever writes a file in a new way must see to it that a full disk names the file."""
    found = set()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not WRITER.search(text):  # to parse a file takes long
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and _writes(node):
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == OWN_WRITERS.keys()


# Names of calls that may write, as ``_writes`` knows them
WRITER = re.compile(r"\b(write_text|write_bytes|write|savez?|copyfile|open|fdopen)\(")


def _writes(call: ast.Call) -> bool:
    """Tell whether a call writes a file by another way than ``write_atomically``."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name in ("write_text", "write_bytes") or (owner, name) in (("os", "write"), ("np", "save")):
        return True
    if (owner, name) in (("np", "savez"), ("torch", "save"), ("shutil", "copyfile")):
        return True
    if name not in ("open", "fdopen"):
        return False
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [word.value for word in words if isinstance(word, ast.Constant)]
    return any(str(mode) in ("w", "wb", "a", "ab", "x", "xb", "r+b") for mode in modes)
