"""What ``fedsilo doctor`` finds at a site or of a run, and the fixes that it tells."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsilo.cli.main import main
from fedsilo.core.arguments import RunSources
from fedsilo.engines.inline_engine import run_inline
from fedsilo.engines.planning import plan_run
from tests.support.data_folders import write_tables
from tests.support.fixes import refused

# Parts of what the functions below are told
TRIED = (
    "update its driver; if that does not help",
    "update its driver, or set 'device' to cpu",
    "install a PyTorch build that supports it",
    "fix it at that site",
    "fix the others, or set 'run.min-sites' to",
    "choose another 'site' in the node config",
    "copy it there, or remove 'site-file'",
)
EXPERIMENT = "{method: fedavg, dataset: table, network: logistic, rounds: 1, mc-passes: 0"
Doctor = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Return a function that runs the command and gives the last finding of each check."""

    def run(*words: str) -> dict[str, dict[str, Any]]:
        with suppress(SystemExit):
            main(["doctor", *words, "--json"])
        found = json.loads(capsys.readouterr().out)["findings"]
        return {finding["check"]: finding for finding in found}

    return run


def _node(folder: Path, **own: str) -> list[str]:
    """Return the words of ``doctor site`` for a hospital's node config."""
    config = {
        "site": "south",
        "state-dir": str(folder / "state"),
        "trust": "server",
        "device": "cpu",
    }
    config |= {key.replace("_", "-"): value for key, value in own.items()}
    told = " ".join(f'{key}="{value}"' for key, value in config.items())
    return ["site", "--node-config", told]


def test_doctor_with_valid_name_passes(doctor: Doctor, tmp_path: Path) -> None:
    told = doctor(*_node(tmp_path, site="a/b"))["node config"]
    assert (told["status"], told["fix"]) == ("FAILED", "choose another 'site' in the node config")
    assert doctor(*_node(tmp_path, site="north"))["node config"]["status"] == "PASSED"


def test_doctor_with_site_file_restored_or_unset_passes(doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    told = doctor(*_node(tmp_path, site_file=str(file)))["site file"]
    assert told["status"] == "FAILED"
    assert told["fix"] == "copy it there, or remove 'site-file'"
    assert doctor(*_node(tmp_path))["site file"]["status"] == "PASSED"
    file.write_text("{methods: ['*'], datasets: ['*'], records: ['*']}")
    assert doctor(*_node(tmp_path, site_file=str(file)))["site file"]["status"] == "PASSED"


def _works(tensor: torch.Tensor, *_: int) -> torch.Tensor:
    """Bring a tensor to the GPU, which is this CPU."""
    return tensor


def _alters(tensor: torch.Tensor, *_: int) -> torch.Tensor:
    return 2 * tensor


def _fails(tensor: torch.Tensor, *_: int) -> torch.Tensor:
    raise RuntimeError("CUDA error: no kernel image is available")


def _machine(monkeypatch: pytest.MonkeyPatch, driver: Callable[..., Any], built: str) -> None:
    """Let PyTorch say that it is built so and has a GPU of capability 9.0 behind that driver."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_arch_list": [built],
        "mem_get_info": (10**10, 8 * 10**10),
        "is_bf16_supported": True,
        "device": nullcontext(),
        "get_device_name": "a GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    monkeypatch.setattr(torch.Tensor, "to", driver)


@pytest.mark.parametrize(
    ("driver", "built", "told"),
    [
        (
            *(_alters, "sm_90"),
            "update its driver; if that does not help, the GPU is broken: set 'device' to cpu",
        ),
        (_fails, "sm_90", "update its driver, or set 'device' to cpu"),
        (
            *(_works, "sm_75"),
            "install a PyTorch build that supports it (pytorch.org/get-started), or set 'device' "
            "to cpu",
        ),
    ],
)
def test_doctor_with_repaired_gpu_or_cpu_passes(
    driver: Callable[..., Any],
    built: str,
    told: str,
    doctor: Doctor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _machine(monkeypatch, driver, built)
    found = doctor(*_node(tmp_path, device="cuda"))["gpu"]
    assert (found["status"], found["fix"]) == ("FAILED", told)
    by_cpu = doctor(*_node(tmp_path, device="cpu"))["gpu"]
    assert (by_cpu["status"], by_cpu["said"]) == ("SKIPPED", "the node config's 'device' is cpu")
    _machine(monkeypatch, _works, "sm_90")
    assert doctor(*_node(tmp_path, device="cuda"))["gpu"]["status"] == "PASSED"


def _statuses(found: Mapping[str, Mapping[str, Any]], *checks: str) -> list[str]:
    return [found[check]["status"] for check in checks]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Return a simulation file whose experiment 'own' has a site without the column 'age'."""
    write_tables(tmp_path)
    file, table = tmp_path / "simulation.yaml", tmp_path / "south.csv"
    config = f"{EXPERIMENT}, device: cpu, data-dir: {tmp_path}, out: {tmp_path / 'runs'}}}"
    file.write_text(f"experiments: {{own: {{config: {config}}}}}")
    table.write_text(table.read_text().replace("age", "years", 1))
    return file


def _run_of(experiment: Path, *changes: str) -> str:
    """Return why the experiment cannot be run, empty where it has ended."""
    settings, _ = plan_run("own", RunSources(file=experiment, changes=changes))
    return refused(lambda: run_inline(settings, 2))


def test_run_without_refusing_site_ends(doctor: Doctor, experiment: Path) -> None:
    run = ["run", "own", "--file", str(experiment)]
    found = doctor(*run)
    assert _statuses(found, "sites", "enough") == ["FAILED", "FAILED"]
    assert "or lower 'run.min-sites' and run without the site" in found["sites"]["fix"]
    assert found["enough"]["fix"] == "fix the others, or set 'run.min-sites' to 1"
    assert "1 of 2 can, but 2 are needed ('run.min-sites')" in _run_of(experiment)
    assert doctor(*run, "--set", "run.min-sites=1")["enough"]["status"] == "PASSED"
    assert _run_of(experiment, "run.min-sites=1") == ""


def test_doctor_with_site_corrected_passes(doctor: Doctor, experiment: Path) -> None:
    run, folder = ["run", "own", "--file", str(experiment)], experiment.parent
    told = doctor(*run)["sites"]["fix"]
    assert told.startswith("fix it at that site, where 'fedsilo doctor site' says more")
    kind, *node = _node(folder, data_dir=str(folder))
    site = [kind, "own", *run[2:], *node]
    found = doctor(*site)["data"]
    assert found["status"] == "FAILED"
    assert "'age'" in found["said"]
    write_tables(folder)
    assert doctor(*site)["data"]["status"] == "PASSED"
    assert _statuses(doctor(*run), "sites", "enough", "method") == ["PASSED"] * 3
