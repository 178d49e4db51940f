"""Checkpoints: the newest whole one counts, another run's is refused."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.state_files import load_state, save_state
from fedsilo.server_app.records.checkpoints import KEPT, CheckpointHook
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.method import State
from tests.support.errors import refuses


@dataclass(frozen=True)
class _State(State):
    iteration: int = 0


def _state(round_: int) -> State:
    return _State({"w": np.full(3, round_, np.float32)}, round_, {"s1a": 100}, iteration=round_)


def _write(folder: Path, rounds: int, seed: int = 1) -> CheckpointHook:
    run = folder.with_name(f"{folder.name}-run")
    run.mkdir(exist_ok=True)
    failures = Recorder(RunDirectory(run))
    hook = CheckpointHook(folder, {"seed": seed}, [failures], _State)
    for round_ in range(1, rounds + 1):
        failures.answer_failed(round_, "train", "s1a", "site", "why")
        hook.round_ended(_state(round_))
    return hook


def test_the_newest_checkpoint_brings_back_state_and_hooks(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    failures = Recorder(RunDirectory(tmp_path))
    found = CheckpointHook(tmp_path, {"seed": 1}, [failures], _State).resume()
    assert found is not None
    assert isinstance(found, _State)
    assert (found.round, found.iteration, found.stateful_sites) == (3, 3, ("s1a",))
    assert found.arrays["w"].tolist() == [3, 3, 3]
    assert [entry["round"] for entry in failures.failures.entries] == [1, 2, 3]


@pytest.mark.parametrize("value", [{1: 0.5}, {"a": {2: 1}}, np.float32(1), np.zeros(2), {1, 2}])
def test_state_that_would_come_back_as_another_is_refused_before_it_is_stored(
    value: Any, tmp_path: Path
) -> None:
    hook = CheckpointHook(tmp_path, {"seed": 1}, [], _State)
    hook.round_ended(replace(_state(1), iteration=("s1a", {"1": [2.5, None]})))
    with refuses(CheckpointError, "iteration"):
        hook.round_ended(replace(_state(2), iteration=value))
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001.safetensors"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["round-000004.safetensors", "round-000005.safetensors"][-KEPT:]


def test_a_checkpoint_cut_short_gives_way_to_the_one_before(tmp_path: Path) -> None:
    hook = _write(tmp_path, 3)
    newest = tmp_path / "round-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-2])
    found = hook.resume()
    assert found is not None
    assert found.round == 2


def test_no_whole_checkpoint_is_an_error_and_none_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    hook = _write(tmp_path / "cut", 2)
    for path in (tmp_path / "cut").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        hook.resume()
    assert CheckpointHook(tmp_path / "empty", {}, []).resume() is None


def test_a_checkpoint_of_another_config_is_refused_and_the_difference_named(
    tmp_path: Path,
) -> None:
    _write(tmp_path, 1)
    with refuses(CheckpointError, 1, 2):
        CheckpointHook(tmp_path, {"seed": 2}, []).resume()


@pytest.mark.parametrize("lacking", ["hooks", "settings", "round", "records", "open"])
def test_checkpoint_of_another_version_is_refused_in_a_line(lacking: str, tmp_path: Path) -> None:
    hook = _write(tmp_path, 1)
    path = tmp_path / "round-000001.safetensors"
    arrays, facts = load_state(path)
    for part in (facts, facts["hooks"], facts["hooks"]["records"]):
        part.pop(lacking, None)
    save_state(path, arrays, facts)
    with pytest.raises(
        CheckpointError, match="was written by another version of fedsilo"
    ) as refused:
        hook.resume()
    assert "\n" not in str(refused.value)


def test_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    hook = _write(tmp_path, 1)
    (tmp_path / "round-000001.safetensors").rename(tmp_path / "round-000009.safetensors")
    with pytest.raises(CheckpointError, match="holds round 1: start a new run"):
        hook.resume()
