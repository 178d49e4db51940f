"""Which engine a run gets, and what Flower prints that a user sees."""

import sys
from pathlib import Path

import pytest

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run import processes, ray_engine
from fedsilo.server_app.run.planning import engine_for

PRINTED = """#!{python}
print("INFO :      Starting Flower simulation")
print("fedsilo: 3 of 3 silos take part")
print("ERROR :     fedsilo: site s1a is gone: start it")
print("Traceback (most recent call last):")
raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("dataset", "cores", "engine", "address", "chosen"),
    [
        ("heart-synthetic", 8, "auto", None, "inline"),
        ("digits", 8, "auto", None, "ray"),
        ("digits", 1, "auto", None, "inline"),
        ("heart-synthetic", 8, "auto", "auto", "ray"),
        ("heart-synthetic", 8, "ray", None, "ray"),
        ("digits", 8, "inline", None, "inline"),
    ],
)
def test_engine_auto_takes_this_process_for_tables_and_on_one_core(
    dataset: str,
    cores: int,
    engine: str,
    address: str | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert engine_for(CommonSettings(dataset=dataset), engine, address) == chosen
    said = capsys.readouterr().out
    assert said.count("\n") == (engine == "auto" and chosen == "inline")


@pytest.mark.parametrize("verbose", [False, True])
def test_an_error_in_flower_run_is_returned_and_the_rest_shown_if_verbose(
    verbose: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "flwr"
    tool.write_text(PRINTED.format(python=sys.executable))
    tool.chmod(0o700)
    monkeypatch.setattr(processes, "tool", lambda name: str(tool))
    if verbose:
        monkeypatch.setenv(processes.VERBOSE, "1")
    config, run = tmp_path / "config.toml", RunDirectory(tmp_path / "run")
    error = ray_engine._flwr_run(tmp_path, config, {}, {}, run)
    assert error == "site s1a is gone: start it"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (4 if verbose else 1)
    assert "fedsilo: 3 of 3 silos take part" in lines
