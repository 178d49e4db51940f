from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS, settings_class
from fedsilo.models.contract.settings_schema import defaults, without_groups
from fedsilo.server_app.cli.main import main
from fedsilo.server_app.config.experiments import read_experiments
from fedsilo.server_app.config.old_keys import key_of_today, new_keys, overlaid, with_new_keys
from fedsilo.server_app.config.settings import (
    flat_values,
    grouped,
    known_defaults,
    read_toml,
    resolve,
)


@pytest.mark.parametrize("method", METHODS)
def test_every_old_key_of_a_method_means_its_new_one(method: str) -> None:
    own = settings_class(method)()
    values, lines = with_new_keys({"method": method, **without_groups(own)})
    assert values == {"method": method, **defaults(type(own))}
    assert len(lines) == len(defaults(type(own)))
    assert new_keys(method).keys() == without_groups(own).keys()


def test_an_old_key_works_and_says_its_new_one() -> None:
    values, lines = with_new_keys({"method": "uefl", "gamma": 0.5, "rounds": 30})
    assert values == {"method": "uefl", "uefl.gamma": 0.5, "rounds": 30}
    assert lines == ["setting 'gamma' is now 'uefl.gamma'; the old key works for one release"]
    assert resolve({"gamma": 0.5}).own.gamma == resolve({"uefl.gamma": 0.5}).own.gamma == 0.5


def test_two_methods_may_have_had_the_same_old_key() -> None:
    for method in ("fedproto", "feddistill"):
        values, _ = with_new_keys({"method": method, "class-min-count": 3})
        assert values == {"method": method, f"{method}.class-min-count": 3}
    assert key_of_today("class-min-count") == "class-min-count", "whose is not known"
    assert key_of_today("gamma") == key_of_today("uefl.gamma") == "uefl.gamma"


def test_an_old_and_a_new_key_with_different_values_are_refused_in_one_line() -> None:
    said = (
        "settings 'gamma' (0.5) and 'uefl.gamma' (0.2) are one setting under its old and its new "
        "key: remove 'gamma'"
    )
    with pytest.raises(SettingError, match=re.escape(said)):
        resolve({"gamma": 0.5, "uefl.gamma": 0.2})
    assert resolve({"gamma": 0.5, "uefl.gamma": 0.5}).own.gamma == 0.5


def test_the_mend_that_the_error_names_mends_it() -> None:
    assert resolve({"uefl.gamma": 0.2}).own.gamma == 0.2


def test_a_later_source_wins_whichever_key_it_uses() -> None:
    values, lines = overlaid({"method": "uefl", "uefl.gamma": 0.2}, {"gamma": 0.5}, {"rounds": 31})
    assert values == {"method": "uefl", "uefl.gamma": 0.5, "rounds": 31}
    assert len(lines) == 1


def test_an_old_key_of_an_experiment_goes_over_its_bases_new_one(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n  a: {config: {method: uefl, uefl: {gamma: 0.2, codes: 8}}}\n"
        "  b: {base: a, config: {gamma: 0.5}}\n"
    )
    own = resolve(read_experiments(file)["b"].values).own
    assert (own.gamma, own.codes) == (0.5, 8)


def test_a_group_that_no_method_has_is_refused_with_the_groups_that_there_are() -> None:
    with pytest.raises(SettingError, match=r"no method has a group 'uelf' .*'uefl.gamma'") as error:
        resolve({"uelf.gamma": 0.2})
    assert "\n" not in str(error.value)
    with pytest.raises(SettingError, match=r"unknown setting 'uefl.gama'; did you mean 'uefl.gamm"):
        resolve({"uefl.gama": 0.2})


def test_another_methods_group_is_refused() -> None:
    with pytest.raises(SettingError, match=r"'uefl\.gamma' is not one of method 'fedavg'"):
        resolve({"method": "fedavg", "uefl.gamma": 0.7})


def test_groups_are_tables_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "uefl"\n[uefl]\ngamma = 0.5\n')
    assert read_toml(file) == {"method": "uefl", "uefl.gamma": 0.5}
    assert grouped({"rounds": 3, "uefl.gamma": 0.5}) == {"rounds": 3, "uefl": {"gamma": 0.5}}
    assert flat_values(grouped(known_defaults()), "") == known_defaults()


def test_a_run_directory_of_before_is_resumed_plotted_and_explained(
    inline_run: Callable[..., Any],
    tiny: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its config.toml has flat keys, and so have its checkpoints."""
    values = tiny("uefl", rounds=3)
    whole = inline_run(values)
    path = whole.path / "config.toml"
    text = path.read_text()
    tables, own = text.split("[uefl]\n")[0], text.split("[uefl]\n")[1].split("\n\n[")[0]
    rest = text.split("[uefl]\n")[1].partition("\n\n[")[2]
    launch = tables.index("[launch]") if "[launch]" in tables else len(tables)
    path.write_text(f"{own}\n{tables[:launch]}{tables[launch:]}\n[{rest}")
    metrics = (whole.path / "metrics.csv").read_bytes()
    (whole.path / "summary.json").unlink()
    newest = sorted(whole.checkpoints.glob("*"))[-1]
    newest.unlink()
    assert main(["resume", str(whole.path), "--engine", "inline"]) == 0
    assert (whole.path / "metrics.csv").read_bytes() == metrics
    assert main(["plot", str(whole.path)]) == 0
    assert main(["explain", str(whole.path), "--site", "s1a", "--row", "0"]) == 0
    assert "now" not in capsys.readouterr().err, "nobody is told of a key that nobody wrote"
