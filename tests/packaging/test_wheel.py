"""The wheel: what it holds, and that it works from any folder, beside a package ``datasets``.

So do the examples of docs/, each a script of a few lines, on data of one's own too.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from fedsilo.core.errors import RefusedError
from fedsilo.deployment.worker.installed import installed_app
from tests.support.data_folders import write_sorted

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("client_app", "datasets", "fedsilo", "models", "server_app", "strategies")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
EXAMPLES = ROOT / "docs" / "examples"
SCRIPTS = ("own_network.py", "own_method.py", "own_folder.py", "own_dataframe.py")
# Runs the scripts that are named, as `python NAME.py FOLDER` does, but all in one process, whose
# imports take seconds, and makes runs on images small
RUN_SCRIPTS = """
import runpy, sys
import fedsilo

folder, *scripts = sys.argv[1:]
simulate = fedsilo.simulate
small = {"network.width": 4, "train.mc-passes": 2, "train.local-epochs": 1}
few = {"split.silos": 3, "split.silo-train-size": 20, "split.silo-test-size": 10}

def simulate_small(experiment, *, settings, **given):
    if experiment.endswith("-digits"):
        settings = settings | few
    if "silos" not in given:
        settings = settings | small
    return simulate(experiment, settings=settings, **given)

fedsilo.simulate = simulate_small
for script in scripts:
    print("BEGINS", script)
    sys.argv = [script, folder]
    runpy.run_path(script, run_name="__main__")
"""
HUGGING_FACE = """\
import sys
import datasets
from PIL import Image
from fedsilo import fetch, simulate

names = datasets.ClassLabel(names=["healthy", "ill"])
rows = {"age": [float(i) for i in range(50)], "kind": ["a", "b"] * 25, "label": [0, 1] * 25}
types = {"age": datasets.Value("float64"), "kind": datasets.Value("string"), "label": names}
table = datasets.Dataset.from_dict(rows, features=datasets.Features(types))
grey = {"image": [Image.new("L", (20, 24), 5 * i) for i in range(50)], "label": [0, 1] * 25}
form = datasets.Features({"image": datasets.Image(), "label": names})
pictures = datasets.Dataset.from_dict(grey, features=form)

small = {"rounds": 1, "mc-passes": 2, "width": 4}
silos = {"north": table.select(range(24)), "south": table.select(range(24, 50))}
run = simulate("fedavg", silos=silos, settings=small, name="rows")
assert run.settings["dataset"] == "table"
assert list(run.predictions("north").filter(like="p.").columns) == ["p.healthy", "p.ill"]
small["image-size"] = 16
run = simulate("fedavg", silos={"north": pictures}, settings=small, name="grey")
assert run.sites[["train", "val", "test"]].sum().sum() == 50

