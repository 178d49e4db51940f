"""The Ray engine and plain ``flwr run``, for real: SuperLink, bundle, Ray actors."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedsilo.cli.main import main
from fedsilo.core.processes import app_folder, runs, tool
from fedsilo.core.settings_schema import Value
from fedsilo.engines import ray_engine
from fedsilo.server_app.config.resources import check_resources
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.progress import read_progress
from fedsilo.server_app.records.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


def _result(directory: RunDirectory) -> tuple[bytes, bytes]:
    metrics = directory.path / "metrics.csv"
    return metrics.read_bytes(), (directory.path / "model.safetensors").read_bytes()


def _fedsilo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedsilo.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


# The first keeps a state at its sites from round to round; the fourth an optimiser, an order and a
# discriminator
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("scaffold", {}),
        pytest.param("fedavg", {}, marks=pytest.mark.soak),
        pytest.param("uefl", {}, marks=pytest.mark.soak),
        pytest.param("fedaligncl", {"rounds": 3, "epoch_steps": 4}, marks=pytest.mark.soak),
        pytest.param("fedavg", {"rounds": 3, "wire_precision": "bf16"}, marks=pytest.mark.soak),
    ],
)
def test_ray_and_inline_give_the_same_bytes(
    method: str,
    changes: dict[str, Value],
    tiny: Tiny,
    inline_run: InlineRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = tiny(method, **changes)
    # On one core: Flower starts an actor for each, and to import torch takes an actor seconds
    resources = {"num-supernodes": 3, "init-args-num-cpus": 1}
    file = tmp_path / "simulation.yaml"
    experiment = {"config": values, "resources": resources}
    file.write_text(json.dumps({"experiments": {"tiny": experiment}}))  # JSON is YAML
    told = ("--file", str(file), "--name", "run", "--out", str(tmp_path / "ray"))
    command = ("simulate", "tiny", "--engine", "ray")
    code = main([*command, "--no-pictures", *told])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert f"round {values['rounds']}/{values['rounds']}" in printed.out
    inline = inline_run(tiny(method, **changes), out=tmp_path / "inline")
    assert _result(RunDirectory(tmp_path / "ray" / "run")) == _result(inline)


@pytest.mark.soak
def test_ray_and_inline_give_the_same_bytes_for_picsr_on_tables(
    inline_run: InlineRun, tmp_path: Path
) -> None:
    values: dict[str, Value] = {
        "method": "picsr",
        "dataset": "heart-synthetic",
        "rounds": 3,
        "picsr.expert-rounds": 2,
        "train.local-steps": 2,
        "network.dropout": 0.0,
        "train.mc-passes": 0,
        "machine.device": "cpu",
        "seed": 7,
    }
    file = tmp_path / "simulation.yaml"
    file.write_text(json.dumps({"experiments": {"tables": {"config": values}}}))  # JSON is YAML
    told = ("--file", str(file), "--name", "run", "--out", str(tmp_path / "ray"))
    done = _fedsilo("simulate", "tables", "--engine", "ray", "--supernodes", "2", *told)
    assert done.returncode == 0, done.stdout + done.stderr
    by_ray = RunDirectory(tmp_path / "ray" / "run")
    inline = inline_run(values, 2, tmp_path / "inline")
    assert _result(by_ray) == _result(inline)
    assert by_ray.read_json("routing.json") == inline.read_json("routing.json")
    experts = sorted(by_ray.path.glob("sites/*/*"))
    assert [path.read_bytes() for path in experts] == [
        path.read_bytes() for path in sorted(inline.path.glob("sites/*/*"))
    ]
    assert {path.parent.name for path in experts} == {"cleveland", "hungary"}


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment of a SuperLink that ``flwr run`` finds."""
    with ray_engine._superlink(tmp_path_factory.mktemp("flwr-home")) as environment:
        yield environment


