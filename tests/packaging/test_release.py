"""What a release is made of: one version, the citation, the conda recipe, the licences."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from csv import DictReader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_CONDA = {"pytorch": "torch", "matplotlib-base": "matplotlib", "huggingface_hub": "huggingface-hub"}


@pytest.fixture
def version() -> ModuleType:
    """Return release/version.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("version", ROOT / "release" / "version.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_files_have_the_packages_version(version: ModuleType) -> None:
    found = list(version.found())
    assert {name for name, _ in found} == set(version.PLACES)
    assert {one for _, one in found} == {PROJECT["version"]}


def test_a_tag_of_a_release_is_its_version() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) <= {f"v{PROJECT['version']}"}


def test_a_new_version_is_written_into_each_file_and_dates_the_release(
    version: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*version.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (unreleased)\n\n- one\n")
    before = list(version.found())
    monkeypatch.setattr(version, "ROOT", tmp_path)
    for day in ("2026-01-30", "2026-01-31"):
        version.write("9.8.7rc1", day)
    assert list(version.found()) == [(name, "9.8.7rc1") for name, _ in before]
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["date-released"].day == 31
    changes = (tmp_path / "CHANGELOG.md").read_text()
    assert changes == "# Changelog\n\n## 9.8.7rc1 (2026-01-30)\n\n- one\n", "a day is not rewritten"


def test_the_citation_has_what_its_format_wants() -> None:
    citation: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["authors"]
    assert citation["license"] == PROJECT["license"]
    assert str(citation["title"]).startswith(PROJECT["name"])


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    recipe = yaml.safe_load((ROOT / "release" / "recipe.yaml").read_text())
    wanted = {}
    for text in recipe["requirements"]["run"]:
        name, _, bounds = text.partition(" ")
        wanted[_CONDA.get(name, name)] = Requirement(f"x{bounds}").specifier
    assert wanted.pop("python") == Requirement(f"x{PROJECT['requires-python']}").specifier
    assert wanted.pop("ray-default"), "Flower's extra 'simulation'"
    own = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert wanted == own
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command == f"fedsilo = {PROJECT['scripts']['fedsilo']}"


def test_the_page_on_installing_has_the_sizes_that_were_measured() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    with (ROOT / "docs" / "results" / "install-sizes.csv").open() as file:
        sizes = {
            (row["what"], row["pytorch"][:3]): float(row["megabytes"]) for row in DictReader(file)
        }
    for what, row in {
        "torch and torchvision": "`torch` and `torchvision` with what they need",
        "the card's packages": "with Flower, Ray, timm, POT and cvxpylayers",
        "fedsilo": "all of fedsilo",
    }.items():
        *_, cpu, cuda, _ = next(line for line in page.splitlines() if row in line).split("|")
        numbers = [f"{sizes[what, build]:,.0f}" for build in ("cpu", "cud")]
        assert [cpu.strip(), cuda.strip()] == numbers
    listed = re.findall(r"^\| `([a-z]+)` \|.*\| (\S.*) \|$", page, re.MULTILINE)
    for extra, shown in listed:
        size = sizes[f"extra {extra}", "cud"]
        assert shown == (f"{size:.0f}" if size >= 1 else "under 1"), extra
    extras = PROJECT["optional-dependencies"].keys() - {"docs", "test"}
    assert {name for name, _ in listed} == extras, "measure it: release/sizes.py"


def _setup(*more: str) -> str:
    """Return the commands of ``make setup``, whatever the make that runs this test was given."""
    own = ("MAKEFLAGS", "MAKEOVERRIDES", "VENV", "TORCH")
    return subprocess.run(
        ["make", "-n", "-B", "setup", *more],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in own},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("build", ["cpu", "cu126"])
def test_another_pytorch_is_installed_first_from_its_own_index_into_its_own_environment(
    build: str,
) -> None:
    index = f"--index-url https://download.pytorch.org/whl/{build}"
    order = rf"{index} -r (\S+)-{build}/torch.txt\n.*-r \1-{build}/requirements"
    assert re.search(order, _setup(f"TORCH={build}"))
    assert "whl" not in _setup()


def test_the_licence_of_each_dependency_is_listed() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    listed = set(re.findall(r"^\| ([a-z0-9-]+) \| \S+ \| \S", page, re.MULTILINE))
    lock = (ROOT / "docker" / "requirements.lock").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"]]
    texts += [t for name, more in extras.items() if name not in ("test", "docs") for t in more]
    direct = {canonicalize_name(Requirement(text).name) for text in texts}
    assert len(locked) > 100
    assert (locked | direct) - listed == set(), "run 'make licences'"


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("uv"), reason="uv builds the archives, and is not installed")
def test_two_builds_of_a_commit_are_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name, umask in (("one", 0o022), ("other", 0o077)):
        # Another time, another folder and other modes of files must not be seen in the archives
        clone = tmp_path / name
        command = ["git", "clone", "--quiet", str(ROOT), str(clone)]
        subprocess.run(command, check=True, umask=umask)
        environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
        build = ["uv", "--no-config", "build", "--quiet", "--out-dir", str(clone / "dist")]
        done = subprocess.run(build, cwd=clone, env=environment, capture_output=True, check=False)
        if done.returncode:
            pytest.skip("the build needs a package index")
        archives = sorted((clone / "dist").glob("fedsilo-*"))
        assert len(archives) == 2
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in archives])
    assert digests[0] == digests[1]
