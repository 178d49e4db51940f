"""Many short runs: what is kept, in which order it comes back, and what a failure leaves."""

import json
import multiprocessing
from pathlib import Path

import pytest

from fedsilo.comparison import trials
from fedsilo.comparison.trials import Trial, run_trials
from fedsilo.core.errors import RunFailedError
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from tests.support.run_files import summary
from tests.support.setting_keys import as_keys

LOCAL: dict[str, Value] = {
    "method": "local",
    "dataset": "heart-synthetic",
    "rounds": 1,
    "train.local-steps": 1,
    "server.evaluate-every": 0,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}


def _trial(**changes: Value) -> Trial:
    named = as_keys(changes)
    return Trial(resolve(LOCAL | named), named, "data")


def test_a_key_depends_on_what_decides_the_result_and_on_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = _trial(seed=1).key()
    settings = resolve(LOCAL | {"seed": 1})
    assert key == Trial(settings, {"other": "label"}, "data").key()
    assert key == _trial(seed=1, out="/elsewhere", run_name="x", reply_timeout=1.0).key()
    assert key == _trial(seed=1, data_dir="/other/data").key(), "what lies there is what counts"
    others = [
        _trial(seed=2),
        _trial(seed=1, learning_rate=0.5),
        _trial(seed=1, use_test=False, val_folds=2),
        _trial(seed=1, method="fedavg"),
        Trial(settings, {"seed": 1}, "other data"),
    ]
    assert len({key, *(trial.key() for trial in others)}) == 6
    monkeypatch.setattr(trials, "git_revision", lambda: "another version")
    assert _trial(seed=1).key() != key


def test_summaries_that_are_there_come_back_in_the_order_of_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> str:
        raise AssertionError("a trial that has a summary was run")

    monkeypatch.setattr(trials, "_run_trial", never)
    wanted = [_trial(seed=seed) for seed in (3, 1, 2, 1)]
    for trial in wanted:
        (tmp_path / f"{trial.key()}.json").write_text(json.dumps(summary(**trial.label)))
    assert [found["seed"] for found in run_trials(wanted, tmp_path, 2)] == [3, 1, 2, 1]
    assert multiprocessing.active_children() == []


def test_a_failing_trial_is_told_by_its_label_and_what_is_finished_stays(tmp_path: Path) -> None:
    """Of a plug's network, which a worker process knows too."""
    file = tmp_path / "rows.py"
    file.write_text(
        "from math import prod\n"
        "from torch import nn\n"
        "def build(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))\n"
    )
    plug: dict[str, Value] = {"plugin": str(file), "network.name": "rows:build"}
    points: list[dict[str, Value]] = [{"seed": 1}, {"seed": 2, "privacy.sums-min-count": 31}]
    good, bad = (Trial(resolve(LOCAL | plug | point), point, "data") for point in points)
    folder = tmp_path / "trials"
    point = r"\{'seed': 2, 'privacy.sums-min-count': 31\}"
    told = rf"trial {point} failed: .*site switzerland sends no sums"
    with pytest.raises(RunFailedError, match=told):
        run_trials([good, bad], folder, 1)
    assert [path.name for path in folder.iterdir()] == [f"{good.key()}.json"]
    before = (folder / f"{good.key()}.json").stat().st_mtime_ns
    (summary,) = run_trials([good], folder, 1)
    assert summary["mean"]
    assert list(summary["sites"]) == ["cleveland", "hungary", "switzerland", "va"]
    assert (folder / f"{good.key()}.json").stat().st_mtime_ns == before


def test_as_many_runs_at_once_as_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "cores", lambda: 6)
    assert [trials.runs_at_once(0, threads) for threads in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert trials.runs_at_once(3, 2) == 3
