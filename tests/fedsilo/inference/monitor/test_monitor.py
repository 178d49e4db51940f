"""``fedsilo monitor`` on whole runs, as a user runs it."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from fedsilo import simulate
from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.tables.heart import synthetic_text
from fedsilo.inference.monitor.new_data import open_new_data
from fedsilo.runs.finished_run import FinishedRun
from tests.support.data_folders import write_images

COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"


def _new(folder: Path, site: str, rows: int = 200) -> Path:
    path = folder / f"{site}.csv"
    text = synthetic_text(site).splitlines()[:rows]
    path.write_text("\n".join([COLUMNS, *text]) + "\n")
    return path


def _run(*words: object) -> int:
    try:
        return main(["monitor", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)


def test_monitor_of_the_sites_own_kind_of_patients_has_no_drift(
    hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hearts / "fedavg-seed0"
    _run(run, "--data", _new(tmp_path, "cleveland"), "--site", "cleveland")
    lines = capsys.readouterr().out.splitlines()
    drift = [line for line in lines if "distribution of" in line]
    assert len(drift) >= 8
    assert not [line for line in drift if line.startswith("ALARM")]
    assert any(line.startswith("not checked: coverage") for line in lines), "no calibration"


def test_monitor_says_that_an_accuracy_that_may_not_be_shown_was_not_compared(
    hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(hearts / "fedavg-seed0", tmp_path / "run")
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    summary["sites"]["va"].pop("accuracy")
    path.write_text(json.dumps(summary))
    _run(run, "--data", _new(tmp_path, "va"), "--site", "va")
    assert "not checked: accuracy: the run has none of va that may be" in capsys.readouterr().out


def test_monitor_of_another_hospital_alarms_by_exit_status_and_page(
    hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = hearts / "fedavg-seed0", tmp_path / "page.html"
    data = _new(tmp_path, "va")
    assert _run(run, "--data", data, "--site", "cleveland", "--out", out) == 3
    assert "ALARM  distribution of chol" in capsys.readouterr().out
    html = out.read_text()
    for said in ("FedAvg (fedavg)", "heart-synthetic", "fedsilo 0.", "va.csv", "ALARM"):
        assert said in html


def test_monitor_at_trust_nobody_says_what_is_missing(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(private, tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text().replace('trust = "server"', 'trust = "nobody"'))
    _run(run, "--data", _new(tmp_path, "va"), "--site", "cleveland")
    printed = capsys.readouterr()
    assert "distribution of age" not in printed.out
    assert "at 'trust: nobody' no distribution of training data" in printed.out, printed.err


def test_monitor_of_too_few_cases_is_refused(
    hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _new(tmp_path, "cleveland", rows=9)
    assert _run(hearts / "fedavg-seed0", "--data", data) == 1
    assert "9 cases that can be used, but a check needs 10" in capsys.readouterr().err


@pytest.mark.parametrize("coverage", [1.5, 0.0, -1.0, float("nan")])
def test_a_coverage_that_is_no_share_is_refused(
    coverage: float, hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _new(tmp_path, "cleveland")
    assert _run(hearts / "fedavg-seed0", "--data", data, "--coverage", coverage) == 1
    assert "--coverage is" in capsys.readouterr().err


def test_labels_of_a_manifest_are_found_also_for_names_like_formulas(
    finished: Path, tmp_path: Path
) -> None:
    names = ["plain.png", "-dash.png"]
    for name in names:
        Image.new("L", (28, 28)).save(tmp_path / name)
    (tmp_path / "new.csv").write_text("path,label\nplain.png,3\n-dash.png,4\n")
    new = open_new_data(FinishedRun.open(finished / "fedavg").model("s1a"), tmp_path / "new.csv")
    assert list(new.inputs.names) == ["plain.png", "./-dash.png"]
    assert new.labels.tolist() == [3, 4]


def test_a_manifests_labels_are_those_that_the_declaration_lists(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", "images.yaml")
    declaration = data / "images.yaml"
    content = declaration.read_text()
    declaration.write_text(content.replace("[a, b]", "{fine: [a, 007], ill: [b, 8, fine?]}"))
    small: dict[str, Value] = {
        "dataset": "images",
        "data.dir": str(data),
        "rounds": 1,
        "network.width": 4,
    }
    small |= {
        "train.local-steps": 1,
        "data.cache-dir": str(tmp_path / "cache"),
        "machine.device": "cpu",
    }
    run = simulate("fedavg", settings=small, out=tmp_path / "runs", name="own", no_pictures=True)
    labels = {"a": 0, "b": 1, "7": 0, "fine": 0, "fine?": 1, "ill": 1, "other": -1, "": -1}
    lines = [f"north/{number}.png,{label}\n" for number, label in enumerate(labels)]
    (data / "new.csv").write_text("path,label\n" + "".join(lines))
    new = open_new_data(FinishedRun.open(run.path).model("north"), data / "new.csv")
    assert new.labels.tolist() == list(labels.values())


def test_booleans_of_a_new_table_are_the_classes_0_and_1(hearts: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in _new(tmp_path, "va", rows=4).read_text().splitlines()]
    words = [rows[0][-1], "True", "FALSE", "1", "7"]
    lines = [",".join([*row[:-1], word]) for row, word in zip(rows, words, strict=True)]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    new = open_new_data(FinishedRun.open(hearts / "fedavg-seed0").model(), tmp_path / "new.csv")
    assert new.labels.tolist() == [1, 0, 1, -1]


@pytest.mark.parametrize("header", ["\ufeffpath,label", '"path","label"', "path, label"])
def test_a_manifest_is_read_as_predict_reads_it(
    header: str, finished: Path, tmp_path: Path
) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    (tmp_path / "new.csv").write_text(f"{header}\na.png,3\n", encoding="utf-8")
    new = open_new_data(FinishedRun.open(finished / "fedavg").model("s1a"), tmp_path / "new.csv")
    assert new.labels.tolist() == [3]


def test_a_table_with_a_column_of_paths_is_a_table(hearts: Path, tmp_path: Path) -> None:
    rows = _new(tmp_path, "cleveland").read_text().splitlines()
    (tmp_path / "paths.csv").write_text("".join(f"{row},path\n" for row in rows))
    new = open_new_data(FinishedRun.open(hearts / "fedavg-seed0").model(), tmp_path / "paths.csv")
    assert len(new.inputs.names) == len(rows) - 1


def test_monitor_without_labels_checks_drift_alone(
    hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _new(tmp_path, "cleveland")
    rows = list(csv.reader(data.open()))
    data.write_text("\n".join(",".join(row[:-1]) for row in rows) + "\n")
    _run(hearts / "fedavg-seed0", "--data", data)
    out = capsys.readouterr().out
    assert "not checked: coverage, calibration and accuracy: 0 cases have a label" in out
    assert json.loads((hearts / "fedavg-seed0" / "summary.json").read_text())["mean"]
