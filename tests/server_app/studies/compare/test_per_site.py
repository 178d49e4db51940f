"""Bars by site: what they are of, how they are drawn, what is refused; runs written by hand."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.server_app.cli.main import main
from fedsilo.server_app.config.settings import RUN_FORMAT
from fedsilo.server_app.studies.compare.per_site import SiteBars, draw_bars, site_bars
from tests.support.run_files import SILO, SUMMARY

Rows = list[tuple[int, str, str, str, float]]
Write = Callable[..., Path]
GROUPS = {"s1a": "D1", "s1b": "D1", "s2a": "D2"}


def rows(accuracy: float, entropy: float = 1.0) -> Rows:
    """Return test accuracies of two rounds: in the second it is as given, less at later sites."""
    figures = [("accuracy", accuracy), ("entropy", entropy)]
    return [
        (round_, site, "test", metric, value * round_ / 2 - place / 100)
        for round_ in (1, 2)
        for place, site in enumerate(GROUPS)
        for metric, value in figures
    ]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(name: str, measured: Rows, groups: dict[str, str] = GROUPS, **settings: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        keys = {"format": RUN_FORMAT, "method": "fedavg", "seed": 0, **settings}
        config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        (folder / "config.toml").write_text(config)
        silos = {site: SILO | {"distribution": group} for site, group in groups.items()}
        (folder / "silos.json").write_text(json.dumps(silos))
        with (folder / "metrics.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("round", "site", "split", "metric", "value"), *measured])
        figures = {"accuracy": 0.0, "entropy": 0.0}
        summary = SUMMARY | {
            "rounds": 2,
            "mean": figures,
            "validation": {"mean": figures, "distributions": {}},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return write


def values(bars: SiteBars, experiment: str, metric: str = "accuracy") -> dict[str, float]:
    table = bars.table
    chosen = table[(table["experiment"] == experiment) & (table["metric"] == metric)]
    return dict(zip(chosen["site"], chosen["mean"], strict=True))


def test_a_bar_is_the_mean_over_seeds_of_a_site(written: Write) -> None:
    folders = [written("a-seed0", rows(0.8)), written("a-seed1", rows(0.6), seed=1)]
    bars = site_bars([*folders, written("b-seed0", rows(0.5), method="local")])
    assert values(bars, "a") == pytest.approx({"s1a": 0.7, "s1b": 0.69, "s2a": 0.68})
    assert values(bars, "b") == pytest.approx({"s1a": 0.5, "s1b": 0.49, "s2a": 0.48})
    a = bars.table[bars.table["experiment"] == "a"]
    assert a["sd"].tolist() == pytest.approx([*[0.02**0.5] * 3, 0, 0, 0])
    assert set(a["seeds"]) == {2}
    assert bars.title == "digits, test samples, the last round"


def test_metrics_come_in_the_order_asked_for(written: Write) -> None:
    run = written("a-seed0", rows(0.8))
    assert list(site_bars([run]).table["metric"].unique()) == ["accuracy", "entropy"]
    asked = site_bars([run], metrics="entropy,acc*").table
    assert list(asked["metric"].unique()) == ["entropy", "accuracy"]
    with pytest.raises(SettingError, match="unknown metric 'acc'; did you mean 'accuracy'"):
        site_bars([run], metrics="acc")


def test_runs_without_any_usual_metric_are_told_which_there_are(written: Write) -> None:
    masks = written("m-seed0", [(2, site, "test", "dice", 0.5) for site in GROUPS])
    with pytest.raises(SettingError, match="unknown metric 'accuracy': known are dice"):
        site_bars([masks])
    assert set(site_bars([masks], metrics="dice").table["metric"]) == {"dice"}


def test_a_run_for_sums_has_no_figures_by_site(written: Write) -> None:
    run = written("sums-seed0", [(2, "all", "test", "accuracy", 0.5)])
    with pytest.raises(SettingError, match="no run has test figures by site, only of all sites"):
        site_bars([run])


def test_a_round_is_that_asked_for_and_must_have_been_measured(written: Write) -> None:
    run = written("a-seed0", rows(0.8))
    first = site_bars([run], round_=1)
    assert values(first, "a")["s1a"] == pytest.approx(0.4)
    assert first.title == "digits, test samples, round 1"
    with pytest.raises(SettingError, match="no test figures of round 3; it has those of 1, 2"):
        site_bars([run], round_=3)
    with pytest.raises(SettingError, match="no val figures of round 2; it has those of none"):
        site_bars([run], split="val")


def test_each_sites_own_model_stands_beside_the_average_on_validation_samples(
    written: Write,
) -> None:
    measured: Rows = [
        (2, site, "val", metric, value)
        for site in GROUPS
        for metric, value in (("accuracy", 0.5), ("trained-accuracy", 0.9))
    ]
    run = written("a-seed0", [*rows(0.8), *measured])
    bars = site_bars([run], own=True)
    assert values(bars, "a") == dict.fromkeys(GROUPS, 0.5)
    assert values(bars, "a, own") == dict.fromkeys(GROUPS, 0.9)
    assert bars.title == "digits, val samples, the last round"
    assert list(site_bars([run], split="val").table["experiment"].unique()) == ["a"]


@pytest.mark.parametrize(
    ("name", "groups", "settings", "told"),
    [
        ("b-seed0", {"s1a": "D1"}, {}, "is of other data or sites than"),
        ("b-seed0", {**GROUPS, "s2a": "D3"}, {}, "is of other data or sites than"),
        ("b-seed0", GROUPS, {"dataset": "mnist"}, "is of other data or sites than"),
        ("more/a-seed0", GROUPS, {}, "has the same name and seed as"),
        ("a-seed1", GROUPS, {"seed": 1, "width": 4}, "width is 16 there and 4 here"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    written: Write, name: str, groups: dict[str, str], settings: dict[str, Any], told: str
) -> None:
    folders = [written("a-seed0", rows(0.8)), written(name, rows(0.6), groups, **settings)]
    with pytest.raises(RunDirectoryError, match=told):
        site_bars(folders)


def test_figures_of_a_site_that_the_run_does_not_know_are_refused(written: Write) -> None:
    run = written("a-seed0", [*rows(0.8), (2, "-1e999", "test", "accuracy", 0.5)])
    with pytest.raises(RunDirectoryError, match=r"of site '-1e999', which silos\.json does"):
        site_bars([run])


def test_bars_stand_side_by_side_below_the_names_of_their_distributions(written: Write) -> None:
    lacking = [row for row in rows(0.5) if row[1] != "s1b"]
    folders = [written("a-seed0", rows(0.8)), written("b-seed0", lacking)]
    accuracy, entropy = draw_bars(site_bars(folders)).axes
    a, b = (container.patches for container in accuracy.containers)
    assert [bar.get_height() for bar in a] == pytest.approx([0.8, 0.79, 0.78])
    assert b[0].get_height() == pytest.approx(0.5)
    assert b[1].get_height() != b[1].get_height(), "no figure, no bar"
    centres = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in (a, b)]
    assert [sum(pair) / 2 for pair in zip(*centres, strict=True)] == pytest.approx([0, 1, 2])
    assert {text.get_text(): text.xy[0] for text in accuracy.texts} == {"D1": 0.5, "D2": 2.0}
    assert entropy.get_ylabel() == "entropy (nats)"
    assert [label.get_text() for label in entropy.get_xticklabels()] == list(GROUPS)


def test_hospitals_that_are_a_distribution_each_are_named_once(written: Write) -> None:
    own = {site: site for site in GROUPS}
    axes = draw_bars(site_bars([written("a-seed0", rows(0.8), own)])).axes[0]
    assert not axes.texts


def test_the_command_writes_picture_and_numbers(
    written: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(written("a-seed0", rows(0.8)))
    picture, numbers = tmp_path / "bars.png", tmp_path / "bars.csv"
    options = ["--metrics", "accuracy", "--picture", str(picture), "--csv", str(numbers)]
    assert main(["bars", run, *options]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert numbers.read_text().splitlines()[:2] == [
        "metric,experiment,site,distribution,mean,sd,seeds",
        "accuracy,a,s1a,D1,0.800000,0.000000,1",
    ]
    assert main(["bars", run, "--round", "-1"]) == 1
    assert (
        capsys.readouterr().err == "fedsilo: error[setting]: --round is -1; it must be at least 0\n"
    )
