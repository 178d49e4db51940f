"""The wheel: what it holds, and that it works from any folder, beside a package ``datasets``."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedsilo.core.errors import RefusedError
from fedsilo.deployment.worker.installed import installed_app

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("client_app", "datasets", "fedsilo", "models", "server_app", "strategies")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def _run(*words: str, cwd: Path, installed: Path | None = None) -> str:
    """Run a command without this checkout on Python's path, and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FEDSILO_RUNS")}
    if installed is not None:
        environment["PYTHONPATH"] = str(installed)
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _install(wheel: Path, folder: Path) -> None:
    _run(*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel), cwd=ROOT)


def _uninstall(folder: Path) -> None:
    """Remove what fedsilo's RECORD lists, as an uninstaller does."""
    (record,) = folder.glob("fedsilo-*.dist-info/RECORD")
    for name, *_ in list(csv.reader(record.read_text().splitlines())):
        (folder / name).unlink(missing_ok=True)


def _other_datasets(folder: Path) -> None:
    (folder / "datasets").mkdir(parents=True)
    (folder / "datasets" / "__init__.py").write_text('OWNER = "another package"\n')


def _owner(folder: Path, cwd: Path) -> str:
    return _run(
        sys.executable, "-c", "import datasets; print(datasets.OWNER)", cwd=cwd, installed=folder
    ).strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _run(*PIP, "wheel", *options, str(ROOT), cwd=folder)
    (built,) = folder.glob("fedsilo-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    _install(wheel, folder)
    return folder


def test_the_wheel_holds_the_package_with_its_five_folders_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fedsilo"}
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    wanted = {f"fedsilo/{name.removeprefix('fedsilo/')}" for name in tracked}
    wanted |= {"fedsilo/simulation.yaml", "fedsilo/pyproject.toml"}
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.soak)])
def test_a_wheel_lists_and_runs_experiments_from_an_empty_folder(
    engine: str, installed: Path, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "fedsilo.cli")
    listed = _run(*command, "experiments", cwd=tmp_path, installed=installed)
    assert re.search(r"\n  uefl-digits +digits, 9 silos", listed)
    assert "rounds = 30" in _run(*command, "settings", cwd=tmp_path, installed=installed)
    changes = {
        "rounds": 1,
        "split.silos": 3,
        "split.silo-train-size": 20,
        "split.silo-test-size": 10,
        "network.width": 4,
    }
    sets = [f"--set={key}={value}" for key, value in changes.items()]
    options = ("--engine", engine, "--out", str(tmp_path / "runs"), "--name", "tiny")
    _run(*command, "simulate", "fedavg-digits", *options, *sets, cwd=tmp_path, installed=installed)
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert len(summary["sites"]) == 3


@pytest.mark.parametrize("name", ["own_network.py", "own_method.py"])
def test_a_script_of_at_most_25_lines_runs_with_the_wheel(
    name: str, installed: Path, tmp_path: Path
) -> None:
    script = ROOT / "docs" / "examples" / name
    assert len(script.read_text().splitlines()) <= 25
    own = shutil.copy(script, tmp_path)
    _run(sys.executable, own, cwd=tmp_path, installed=installed)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert list(json.loads(summary.read_text())["plugs"]) == [script.stem]


def test_the_engines_find_flowers_app_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "from fedsilo.core.processes import app_folder; print(app_folder())"
    found = _run(sys.executable, "-c", code, cwd=tmp_path, installed=installed)
    assert Path(found.strip()) == installed / "fedsilo"


def test_a_bundle_of_the_wheel_is_the_app_of_the_wheel_and_of_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "app.fab"
    code = (
        "import sys; from pathlib import Path; from flwr.cli.build import build_fab_from_disk\n"
        "from fedsilo.core.processes import app_folder\n"
        "Path(sys.argv[1]).write_bytes(build_fab_from_disk(app_folder()))\n"
    )
    _run(sys.executable, "-c", code, str(bundle), cwd=tmp_path, installed=installed)
    names = set(zipfile.ZipFile(bundle).namelist())
    assert {"core/errors.py", "client_app/app.py", "simulation.yaml", "pyproject.toml"} <= names
    assert "reports/clinic.py" not in names, "no part of what computes"
    for folder in (installed / "fedsilo", ROOT):
        installed_app(folder).refuse_other(bundle.read_bytes())
    altered = shutil.copytree(installed / "fedsilo", tmp_path / "fedsilo")
    (altered / "core" / "errors.py").write_text("")
    with pytest.raises(RefusedError, match=r"core/errors\.py"):
        installed_app(altered).refuse_other(bundle.read_bytes())


@pytest.mark.parametrize("first", ["fedsilo", "datasets"])
def test_another_package_datasets_stays_whichever_came_first(
    first: str, wheel: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "both"
    steps = {
        "fedsilo": lambda: _install(wheel, folder),
        "datasets": lambda: _other_datasets(folder),
    }
    for name in (first, *(steps.keys() - {first})):
        steps[name]()
    assert _owner(folder, tmp_path) == "another package"
    code = "from fedsilo.datasets.registry import data_set; print(data_set('digits').name)"
    assert _run(sys.executable, "-c", code, cwd=tmp_path, installed=folder).strip() == "digits"
    _uninstall(folder)
    assert not list(folder.glob("fedsilo/**/*.py"))
    assert _owner(folder, tmp_path) == "another package"
