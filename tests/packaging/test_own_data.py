"""Own data and those of Hugging Face, where fedsilo is installed from its wheel."""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.packaging import test_wheel
from tests.support.data_folders import write_sorted

wheel, installed = test_wheel.wheel, test_wheel.installed  # fixtures
EXAMPLES = test_wheel.ROOT / "docs" / "examples"
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


def _site_packages(name: str) -> Path:
    try:
        return Path(str(distribution(name).locate_file("")))
    except PackageNotFoundError:
        pytest.skip(f"the extra 'huggingface' is not installed: no package '{name}'")


def test_a_folder_of_ones_own_images_is_a_run_of_a_few_lines(
    installed: Path,
    tmp_path: Path,
) -> None:
    data = write_sorted(tmp_path / "data")
    words = (sys.executable, str(EXAMPLES / "own_folder.py"), str(data))
    printed = test_wheel._run(*words, cwd=tmp_path, installed=installed)
    assert "FedAvg on folder" in printed
    assert "predicted" in printed
    assert (tmp_path / "runs" / "own-folder" / "summary.json").is_file()


def test_frames_of_ones_own_are_a_run_of_a_few_lines(
    installed: Path,
    tmp_path: Path,
) -> None:
    words = (sys.executable, str(EXAMPLES / "own_dataframe.py"))
    printed = test_wheel._run(*words, cwd=tmp_path, installed=installed)
    assert "3 sites (east, north, south)" in printed
    assert (tmp_path / "runs" / "own-frame" / "summary.json").is_file()


@pytest.mark.parametrize("name", ["own_folder.py", "own_dataframe.py"])
def test_an_example_has_at_most_25_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 25


def test_data_sets_of_hugging_face_are_silos_as_objects_and_by_name(
    installed: Path,
    tmp_path: Path,
) -> None:
    beside = _site_packages("datasets")
    path = tmp_path / "script.py"
    path.write_text(f"import sys\nsys.path.append({str(beside)!r})\n{HUGGING_FACE}")
    printed = test_wheel._run(sys.executable, str(path), cwd=tmp_path, installed=installed)
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
    printed = test_wheel._run(sys.executable, "-c", code, cwd=tmp_path, installed=installed)
    assert "pip install 'fedsilo[huggingface]'" in printed
