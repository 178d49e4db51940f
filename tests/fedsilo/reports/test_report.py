"""Reports of whole runs: what each reader finds in them, the same bytes, and what is refused."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

import fedsilo
from fedsilo.api.options import Reader
from fedsilo.cli.main import main
from fedsilo.comparison.results import summaries_by_seed
from fedsilo.core.errors import DataError, FedsiloError, RunDirectoryError, SettingError
from fedsilo.reports import research_comparison
from fedsilo.reports.dpo import dpo_data
from fedsilo.reports.report import (
    READERS,
    report,
)
from fedsilo.reports.research import _lines, research_data
from fedsilo.reports.research_comparison import _best_experiment, _mean
from fedsilo.reports.run_facts import reported_runs, result
from fedsilo.reports.watch.run_folder import look_for
from fedsilo.reports.watch.web.app import WatchPages


def _copy(run: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(run, to)
    path = to / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to


@pytest.mark.parametrize("reader", READERS)
def test_the_same_run_has_the_same_report_wherever_it_lies(
    reader: str, hearts: Path, tmp_path: Path
) -> None:
    run = hearts / "fedavg-seed0"
    moved = shutil.copytree(run, tmp_path / "elsewhere" / run.name)
    first = report([run], reader)
    assert report([moved], reader) == first
    assert str(hearts) not in first
    for forbidden in ("<script", "http://", "https://", "@import", "url(http"):
        assert forbidden not in first.replace("http://www.w3.org/", ""), "but names of formats"


def test_research_finds_settings_curves_tests_and_cost(hearts: Path) -> None:
    html = report([hearts])
    summary = json.loads((hearts / "fedavg-seed0" / "summary.json").read_text())
    assert '<th scope="row">fedavg-seed1</th>' in html
    assert "Settings that differ between runs" in html
    assert html.count("<svg") >= 3 + 1
    assert "one-way ANOVA F(1, 2)" in html
    assert "paired by seed" in html
    assert f"{summary['bytes']['up'] / 1000:.3g} kB" in html


def test_one_run_is_compared_with_nothing(hearts: Path) -> None:
    html = report([hearts / "local-seed0"])
    assert "Comparison" not in html
    assert "bars: 95 %" not in html


def test_runs_of_one_name_that_differ_in_more_than_the_seed_stand_apart(
    hearts: Path, private: Path, tmp_path: Path
) -> None:
    shutil.copytree(hearts / "fedavg-seed0", tmp_path / "one" / "fedavg-seed0")
    shutil.copytree(private, tmp_path / "two" / "fedavg-seed0")
    html = report([tmp_path / "one", tmp_path / "two"])
    assert "one/fedavg-seed0" in html
    assert "two/fedavg-seed0" in html
    assert "Each experiment has one seed" in html


def test_the_clinic_finds_what_is_found_and_missed_with_intervals(hearts: Path) -> None:
    html = report([hearts / "fedavg-seed0"], "clinic")
    metrics = _final(hearts / "fedavg-seed0", "va")
    silos = json.loads((hearts / "fedavg-seed0" / "silos.json").read_text())
    samples = silos["va"]["label_counts"]["test"][1]
    assert html.count("Not for clinical use") >= 3, "contents, heading and foot"
    assert f"{metrics['class.1.right'] / samples:.3f} (" in html
    assert "Wilson" in html
    assert "Every site answered every message." in html


def test_a_run_that_recorded_no_counts_says_so_and_has_the_rest(
    hearts: Path, tmp_path: Path
) -> None:
    run = _copy(hearts / "fedavg-seed0", tmp_path / "old")
    rows = (run / "metrics.csv").read_text().splitlines()
    families = (",class.", ",confidence.", ",uncertainty.")
    kept = [row for row in rows if not any(family in row for family in families)]
    (run / "metrics.csv").write_text("\n".join(kept) + "\n")
    html = report([run], "clinic")
    assert "did not record counts by class" in html
    assert "did not record how often the model is right" in html
    assert "balanced accuracy" in html


@pytest.mark.parametrize("reader", READERS)
def test_a_site_that_failed_is_named_with_its_reason(
    reader: str, hearts: Path, tmp_path: Path
) -> None:
    failed = {"round": 2, "phase": "train", "site": "va", "reason": "no <answer> in time"}
    run = _copy(hearts / "local-seed1", tmp_path / "run", failures=[failed], stopped="it is <over>")
    html = report([run], reader)
    assert "no &lt;answer&gt; in time" in html
    assert "it is &lt;over&gt;" in html


def test_data_protection_finds_bytes_and_no_guarantee(hearts: Path) -> None:
    html = report([hearts / "fedavg-seed0"], "dpo")
    assert "no differential-privacy guarantee" in html
    assert "arrays/encoder.*" in html
    assert "no site file applied" in html
    assert "models stayed at the sites" in report([hearts / "local-seed0"], "dpo")


def test_data_protection_hides_how_many_metrics_of_classes_a_site_with_few_samples_sent(
    hearts: Path,
) -> None:
    (run,) = reported_runs([hearts / "fedavg-seed0"])
    found = dpo_data(run, None)
    place = found["measurement_columns"].index("switzerland")
    cells = {row[0]: row[place] for row in found["measurements"]}
    assert cells["auc"].startswith("up to ")
    assert cells["class"].startswith("up to ")
    assert cells["accuracy"].isdigit(), "each split has one"
    assert "norm" not in cells, "the server computes it"
    assert "up to" not in " ".join(
        row[found["measurement_columns"].index("va")] for row in found["measurements"]
    )
    sent = {row[0]: row[2:-1] for row in found["bytes"]}
    assert all(cell.startswith("up to ") for cell in sent["switzerland"])
    most = max(int(row["bytes_up"]) for row in run.traffic_rows if row["phase"] == "evaluate")
    assert sent["switzerland"][2] == f"up to {most / 1000:.3g} kB"
    assert not any("up to" in cell for cell in sent["va"])


def test_data_protection_of_one_site_has_no_bound_that_is_its_own_number(
    hearts: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(hearts / "fedavg-seed0", tmp_path / "run")
    silos = json.loads((run / "silos.json").read_text())
    (run / "silos.json").write_text(json.dumps({"switzerland": silos["switzerland"]}))
    for name, place in (("metrics.csv", 1), ("traffic.csv", 2)):
        first, *rows = (run / name).read_text().splitlines()
        own = [row for row in rows if row.split(",")[place] == "switzerland"]
        assert own
        (run / name).write_text("\n".join([first, *own]) + "\n")
    (reported,) = reported_runs([run])
    found = dpo_data(reported, None)
    names = {row[0] for row in found["measurements"]}
    assert "accuracy" in names
    assert not names & {"auc", "balanced-accuracy", "class"}
    assert set(found["bytes"][0][2:-1]) == {"not shown"}
    assert found["head"]["result"].endswith(" messages; sent: not shown.")


def test_data_protection_finds_epsilon(private: Path) -> None:
    html = report([private], "dpo")
    spent = json.loads((private / "privacy.json").read_text())["guarantee"]["sites"]["va"]
    (shown,) = re.findall(
        r">va</th>\s*<td class=\"number\">([0-9.]+)</td>\s*</tr>\s*</tbody>", html
    )
    assert 0 < spent <= float(shown) < spent + 0.011, "a bound is never rounded down"
    assert "no differential-privacy guarantee" not in html


def test_epsilon_is_of_all_that_left_only_where_nobody_is_trusted(
    private: Path, tmp_path: Path
) -> None:
    html = report([private], "dpo")
    assert "covers all that the site sent" not in html
    assert "Nothing bounds what that reveals" in html
    assert "epsilon that the site has spent" in html
    run = shutil.copytree(private, tmp_path / "nobody")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('trust = "server"', 'trust = "nobody"'))
    summary = json.loads((run / "summary.json").read_text())
    summary["privacy"]["trust"]["level"] = "nobody"
    (run / "summary.json").write_text(json.dumps(summary))
    assert "covers all that the site sent" in report([run], "dpo")


def test_a_hospital_adds_its_own_log_and_site_file(hearts: Path, tmp_path: Path) -> None:
    log, site_file = tmp_path / "audit.jsonl", tmp_path / "site.yaml"
    lines = [_line("fedavg-seed0", "answered"), _line("fedavg-seed0", "refused"), _line("x", "")]
    log.write_text("\n".join([*map(json.dumps, lines), '{"time": "2026-']) + "\n")
    site_file.write_text("methods: [fedavg]\ndatasets: ['*']\nrecords: ['*']\nmax-rounds: 7\n")
    html = report([hearts / "fedavg-seed0"], "dpo", audit_log=log, site_file=site_file)
    assert "2 messages of this run" in html
    assert "1 answered, 1 refused" in html
    assert "1 lines of the log are cut short" in html
    assert "arrays/head.*" in html
    assert "the hospital&#39;s word" in html
    assert "max-rounds" in html


def _line(run: str, outcome: str) -> Mapping[str, Any]:
    answered = outcome == "answered"
    return {
        "time": "2026-11-21T15:44:20.789Z",
        "site": "va",
        "run": run,
        "run-id": 1,
        "kind": "train",
        "method": "fedavg",
        "dataset": "table",
        "round": 1,
        "phase": "train",
        "outcome": outcome,
        "why": "" if answered else "the hospital's word",
        "records": {"arrays/head.*": 4} if answered else {},
        "bytes-in": 100,
        "bytes-out": 200,
    }


def _final(run: Path, site: str) -> dict[str, float]:
    rows = [row.split(",") for row in (run / "metrics.csv").read_text().splitlines()[1:]]
    return {row[3]: float(row[4]) for row in rows if row[:3] == ["2", site, "test"]}


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"audit_log": "log"}, SettingError, "--audit-log belongs to .*--for dpo"),
        ({"site_file": "file"}, SettingError, "--site-file belongs to .*--for dpo"),
        ({"by": ["age"]}, SettingError, "--by and --decisions belong to .*--for clinic"),
        ({"reader": "nurse"}, SettingError, "'reader' must be one of research, clinic, dpo"),
        ({"reader": "dpo", "audit_log": "no"}, DataError, "audit log no cannot be read"),
        ({"reader": "dpo", "site_file": "no"}, DataError, "site file no cannot be read"),
    ],
)
def test_what_a_hospital_lays_beside_must_be_its_file_and_for_data_protection(
    asked: dict[str, Any], error: type[FedsiloError], told: str, hearts: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        fedsilo.report([hearts / "fedavg-seed0"], tmp_path / "page.html", **asked)
    assert not list(tmp_path.iterdir())


def test_a_report_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no run is named"):
        fedsilo.report([], tmp_path / "page.html")


def test_the_command_offers_the_readers_that_have_a_page() -> None:
    assert get_args(Reader) == READERS


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no line of an audit log"),
        ("[1]\n", "line 1 is not a line of an audit log"),
        ('{"time": 3}\n', "line 1 is not a line of an audit log"),
        (
            json.dumps(_line("other", "answered")),
            "no message of run 'fedavg-seed0', only of: other",
        ),
    ],
)
def test_a_file_that_is_no_log_of_the_run_is_refused(
    content: str, told: str, hearts: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(content)
    with pytest.raises(DataError, match=told):
        report([hearts / "fedavg-seed0"], "dpo", audit_log=log)


def test_a_site_file_that_cannot_be_used_is_refused(hearts: Path, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("methods: [fedavgg]\n")
    with pytest.raises(DataError, match=r"site\.yaml cannot be used: .*fedavg"):
        report([hearts / "fedavg-seed0"], "dpo", site_file=path)


def test_a_folder_without_a_finished_run_is_refused(hearts: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory and does not contain one"):
        report([tmp_path])
    unfinished = shutil.copytree(hearts / "local-seed0", tmp_path / "run")
    (unfinished / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match="has not ended: continue it by 'fedsilo resume"):
        report([unfinished])


def test_the_command_writes_whole_files_and_overwrites_only_when_told(
    hearts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "page.html", str(hearts / "local-seed0")
    assert main(["report", run, "--out", str(out)]) == 0
    first = out.read_text()
    assert first.endswith("</html>\n")
    assert main(["report", run, "--for", "clinic", "--out", str(out)]) == 1
    assert "exists: choose another --out, or say --overwrite" in capsys.readouterr().err
    assert out.read_text() == first
    assert main(["report", run, "--for", "clinic", "--out", str(out), "--overwrite"]) == 0
    assert out.read_text() != first
    with pytest.raises(SettingError, match="is a folder"):
        fedsilo.report([hearts / "local-seed0"], tmp_path)


@pytest.mark.parametrize("reader", READERS)
def test_page_names_data_method_version_and_its_result_first(reader: str, hearts: Path) -> None:
    html = report([hearts / "fedavg-seed0"], reader)
    head = html[html.index('class="head"') :]
    for said in ("which of: healthy, disease", "heart-synthetic (made up", "FedAvg (fedavg)"):
        assert said in head
    assert "fedsilo 0.1.0, git revision of the run" in head
    assert " UTC, seed 0" in head
    assert re.search(r"switzerland [0-9a-f]{12}", head), "a fingerprint of each site's data"
    assert html.index('class="head"') < html.index("<table"), "before all tables"
    if reader == "clinic":
        assert re.search(
            r"Predictions are right for \d+ of \d+ test patients of \d of \d hospitals: [\d.]+ %",
            head,
        )
        assert "The data are made up" in head


def test_research_of_several_runs_draws_paired_differences_and_cost(hearts: Path) -> None:
    html = report([hearts])
    assert re.search(r"test accuracy, mean over 3 of 4 sites, without switzerland: \w+, 0", html)
    assert "Paired differences, points: seeds. local - fedavg: " in html
    assert "accuracy against cost, one point per run." in html


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (((0.9, 0.91), (0.5, 0.52)), r"Highest test accuracy.*: b, 0\.905 .*; the next is a.*p = "),
        (((0.9, 0.5), (0.52, 0.89)), r"No clear best test accuracy.*which may be chance \(p = "),
        (((0.9,), (0.5,)), r"Highest test accuracy.*No test can tell whether this is more than"),
    ],
)
def test_an_experiment_is_the_best_only_if_a_test_tells_it_from_the_next(
    values: tuple[tuple[float, ...], ...], said: str, hearts: Path
) -> None:
    summaries: dict[str, dict[int, dict[str, Any]]] = {}
    for name, of_experiment in zip("ba", values, strict=True):
        summaries[name] = {}
        for seed, value in enumerate(of_experiment):
            summaries[name][seed] = {"mean": {"accuracy": value}, "lacking": {}, "site_count": 4}
    runs = reported_runs([hearts])
    assert re.fullmatch(f"{said}.*", _best_experiment(runs, summaries, "test"))


def test_the_least_error_is_the_best_and_its_interval_may_pass_1(
    hearts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(research_comparison, "_headline", lambda runs: ["mae"])
    summaries: dict[str, dict[int, dict[str, Any]]] = {}
    for name, errors in {"a": (5.0, 5.2), "b": (3.1, 3.0)}.items():
        summaries[name] = {}
        for seed, value in enumerate(errors):
            summaries[name][seed] = {"mean": {"mae": value}, "lacking": {}, "site_count": 4}
    said = _best_experiment(reported_runs([hearts]), summaries, "test")
    # The half width of an interval of two values is 12.71 times half of their distance
    assert said.startswith("Lowest test mae, mean over sites: b, 3.050 (2.415 to 3.685) over 2")


@pytest.mark.parametrize(
    ("metric", "low", "high"),
    [("accuracy", -1.0, 1.0), ("mae", -1.0706, 1.4706), ("r2", -1.0706, 1.4706)],
)
def test_the_interval_of_a_difference_is_within_the_range_of_its_metric(
    metric: str, low: float, high: float
) -> None:
    found = _mean(metric, (0.1, 0.3), difference=True).interval
    assert found
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_the_row_all_names_the_sites_that_it_leaves_out(hearts: Path) -> None:
    (run,) = reported_runs([hearts / "fedavg-seed0"])
    (final,) = research_data([run])["final"]
    assert "over 3 of 4 sites, without switzerland" in final["note"]
    named = final["note"].partition(" is the mean")[0].removeprefix("'all' of ").split(", ")
    for place, metric in enumerate(final["columns"][1:], 1):
        cells = {row[0]: row[place] for row in final["rows"]}
        hospitals = [row["metric"] for row in run.metric_rows if row["metric"] == metric]
        assert hospitals
        assert (cells["switzerland"] == "n/a") == (metric in named)
        known = [of_site[metric] for of_site in run.summary["sites"].values() if metric in of_site]
        assert cells["all"] == f"{sum(known) / len(known):.3f}"


def _without_last_metrics(run: Path, site: str) -> None:
    """Leave a run as if a site had not answered the last evaluation."""
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    del summary["sites"][site], summary["distributions"][site]
    path.write_text(json.dumps(summary))
    rows = (run / "metrics.csv").read_text().splitlines()
    kept = [row for row in rows if not row.startswith(f"{summary['rounds']},{site},test,")]
    (run / "metrics.csv").write_text("\n".join(kept) + "\n")


def test_means_of_runs_are_over_the_sites_that_every_run_has(hearts: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    shutil.copytree(hearts, both)
    _without_last_metrics(both / "fedavg-seed1", "va")
    found = research_data(reported_runs([both]))
    sites = ("cleveland", "hungary", "switzerland")
    for of, method in zip(found["final"], ("fedavg", "local"), strict=True):
        by_seed = [_final(both / f"{method}-seed{seed}", site) for seed in (0, 1) for site in sites]
        entropy = sum(metrics["entropy"] for metrics in by_seed) / len(by_seed)
        place = of["columns"].index("calibration-error")
        error = sum(metrics["calibration-error"] for metrics in by_seed) / len(by_seed)
        assert of["rows"][-1][place].startswith(f"{error:.3f} ")
        curve = next(one.alt for one in found["curves"] if "entropy" in one.alt)
        assert f"{method} {entropy:.3f}" in curve
    rows = found["final"][0]["rows"]
    assert [row[0] for row in rows] == [*sites, "va", "all"]
    assert rows[-2][1].endswith(" (1 of 2 seeds)"), "a site's own row has what there is of it"


def test_a_site_that_took_no_part_in_one_run_is_in_no_mean_and_in_no_round_of_a_curve(
    hearts: Path, tmp_path: Path
) -> None:
    both = shutil.copytree(hearts, tmp_path / "both")
    _without_last_metrics(both / "fedavg-seed1", "va")
    path = both / "fedavg-seed1" / "silos.json"
    silos = json.loads(path.read_text())
    path.write_text(json.dumps({site: silos[site] for site in silos if site != "va"}))
    runs = reported_runs([both])
    found = summaries_by_seed([run.experiment for run in runs], runs, "test")
    for run in runs:
        ends = [run.summary["sites"][site]["entropy"] for site in silos if site != "va"]
        mean = found[run.experiment][run.summary["seed"]]["mean"]
        assert mean["entropy"] == pytest.approx(sum(ends) / 3)
    begun = [
        float(row["value"])
        for run in runs
        for row in run.metric_rows
        if (run.experiment, row["round"], row["split"], row["metric"])
        == ("fedavg", "0", "test", "entropy")
        and row["site"] != "va"
    ]
    assert _lines(runs, "entropy", "test")["fedavg"][0] == pytest.approx(sum(begun) / 6)


def test_runs_of_other_sites_keep_their_figures(hearts: Path, finished: Path) -> None:
    runs = reported_runs([hearts / "fedavg-seed0", finished / "fedavg"])
    found = research_data(runs)
    for run, of in zip(runs, found["final"], strict=True):
        accuracy = run.summary["mean"]["accuracy"]
        assert of["rows"][-1][of["columns"].index("accuracy")] == f"{accuracy:.3f}"
    assert "fedavg-seed0" in found["curves"][0].alt


def test_guessing_is_compared_at_the_sites_that_measured(hearts: Path, tmp_path: Path) -> None:
    shutil.copytree(hearts / "fedavg-seed0", tmp_path / "run")
    _without_last_metrics(tmp_path / "run", "switzerland")
    _without_last_metrics(tmp_path / "run", "va")
    (run,) = reported_runs([tmp_path / "run"])
    assert "193 test patients of 2 of 4 hospitals" in result(run)
    assert f"'healthy' for everybody would be right for {112 / 193:.1%}".replace(
        "%", " %"
    ) in result(run)


def test_a_run_without_test_samples_is_not_said_to_be_measured(
    finished: Path, tmp_path: Path
) -> None:
    run = _copy(finished / "fedavg", tmp_path / "run", sites={}, mean={}, distributions={})
    silos = json.loads((run / "silos.json").read_text())
    for silo in silos.values():
        silo["sizes"]["test"] = 0
        silo["label_counts"] = {split: [20, 16] for split in ("train", "val")} | {"test": [0, 0]}
        silo["classes"] = ["no", "yes"]
    (run / "silos.json").write_text(json.dumps(silos))
    rows = (run / "metrics.csv").read_text().splitlines()
    kept = [row for row in rows if ",test," not in row]
    (run / "metrics.csv").write_text("\n".join(kept) + "\n")
    html = report([run], "clinic")
    assert "No hospital measured it on test images." in html
    assert "Test images by class" not in html


def test_research_does_not_take_what_sites_do_not_tell_for_nothing(
    hearts: Path, tmp_path: Path
) -> None:
    untold = {"total": 1.0, "rounds": 1.0, "sites": {"va": 0.0}}
    run = _copy(hearts / "fedavg-seed0", tmp_path / "run", seconds=untold)
    _copy(run, tmp_path / "untold", **{"peak-memory-bytes": {}})
    (cost,) = research_data(reported_runs([tmp_path / "untold"]))["cost"]
    assert (cost[4], cost[7]) == ("n/a", "n/a")


def test_an_early_stop_is_no_failure(hearts: Path, tmp_path: Path) -> None:
    run = _copy(hearts / "fedavg-seed0", tmp_path / "run", stopped="stopped early after round 2")
    for reader in READERS:
        html = report([run], reader)
        assert "as its settings ask for: stopped early after round 2" in html
        assert html.count("stopped early after round 2") == 1
        assert "What the run continued without" not in html
        assert "Every site answered every message." in html


def test_runs_are_compared_over_the_sites_that_every_run_shows(
    hearts: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(hearts, tmp_path / "runs")
    table, path = (out / "fedavg-seed0" / name for name in ("metrics.csv", "summary.json"))
    half = r"(?m)^(\d+,switzerland,test,accuracy),.*$"  # eight of sixteen may be told
    table.write_text(re.sub(half, r"\1,0.5", table.read_text()))
    summary = json.loads(path.read_text())
    summary["sites"]["switzerland"]["accuracy"] = 0.5
    path.write_text(json.dumps(summary))
    runs = reported_runs([out])
    shown = [run.name for run in runs if "accuracy" in run.summary["sites"]["switzerland"]]
    assert shown == ["fedavg-seed0"], "the others call all of them ill"
    lines = _lines(runs, "accuracy", "test")
    found = summaries_by_seed([run.experiment for run in runs], runs, "test")
    for name, by_seed in found.items():
        for seed, of_seed in by_seed.items():
            own = json.loads((out / f"{name}-seed{seed}" / "summary.json").read_text())["sites"]
            metrics = [own[site]["accuracy"] for site in ("cleveland", "hungary", "va")]
            assert of_seed["mean"]["accuracy"] == pytest.approx(sum(metrics) / 3)
            shows = (name, seed) == ("fedavg", 0)
            assert ("accuracy" in of_seed["distributions"]["switzerland"]) == shows
            assert "loss" in of_seed["distributions"]["switzerland"], "which all show"
        ends = [of_seed["mean"]["accuracy"] for of_seed in by_seed.values()]
        assert lines[name][max(lines[name])] == pytest.approx(sum(ends) / len(ends))


@pytest.mark.parametrize("reader", READERS)
def test_a_column_in_another_unit_is_named_in_each_report(
    reader: str, hearts: Path, tmp_path: Path
) -> None:
    heading = "Columns with an unusual mean at a site"
    run = hearts / "fedavg-seed0"
    (entry,) = json.loads((run / "summary.json").read_text())["unlike-columns"]
    assert (entry["column"], entry["site"]) == ("chol", "switzerland")
    html = report([run], reader)
    assert heading in html
    assert "serum cholesterol (chol, mg/dl): the mean at switzerland is less than a fifth" in html
    older = _copy(run, tmp_path / "older", **{"unlike-columns": None})
    assert heading not in report([older], reader)


def test_the_pages_of_watch_show_the_report_of_a_run(hearts: Path) -> None:
    pages = WatchPages(look_for(hearts))
    asked = {"name": "fedavg-seed0", "reader": "dpo"}
    assert pages.render("/report", asked).html == report([hearts / "fedavg-seed0"], "dpo")
    assert "local-seed0" in pages.render("/report", asked | {"other": "local-seed0"}).html
    for wrong in ({"reader": "nobody"}, {"name": "../hearts"}):
        assert pages.render("/report", asked | wrong).status == 404
    page = pages.render("/run", {"name": "fedavg-seed0"}).html
    assert page.count('href="/report?') == len(READERS)
