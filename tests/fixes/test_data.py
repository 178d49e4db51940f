"""Data that are refused when they are opened, and their fixes."""

import re
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.data_folders import write_images, write_tables
from tests.support.fixes import PHANTOM, Case, Values, check, refused
from tests.support.setting_keys import as_keys

# Parts of the errors that the functions below try
TRIED = (
    "training rows are left",
    "gives no mean and std for every numeric column",
    "no test images: set",
    "no validation images, which are needed to choose the epoch",
)
CASES = [
    Case(
        "it has no image: raise 'split.public-share'",
        PHANTOM | {"split.public-share": 1e-6, "split.sample-share": 0.05},
        {"raise 'split.public-share'": {"split.public-share": 0.3}},
    ),
    Case(
        "images cannot be used",
        {"dataset": "images"},
        {"set 'data.broken-images' to 'skip'": {"data.broken-images": "skip"}},
    ),
    Case(
        "gives val images itself: set 'split.val-folds' to 0",
        {"dataset": "endovascular", "split.val-folds": 2},
        {"set 'split.val-folds' to 0": {"split.val-folds": 0}},
    ),
    Case(
        "gives test images itself: set 'split.test-folds' to 0",
        {"dataset": "endovascular", "split.test-folds": 2},
        {"set 'split.test-folds' to 0": {"split.test-folds": 0}},
    ),
    Case(
        "train images need",
        {
            "dataset": "digits",
            "split.silos": 9,
            "split.silo-train-size": 1000,
            "split.silo-test-size": 10,
        },
        {
            "'split.silo-train-size' 159 for 9 silos": {"split.silo-train-size": 159},
            "'split.silos' 1 of that size": {"silos": 1},
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused_data_with_fix_load(case: Case, tmp_path: Path) -> None:
    write_images(tmp_path, "images.yaml")
    (tmp_path / "north" / "3.png").write_bytes(b"no image")
    write_images(tmp_path / "split", "endovascular.yaml")
    parts = ["train"] * 10 + ["val"] * 3 + ["test"] * 3
    for site in ("north", "south"):
        lines = [f"{n}.png,{'ab'[n % 2]},{part}" for n, part in enumerate(parts)]
        path = tmp_path / "split" / site / "list.csv"
        path.write_text("\n".join(["path,label,split", *lines]) + "\n")

    def attempt(values: Values) -> None:
        folder = tmp_path / "split" if values["dataset"] == "endovascular" else tmp_path
        settings = resolve(as_keys({"method": "fedavg", "data.dir": str(folder), **values})).common
        if settings.public_share:
            from fedsilo.core.files.locations import find_places
            from fedsilo.datasets.images.image_data_set import ImageDataSet

            data = data_set(settings.dataset)
            assert isinstance(data, ImageDataSet)
            data.public(settings, find_places(settings.data_dir, settings.cache_dir))
        load_silo(silo_names(settings)[0], settings)

    check(case, attempt)


def test_table_with_few_complete_rows_and_imputation_loads(tmp_path: Path) -> None:
    write_tables(tmp_path)
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema.read_text().replace("policy: impute", "policy: drop"))
    path = tmp_path / "north.csv"
    lines = path.read_text().splitlines()
    lines[4:] = [re.sub(r",\d+\.\d,", ",NA,", line) for line in lines[4:]]
    path.write_text("\n".join(lines) + "\n")
    settings = resolve({"method": "fedavg", "dataset": "table", "data.dir": str(tmp_path)}).common
    assert "set the schema's 'policy' to 'impute'" in refused(lambda: load_silo("north", settings))
    schema.write_text(schema.read_text().replace("policy: drop", "policy: impute"))
    assert not refused(lambda: load_silo("north", settings))


def test_table_without_declared_statistics_and_pooled_standardisation_runs(tmp_path: Path) -> None:
    write_tables(tmp_path)
    values: Values = {"method": "fedavg", "dataset": "table", "network": "logistic", "rounds": 1}
    values = {
        **values,
        "train.mc-passes": 0,
        "data.dir": str(tmp_path),
        "run.out": str(tmp_path / "runs"),
    }

    def attempt(**more: Value) -> None:
        named = {"run.name": f"run{next(names)}"}
        run_inline(resolve(as_keys({**values, **named, **more})), 2)

    names = iter(range(10))
    told = refused(lambda: attempt(standardise="declared"))
    assert "gives no mean and std for every numeric column: add them, or set it to 'po" in told
    assert not (tmp_path / "runs" / "run0").exists(), "refused before the run began"
    assert not refused(lambda: attempt(standardise="pooled"))
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema.read_text().replace("{name: age}", "{name: age, mean: 50, std: 9}"))
    assert not refused(lambda: attempt(standardise="declared"))


@pytest.mark.parametrize("lacking", ["val", "test", "none"])
def test_finetune_with_manifest_that_lacks_a_split_runs(
    lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path, "images.yaml")
    parts = ["train"] * 10 + ["val"] * 3 + ["test"] * 3
    for site in ("north", "south"):
        given = ["train" if part == lacking else part for part in parts]
        lines = [f"{n}.png,{'ab'[n % 2]},{part},p{n}" for n, part in enumerate(given)]
        table = "\n".join(["path,label,split,patient", *lines]) + "\n"
        (tmp_path / site / "list.csv").write_text(table)
    words = ["finetune", "--task", "classification", "--weights", "scratch", "--dataset", "images"]
    words += ["--data-dir", str(tmp_path), "--seeds", "1", "--epochs", "1", "--device", "cpu"]
    words += ["--set", "network.width=4"]

    def said(*more: str) -> str:
        out = tmp_path / f"out{'-'.join(more).replace('=', '')}"
        main([*words, "--out", str(out), *more])
        return capsys.readouterr().err

    if lacking == "test":
        assert "no test images: set 'split.test-folds'" in said()
        assert not said("--set", "split.test-folds=3")
    else:
        assert not said()