def _flwr_run(environment: dict[str, str], *arguments: str) -> str:
    flwr = str(Path(sys.executable).parent / "flwr")
    done = subprocess.run(
        [flwr, "run", str(ROOT), *arguments, "--stream"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout + done.stderr


# Above, `fedsilo simulate` calls it too; test_end_to_end.py has sites that share two SuperNodes.
# Here, two messages to one SuperNode must not mix up what its sites keep
@pytest.mark.soak
def test_flwr_run_trains_all_sites_with_the_two_supernodes_that_flower_starts(
    tiny: Tiny, superlink: dict[str, str], inline_run: InlineRun, tmp_path: Path
) -> None:
    values = tiny("scaffold", out=str(tmp_path), run_name="pairs")
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    said = _flwr_run(superlink, "--run-config", pairs)
    assert "(2 simulated SuperNodes)" in said, said
    assert "3 sites (s1a, s2a, s3a)" in said, said
    inline = inline_run(tiny("scaffold"), out=tmp_path / "inline")
    assert _result(RunDirectory(tmp_path / "pairs")) == _result(inline)


@pytest.mark.soak
def test_flwr_run_takes_a_toml_file_and_a_failing_site_stops_the_run_with_its_reason(
    tiny: Tiny, superlink: dict[str, str], tmp_path: Path
) -> None:
    # A step size that no training survives: the sites fail in round 1 and say why.
    values = tiny("fedavg", out=str(tmp_path), run_name="toml", learning_rate=1e30)
    config = tmp_path / "run.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    said = _flwr_run(
        superlink,
        "--run-config",
        str(config),
        "--federation-config",
        "num-supernodes=3 client-resources-num-cpus=1",
    )
    assert "round 1, phase train: training diverged" in said, said
    assert "lower 'train.learning-rate'" in said
    assert not (tmp_path / "toml" / "summary.json").exists()


@pytest.mark.soak
def test_interrupting_a_run_ends_all_its_processes_and_it_resumes(
    tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    values = tiny("fedavg", rounds=12)
    sets = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    command = [sys.executable, "-m", "fedsilo.cli", "simulate", "fedavg-digits", *sets]
    run = subprocess.Popen(
        [*command, "--engine", "ray", "--name", "run", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/*")) and time.monotonic() < limit:
        time.sleep(0.05)
    tree = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    progress = read_progress(tmp_path / "run")
    assert progress
    assert progress.state == "interrupted"
    assert len(tree) >= 4, "SuperLink, SuperExec, simulation, Ray"
    assert [process for process in tree if runs(process)] == []
    done = _fedsilo("resume", str(tmp_path / "run"), "--engine", "inline")
    assert done.returncode == 0, done.stderr
    whole = inline_run(values, out=tmp_path / "whole")
    assert _result(RunDirectory(tmp_path / "run")) == _result(whole)


def test_resources_are_checked_before_anything_starts() -> None:
    from fedsilo.core.errors import SettingError

    with pytest.raises(SettingError, match="did you mean 'num-supernodes'"):
        check_resources({"num-supernode": 2})
    with pytest.raises(SettingError, match="must be a number"):
        check_resources({"client-resources-num-gpus": "half"})
    assert check_resources({})["num-supernodes"] == 2


def test_an_apps_error_line_is_found_among_flowers_own() -> None:
    line = "\x1b[91mERROR \x1b[0m:     fedsilo: site s1a is gone: start it\n"
    assert ray_engine._error_in(line) == "site s1a is gone: start it"
    assert ray_engine._error_in("INFO :      all is well") == ""
    site = "\x1b[36m(ClientAppActor pid=7)\x1b[0m ERROR :     fedsilo: a message could not be"
    assert ray_engine._error_in(site) == "", "the app's own says which site failed and why"


def test_the_bundle_finds_the_environment_of_this_process() -> None:
    assert resolve({}).common.method == "uefl"
    assert (app_folder() / "pyproject.toml").is_file()
    assert os.access(tool("flwr"), os.X_OK)
