"""The example that draws a metric over a setting, on three run directories."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot

from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import config_document
from tests.support.run_files import SUMMARY

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "over_a_setting.py"


def test_points_are_means_over_the_runs_of_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "uefl.gamma", "a", "b", "c"])
    for name, gamma, accuracy in (("a", 0.1, 0.5), ("b", 0.1, 0.7), ("c", 0.2, 0.9)):
        (tmp_path / name).mkdir()
        settings = resolve({"method": "uefl", "uefl.gamma": gamma})
        (tmp_path / name / "config.toml").write_text(config_document(settings, {}))
        summary = SUMMARY | {"mean": {"accuracy": accuracy}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    pyplot.close("all")
    points = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(p[0], p[1], p[3]) for p in points] == [("0.1", "0.6", "2"), ("0.2", "0.9", "1")]
    assert (tmp_path / "over-a-setting.png").read_bytes().startswith(b"\x89PNG")