parts = {"train": pictures.select(range(40)), "test": pictures.select(range(40, 50))}
datasets.DatasetDict(parts).save_to_disk("saved")
print(*fetch("hf:saved", data_dir="data"), sep="\\n")
own = {"dataset": "folder", "data.dir": "data/saved", "split.partition": "dirichlet", "split.silos":
2} run = simulate("fedavg", settings=small | own | {"concentration": 9.0}, name="cut") assert
run.sites["test"].sum() == 10
"""


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
    code = "from fedsilo.cli.main import main; main(['experiments']); main(['settings'])"
    listed = _run(sys.executable, "-c", code, cwd=tmp_path, installed=installed)
    assert re.search(r"\n  uefl-digits +digits, 9 silos", listed)
    assert "rounds = 30" in listed
    changes = {
        "rounds": 1,
        "split.silos": 3,
        "split.silo-train-size": 20,
        "split.silo-test-size": 10,
        "network.width": 4,
    }
    sets = [f"--set={key}={value}" for key, value in changes.items()]
    options = ("--engine", engine, "--out", str(tmp_path / "runs"), "--name", "tiny")
    command = (sys.executable, "-m", "fedsilo.cli", "simulate", "fedavg-digits", "--no-pictures")
    _run(*command, *options, *sets, cwd=tmp_path, installed=installed)
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert len(summary["sites"]) == 3


@pytest.fixture(scope="module")
def ran_scripts(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """Run the scripts with the wheel; return their folder, and what each of them printed."""
    folder = tmp_path_factory.mktemp("scripts")
    data = write_sorted(folder / "data")
    copies = [shutil.copy(EXAMPLES / name, folder) for name in SCRIPTS]
    words = (sys.executable, "-c", RUN_SCRIPTS, str(data), *map(str, copies))
    printed = _run(*words, cwd=folder, installed=installed)
    parts = (part.partition("\n") for part in printed.split("BEGINS ")[1:])
    return folder, {Path(script).name: text for script, _, text in parts}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_has_at_most_25_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 25


# Three tests of make test-soak: tests/docs and tests/fedsilo/api run such scripts in the checkout,
# and above the wheel runs
@pytest.mark.soak
@pytest.mark.parametrize("name", ["own_network", "own_method"])
def test_a_script_runs_its_own_network_or_method_with_the_wheel(
    name: str, ran_scripts: tuple[Path, dict[str, str]]
) -> None:
    folder, _ = ran_scripts
    summaries = [json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")]
    assert [list(summary.get("plugs", ())) for summary in summaries].count([name]) == 1


@pytest.mark.soak
def test_a_folder_of_ones_own_images_is_a_run_of_a_few_lines(
    ran_scripts: tuple[Path, dict[str, str]],
) -> None:
    folder, printed = ran_scripts
    assert "FedAvg on folder" in printed["own_folder.py"]
    assert "predicted" in printed["own_folder.py"]
    assert (folder / "runs" / "own-folder" / "summary.json").is_file()


@pytest.mark.soak
def test_frames_of_ones_own_are_a_run_of_a_few_lines(
    ran_scripts: tuple[Path, dict[str, str]],
) -> None:
    folder, printed = ran_scripts
    assert "3 sites (east, north, south)" in printed["own_dataframe.py"]
    assert (folder / "runs" / "own-frame" / "summary.json").is_file()


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
    first: str, wheel: Path, installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "both"
    if first == "fedsilo":
        shutil.copytree(installed, folder)
        _other_datasets(folder)
    else:
        _other_datasets(folder)
        _install(wheel, folder)
    assert _owner(folder, tmp_path) == "another package"
    code = "from fedsilo.datasets.registry import data_set; print(data_set('digits').name)"
    assert _run(sys.executable, "-c", code, cwd=tmp_path, installed=folder).strip() == "digits"
    _uninstall(folder)
    assert not list(folder.glob("fedsilo/**/*.py"))
    assert _owner(folder, tmp_path) == "another package"


def _site_packages(name: str) -> Path:
    try:
        return Path(str(distribution(name).locate_file("")))
    except PackageNotFoundError:
        pytest.skip(f"the extra 'huggingface' is not installed: no package '{name}'")


def test_data_sets_of_hugging_face_are_silos_as_objects_and_by_name(
    installed: Path,
    tmp_path: Path,
) -> None:
    beside = _site_packages("datasets")
    path = tmp_path / "script.py"
    path.write_text(f"import sys\nsys.path.append({str(beside)!r})\n{HUGGING_FACE}")
    printed = _run(sys.executable, str(path), cwd=tmp_path, installed=installed)
    assert "data/saved: 40 train, 10 test" in printed
    assert (
        "--set dataset=folder --set data.dir=data/saved --set split.partition=dirichlet" in printed
    )


def test_without_its_package_a_data_set_of_hugging_face_says_what_to_install(
    installed: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "datasets.py").write_text("")
    code = (
        "from fedsilo import fetch\n"
        "from fedsilo.core.errors import DataError\n"
        "try:\n    list(fetch('hf:beans', data_dir='data'))\n"
        "except DataError as error:\n    print(error)"
    )
    printed = _run(sys.executable, "-c", code, cwd=tmp_path, installed=installed)
    assert "pip install 'fedsilo[huggingface]'" in printed
