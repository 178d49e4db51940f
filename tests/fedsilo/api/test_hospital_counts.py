import json
from pathlib import Path

import pytest

from fedsilo import hospital_counts as counts
from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.noisy_counts import noisy_counts
from fedsilo.core.errors import EpsilonSpentError, SettingError

EXACT = {"train": [20, 10], "val": [0, 0], "test": [8, 8]}
DATA = {"train": "a" * 64}


def node_config(home: Path, cap: float = 8.0) -> list[str]:
    named = f'site="north" state-dir="{home}" trust="nobody" max-epsilon={cap} counts-noise=4.0'
    return [named]


def ledger(home: Path, cap: float = 8.0) -> Ledger:
    return Ledger(home / ".own" / "north" / LEDGER, cap, 1e-5, of_all_runs=True)


def test_one_command_pays_for_another_draw_which_the_next_run_makes(tmp_path: Path) -> None:
    assert list(counts(node_config=node_config(tmp_path))) == [
        "north: no run has asked for counts yet"
    ]
    assert len(list(counts(node_config=node_config(tmp_path), draw_again=True))) == 1
    bad = noisy_counts(EXACT, DATA, 900.0, ledger(tmp_path))
    (line,) = counts(node_config=node_config(tmp_path))
    assert f"train {sum(bad['train'])}, " in line
    assert "noise 900" in line
    *_, told = counts(node_config=node_config(tmp_path), draw_again=True)
    assert "draws the counts again with noise 4; epsilon" in told
    assert ledger(tmp_path).releases() == {(4.0, 1.0): 1, (900.0, 1.0): 1}
    *_, twice = counts(node_config=node_config(tmp_path), draw_again=True)
    assert "nothing was charged" in twice
    new = noisy_counts(EXACT, DATA, 4.0, ledger(tmp_path))
    assert abs(sum(new["train"]) - 30) < 40
    assert ledger(tmp_path).releases() == {(4.0, 1.0): 1, (900.0, 1.0): 1}


def test_a_draw_above_the_cap_changes_nothing(tmp_path: Path) -> None:
    noisy_counts(EXACT, DATA, 4.0, ledger(tmp_path, 1.5))
    file = tmp_path / ".own" / "north" / "told-counts.json"
    before = json.loads(file.read_text())
    with pytest.raises(EpsilonSpentError):
        list(counts(node_config=node_config(tmp_path, 1.2), draw_again=True))
    assert json.loads(file.read_text()) == before


def test_a_hospital_without_a_cap_has_no_noisy_counts(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="only a hospital with"):
        list(counts(node_config=[f'site="north" state-dir="{tmp_path}" trust="server"']))
