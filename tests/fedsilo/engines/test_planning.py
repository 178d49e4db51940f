"""Which engine a run gets, and what Flower prints that a user sees."""

import sys
from pathlib import Path

import pytest

from fedsilo.core import processes
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.engines import ray_engine
from fedsilo.engines.planning import engine_for
from fedsilo.server_app.config import resources
from fedsilo.server_app.config.resources import check_resources
from fedsilo.server_app.records.run_directory import RunDirectory

PRINTED = """#!{python}
print("INFO :      Starting Flower simulation")
print("fedsilo: 3 of 3 silos take part")
print("ERROR :     fedsilo: site s1a is gone: start it")
print("Traceback (most recent call last):")
raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("dataset", "rounds", "cores", "engine", "address", "chosen"),
    [
        ("heart-synthetic", 5, 8, "auto", None, "inline"),
        ("heart-synthetic", 5000, 8, "auto", None, "processes"),
        ("digits", 5, 8, "auto", None, "processes"),
        ("digits", 5, 1, "auto", None, "inline"),
        ("heart-synthetic", 5, 8, "auto", "auto", "ray"),
        ("heart-synthetic", 5, 8, "ray", None, "ray"),
        ("digits", 5, 8, "inline", None, "inline"),
    ],
)
def test_engine_auto_takes_this_process_for_little_work_and_on_one_core(
    dataset: str,
    rounds: int,
    cores: int,
    engine: str,
    address: str | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: cores)
    monkeypatch.setattr(resources, "free_memory", lambda: 16 * 2.0**30)
    common, wanted = CommonSettings(dataset=dataset, rounds=rounds), check_resources({})
    assert engine_for(common, wanted, engine, address) == chosen
    said = capsys.readouterr().out
    assert said.count("\n") == (engine == "auto" and chosen != "ray")
    several = (
        "(to train side by side: --engine processes)" in said
    )  # offered where there can be several
    assert several == (engine == "auto" and chosen == "inline" and cores > 1)


@pytest.mark.parametrize(
    ("share", "there", "chosen"),
    [(0.0, True, "inline"), (0.5, True, "processes"), (0.0, False, "processes")],
)
def test_engine_auto_leaves_a_gpu_of_which_sites_get_no_share_to_this_process(
    share: float, there: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)
    monkeypatch.setattr(resources, "free_memory", lambda: 16 * 2.0**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    monkeypatch.setenv(resources.VISIBLE, "0")
    wanted = check_resources({"client-resources-num-gpus": share})
    assert engine_for(CommonSettings(dataset="digits"), wanted, "auto", None) == chosen


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
