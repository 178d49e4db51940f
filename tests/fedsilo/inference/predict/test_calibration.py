"""``fedsilo calibrate``, and predictions with its temperature and sets."""

import json
from pathlib import Path

import pytest
import torch

from fedsilo import calibrate, predict
from fedsilo.cli.main import main
from fedsilo.models.measures.calibration import apply_temperature
from tests.fedsilo.inference.predict.test_data_sets import run_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on four made-up hospitals with validation rows, and another with none."""
    folder = tmp_path_factory.mktemp("calibrated")
    changes = {
        "split.val-folds": 4,
        "train.local-steps": 20,
        "train.learning-rate": 0.05,
        "rounds": 2,
    }
    path = run_of("heart-synthetic", folder, "", **changes).path
    run_of("heart-synthetic", folder, "", **{"run.name": "none"})
    return path


def test_a_calibration_is_of_the_validation_rows(run: Path) -> None:
    found = calibrate(run, "hungary")
    path = run / "calibration-hungary.json"
    assert json.loads(path.read_text())["temperature"] == found.temperature
    assert path.stat().st_mode & 0o777 == 0o600
    val = predict(run, site="hungary", split="val")
    assert val.inputs.truth is not None
    scores = 1 - val.own.gather(1, val.inputs.truth[:, None])[:, 0]
    assert list(found.scores) == sorted(scores.tolist())
    assert found.tempered_loss <= found.loss
    assert found.loss == pytest.approx(val.document["figures"]["loss"])
    lines = found.lines(0.9)
    assert "on average over calibrations" in lines[2]
    assert "not of each class" in lines[3]


def test_predictions_are_tempered_and_have_sets(run: Path) -> None:
    found = calibrate(run, "hungary")
    plain = predict(run, site="hungary", split="test")
    told = predict(run, site="hungary", split="test", coverage=0.8)
    assert torch.equal(told.own, plain.own)
    assert torch.equal(told.probabilities, apply_temperature(plain.own, found.temperature))
    assert told.sets is not None
    limit = sorted(found.scores)[-(-4 * (found.rows + 1) // 5) - 1]
    assert torch.equal(told.sets, 1 - plain.own <= limit)
    assert list(told.frame().columns[-3:]) == ["set", "truth", "fault"]
    held = [name for name, inside in zip(told.classes, told.sets[0], strict=True) if inside]
    assert told.frame()["set"][0] == "|".join(held)
    metrics = told.document["figures"]
    assert 0 <= metrics["covered"] <= 1
    assert told.document["calibration"]["threshold"] == limit
    file = run / "calibration-hungary.json"
    only = predict(run, site="hungary", split="test", calibration=file)
    assert only.sets is None
    assert torch.equal(only.probabilities, told.probabilities)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_too_few_rows_are_refused_with_how_many_it_takes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", str(run), "--out", str(tmp_path / "c.json"), "--site"]
    told = refusal([*words, "va", "--coverage", "0.99"], capsys)
    assert "validation rows, but a calibration for coverage 0.99 needs 99" in told
    none = [word.replace("heart-synthetic", "none") for word in words]
    assert "has 0 validation rows" in refusal([*none, "va"], capsys)
    assert "--coverage is 1.0; it must be" in refusal([*words, "va", "--coverage", "1"], capsys)
    assert not (tmp_path / "c.json").exists()
    (tmp_path / "c.json").write_text("mine")
    assert "c.json already exists" in refusal([*words, "va"], capsys)


def test_a_calibration_of_another_model_or_a_damaged_one_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate(run, "cleveland", out=tmp_path / "c.json")
    words = ["predict", str(run), "--split", "test", "--out", str(tmp_path / "o.csv")]
    words += ["--calibration", str(tmp_path / "c.json")]
    assert main([*words, "--site", "cleveland", "--coverage", "0.9"]) == 0
    capsys.readouterr()
    for name in ("o.csv", "o.csv.json"):
        (tmp_path / name).unlink()
    assert "calibrate again" in refusal([*words, "--site", "hungary"], capsys)
    other = [*words, "--site", "cleveland", "--coverage", "0.999"]
    assert "--coverage 0.999 needs 999 validation rows" in refusal(other, capsys)
    (tmp_path / "c.json").write_text("{}")
    assert "is damaged or not a calibration" in refusal([*words, "--site", "cleveland"], capsys)
    assert not (tmp_path / "o.csv").exists()
