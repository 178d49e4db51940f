"""SuperLink and SuperNodes with TLS and keys, as processes: what they find is the simulation's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from client_app.registry import METHODS
from models.schema import Value
from server_app.cli import main
from server_app.run_directory import RunDirectory

Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
POOLING = {"mix"}  # an oracle: no hospital hands its images out
_FOLDER_NAMES = 300  # bytes


def _deployed(folder: Path, values: dict[str, Value], name: str) -> tuple[int, RunDirectory]:
    config = folder / f"{name}-asked.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    told = ("--config", str(config), "--name", name, "--dir", str(folder))
    code = main(["deploy", "run", "fedavg-digits", *told])
    return code, RunDirectory(folder / "server" / "runs" / name)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - POOLING))
def test_every_final_number_is_the_simulations_to_the_last_bit(
    method: str, folder: Path, sites: int, tiny: Tiny, inline_run: InlineRun
) -> None:
    values = tiny(method, silos=sites)
    code, deployed = _deployed(folder, values, method)
    assert code == 0
    simulated = inline_run(values, sites)
    for name in ("metrics.csv", "model.safetensors"):
        there = [(run.path / name).is_file() for run in (deployed, simulated)]
        assert there[0] == there[1]
        if there[0]:
            assert (deployed.path / name).read_bytes() == (simulated.path / name).read_bytes()
    ours, theirs = (run.read_json("summary.json") for run in (deployed, simulated))
    for key in ("sites", "distributions", "mean", "rounds"):
        assert ours[key] == theirs[key]
    messages = len((deployed.path / "traffic.csv").read_text().splitlines()) - 1
    for way in ("up", "down"):  # a message names folders, which differ here
        assert abs(ours["bytes"][way] - theirs["bytes"][way]) < _FOLDER_NAMES * messages


def test_a_site_keeps_its_state_on_its_own_disk(folder: Path, sites: int) -> None:
    runs = folder / "server" / "runs"
    assert not list(runs.glob("*/sites/*")), "no private state at the server"
    states = {path.parent.name for path in folder.glob("sites/*/state/local/*/*")}
    assert len(states) == sites


def test_no_hospital_hands_its_images_out(
    folder: Path, sites: int, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, directory = _deployed(folder, tiny("mix", silos=sites), "mix")
    assert code == 1
    assert not (directory.path / "summary.json").exists()
    assert "left no summary" in capsys.readouterr().err
