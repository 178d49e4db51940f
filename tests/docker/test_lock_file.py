"""The images' lock file: every dependency at one version, by its hashes."""

from __future__ import annotations

import re
import tomllib
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
