"""The images' lock file: every dependency at one version, by its hashes."""

import hashlib
import http.server
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\$", re.MULTILINE)


@pytest.fixture(scope="module")
def lock(docker_folder: Path) -> str:
    """Return the text of the lock file."""
    return (docker_folder / "requirements.lock").read_text(encoding="utf-8")


@pytest.mark.parametrize("wanted", PROJECT["dependencies"])
def test_every_dependency_is_pinned_to_a_version_that_the_project_allows(
    wanted: str, lock: str
) -> None:
    pins = {canonicalize_name(name): version for name, version in _PIN.findall(lock)}
    need = Requirement(wanted)
    name = canonicalize_name(need.name)
    assert name in pins, f"{name} is not in docker/requirements.lock: run make lock"
    assert need.specifier.contains(pins[name]), f"{name} {pins[name]}: run make lock"


def test_every_pin_has_a_hash_and_nothing_else_is_installed(lock: str) -> None:
    blocks = re.split(r"\n(?=[^\s#])", lock)[1:]
    assert len(blocks) == len(_PIN.findall(lock)) > 100
    assert [block for block in blocks if "--hash=sha256:" not in block] == []


def test_no_address_of_a_registry_or_a_machine_is_in_it(lock: str) -> None:
    assert "://" not in lock
    assert "index-url" not in lock
    assert "file:" not in lock


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Return the address under which the test's folder is served."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_wheels_of_another_index_are_installed_by_their_hashes(tmp_path: Path, served: str) -> None:
    """As ``make lock TORCH=cpu`` writes it: the index stands in the file's first line."""
    wheel = tmp_path / "simple" / "torch" / "torch-9.9+cpu-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("torch-9.9+cpu.dist-info/METADATA", "Name: torch\nVersion: 9.9+cpu\n")
        file.writestr("torch-9.9+cpu.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        file.writestr("torch-9.9+cpu.dist-info/RECORD", "")
    link = wheel.name.replace("+", "%2B")
    (wheel.parent / "index.html").write_text(f'<a href="{link}">{wheel.name}</a>')
    own = f"--extra-index-url {served}/simple"
    taken = _download(tmp_path, own, hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert taken.returncode == 0, taken.stderr
    refused = _download(tmp_path, own, "0" * 64)
    assert "DO NOT MATCH THE HASHES" in refused.stderr


def _download(folder: Path, index: str, digest: str) -> subprocess.CompletedProcess[str]:
    lock = folder / "requirements-cpu.lock"
    lock.write_text(f"{index}\ntorch==9.9+cpu \\\n    --hash=sha256:{digest}\n")
    strict = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir")
    index_of_none = ("--isolated", "--index-url", index.split()[1])
    command = (sys.executable, "-m", "pip", "download", *strict, *index_of_none)
    return subprocess.run(
        [*command, "-r", str(lock), "-d", str(folder / "taken")],
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_lock_names_the_index_that_the_wheels_are_of() -> None:
    done = subprocess.run(
        ["make", "-n", "lock", "TORCH=cu126"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--torch-backend cu126 --output-file docker/requirements-cu126.lock" in done.stdout
    assert (
        "--extra-index-url https://download.pytorch.org/whl/cu126' docker/requirements-cu126.lock"
        in (done.stdout)
    )
