"""Which runs a comparison reuses, what it refuses, and what its options show."""

import csv
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.comparison import jobs
from fedsilo.comparison.jobs import Job
from fedsilo.comparison.over_seeds import _results
from fedsilo.comparison.results import refuse_unmeasured
from fedsilo.comparison.tables import over_seeds
from fedsilo.core.errors import RunDirectoryError
from fedsilo.datasets.registry import load_silo
from fedsilo.runs.finished_run import FinishedRun, same_split
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory, config_document
from tests.support.run_files import silo, summary

ROOT = Path(__file__).resolve().parents[3]
SILOS = [f"s{distribution}{letter}" for distribution in "123" for letter in "abc"]


def test_a_finished_run_is_reused_and_one_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = resolve({"run.out": str(tmp_path), "run.name": "x-seed0", "seed": 0})
    job = Job("x", settings, {"num-supernodes": 9})
    assert not job.is_finished()
    directory = RunDirectory(tmp_path / "x-seed0")
    directory.path.mkdir()
    (directory.path / "config.toml").write_text(config_document(settings, {}))
    fingerprints = {name: load_silo(name, settings.common).fingerprints for name in SILOS}
    silos = {name: silo(fingerprints=found) for name, found in fingerprints.items()}
    directory.write_json("silos.json", silos)
    assert not job.is_finished()
    directory.write_json("summary.json", summary())
    assert job.is_finished()
    other = resolve({"run.out": str(tmp_path), "run.name": "x-seed0", "seed": 0, "rounds": 31})
    with pytest.raises(RunDirectoryError, match="rounds is 30 there and 31 here"):
        Job("x", other, {"num-supernodes": 9}).is_finished()
    with pytest.raises(RunDirectoryError, match="9 sites took part, but 3"):
        Job("x", settings, {"num-supernodes": 3}).is_finished()
    for name in ("s1b", "s3c"):
        silos[name] = silo(fingerprints=fingerprints[name] | {"train": "ab"})
    directory.write_json("silos.json", silos)
    with pytest.raises(RunDirectoryError, match="the data of s1b, s3c have changed; choose"):
        job.is_finished()


def _table(folder: Path, **labels: str) -> list[str]:
    """Write a data set of tables and the command that compares by it."""
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    for site, found in labels.items():
        rows = [f"{40 + index},{label}" for index, label in enumerate(found)]
        (tables / f"{site}.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
    files = "".join(f"  {site}: {site}.csv\n" for site in labels)
    (tables / "schema.yaml").write_text(
        "columns:\n  - {name: age}\nlabel: {column: sick, classes: {'no': [0], 'yes': [1]}}\n"
        f"sites:\n{files}"
    )
    (folder / "simulation.yaml").write_text(
        "experiments:\n  own:\n    config: {method: local, dataset: table, rounds: 1, "
        f"local-steps: 1, dropout: 0.0, mc-passes: 0, device: cpu, data-dir: {tables}, "
        "privacy.sums-min-count: 1}\n"
    )
    arguments = ["compare", "own", "--file", str(folder / "simulation.yaml"), "--seeds", "1"]
    return [*arguments, "--out", str(folder / "out"), "--csv", str(folder / "t.csv")]


@pytest.mark.usefixtures("in_process")
def test_a_run_on_tables_that_were_changed_since_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main(command) == 0
    assert "1 run, " in capsys.readouterr().out
    before = (tmp_path / "t.csv").read_bytes()
    assert main(command) == 0
    assert "runs, " not in capsys.readouterr().out
    _table(tmp_path, one="01" * 12, two="001" * 8)
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "own-seed0 cannot be used again: the data of two have changed" in error
    assert error.count("\n") == 1
    assert (tmp_path / "t.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--metrics", "accuracy,nosuch"], "--metrics: unknown metric 'nosuch'"),
        (["--metrics", "own-nosuch"], "--metrics: unknown metric 'own-nosuch'"),
        (["--metrics", "auc from x"], "--metrics: unknown metric 'auc from x'"),
        (["--markdown", "."], "--markdown . is a folder"),
        (["--picture", "."], "--picture . is a folder"),
        (["--picture", "bars.jpg"], "must end with .png, .svg or .pdf"),
        (["--split", "val"], "no site has val samples"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_before_any_run(
    options: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_table(tmp_path, one="01" * 12, two="011" * 8), *options]) == 1
    assert key in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_comparison_of_samples_too_few_to_be_shown_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main([*command, "--set", "privacy.sums-min-count=10"]) == 1
    assert "--no-floor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "names", ["accuracy, own-auc", "own-labels-loss", "auc-from-b.1", "auc*", "routing.a.mean"]
)
def test_names_that_a_run_may_have_are_not_refused_before(names: str) -> None:
    refuse_unmeasured(names, "--metrics")


@pytest.mark.usefixtures("in_process")
def test_a_finished_run_whose_data_have_gone_from_their_folder_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main(command) == 0
    (tmp_path / "tables" / "one.csv").unlink()
    capsys.readouterr()
    assert main(command) == 1
    assert "its data cannot be read now" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_another_schema_over_the_same_rows_is_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main(command) == 0
    schema = tmp_path / "tables" / "schema.yaml"
    schema.write_text(schema.read_text() + "\npolicy: impute\n")
    assert main(command) == 1
    assert "the data of one, two have changed" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_a_comparison_by_validation_metrics_that_no_site_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*_table(tmp_path, one="01" * 20, two="011" * 14), "--split", "val"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "no site has val samples, so there is nothing to compare" in error in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t.csv").exists()
    assert main([*command, "--set", "split.val-folds=2", "--out", str(tmp_path / "folds")]) == 0
    with (tmp_path / "t.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert {row["group"] for row in rows} == {"one", "two", "all"}
    assert {row["published"] for row in rows} == {""}


def _comparison(folder: Path, **configs: str) -> list[str]:
    """Write experiments on one table (two of ``configs`` differ) and the start of the command."""
    command = _table(folder, one="01" * 12, two="011" * 8)
    file = folder / "simulation.yaml"
    text = file.read_text()
    for name, config in configs.items():
        text += f"  {name}:\n    base: own\n    config: {{{config}}}\n"
    file.write_text(text)
    start = command.index("own")
    named = [*command[:start], *configs, *command[start + 1 :]]
    return [*named, "--jobs", "1", "--markdown", str(folder / "t.md")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished comparison of 'slow' and 'fast' over three seeds."""
    folder = tmp_path_factory.mktemp("finished")
    command = _comparison(folder, slow="learning-rate: 0.001", fast="learning-rate: 0.1")
    command[command.index("--seeds") + 1] = "3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "make_pool", lambda *_, **__: ThreadPoolExecutor(1))
        patch.setattr(jobs, "draw_pictures", lambda *_: None)
        assert main(command) == 0
    return folder


def _again(finished: Path, folder: Path, seeds: int) -> list[str]:
    """Copy the runs of a finished comparison, and return the command that compares them."""
    shutil.copytree(finished / "out", folder / "out")
    command = _comparison(folder, slow="learning-rate: 0.001", fast="learning-rate: 0.1")
    command[command.index("--seeds") + 1] = str(seeds)
    return command


def _json_runs(folder: Path, metric: str, **metrics: list[float]) -> None:
    """Write metrics over those of finished runs."""
    for name, values in metrics.items():
        for seed, value in enumerate(values):
            path = folder / "out" / f"{name}-seed{seed}" / "summary.json"
            summary = json.loads(path.read_text())
            summary["mean"][metric] = value
            path.write_text(json.dumps(summary))


def test_tests_stand_below_the_table_and_in_the_markdown(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _again(finished, tmp_path, seeds=3)
    assert main(command) == 0
    assert not (tmp_path / "t-tests.csv").exists()
    metrics = {"slow": [0.5, 0.6, 0.7], "fast": [0.7, 0.8, 0.9]}
    _json_runs(tmp_path, "auc", **metrics)
    capsys.readouterr()
    assert main([*command, "--tests", "auc", "--median"]) == 0
    said = capsys.readouterr().out
    assert "runs, " not in said, "all are there"
    # F = t^2 = 0.2^2 / (2 * 0.1^2 / 3) = 6 over 1 and 4; of 4 degrees p is 2 * (1 - T4(sqrt 6))
    heading = "test auc, mean over sites: one-way ANOVA F(1, 4) = 6, p = 0.070"
    assert heading in said
    assert "median (min to max) over 3 seeds" in said
    written = (tmp_path / "t.md").read_text()
    assert f"\n{heading}\n\n| p | slow |\n| --- | --- |\n| fast | 0.070 |\n" in written
    assert "multiplied by the number of pairs, 1 (Bonferroni" in written
    assert "but not the split, so p says nothing about other patients" in written
    assert "'--paired' tests the differences seed by seed" in written
    assert "| slow | all | " in written
    assert (tmp_path / "t-tests.csv").read_text().splitlines()[1:] == [
        "auc,ANOVA,all,all,6,0.070484,0.070484",
        "auc,t,fast,slow,2.44949,0.070484,0.070484",
    ]
    _json_runs(tmp_path, "auc", fast=[0.7, 0.81, 0.9])
    assert main([*command, "--tests", "auc", "--paired"]) == 0
    # Differences 0.2, 0.21, 0.2: t = 0.203333 / (0.0057735 / sqrt 3) = 61 over 2 degrees
    assert "| fast | < 0.001 |" in (tmp_path / "t.md").read_text()
    assert "two-sided paired t-tests, by seed, over 3 seeds" in (tmp_path / "t.md").read_text()


def test_means_are_over_the_sites_that_every_run_has(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _again(finished, tmp_path, seeds=2)
    picture = tmp_path / "t.png"
    command += ["--metrics", "accuracy,entropy", "--csv", str(tmp_path / "t.csv")]
    command += ["--picture", str(picture)]
    assert main(command) == 0
    assert "some runs lack" not in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = tmp_path / "out" / "slow-seed1" / "metrics.csv"
    rows = table.read_text().splitlines()
    last = rows[-1].split(",")[0]
    kept = [row for row in rows if not row.startswith(f"{last},two,test,accuracy,")]
    assert len(kept) == len(rows) - 1
    table.write_text("\n".join(kept) + "\n")
    summary = json.loads(table.with_name("summary.json").read_text())
    del summary["distributions"]["two"]["accuracy"]
    summary["mean"]["accuracy"] = summary["distributions"]["one"]["accuracy"]
    table.with_name("summary.json").write_text(json.dumps(summary))
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "leave out metrics that some runs lack, at two\n" in said
    with (tmp_path / "t.csv").open() as file:
        found = {(r["experiment"], r["group"], r["metric"]): r for r in csv.DictReader(file)}
    for name in ("slow", "fast"):
        assert found[name, "all", "accuracy"]["mean"] == found[name, "one", "accuracy"]["mean"]
        entropies = [float(found[name, group, "entropy"]["mean"]) for group in ("one", "two")]
        assert float(found[name, "all", "entropy"]["mean"]) == pytest.approx(sum(entropies) / 2)
    seeds = [found[name, "two", "accuracy"]["seeds"] for name in ("slow", "fast")]
    assert seeds == ["1", "2"]
    assert "(1 of 2 seeds)" in (tmp_path / "t.md").read_text()


def test_a_method_that_no_seed_changes_is_not_tested_and_says_so(
    tmp_path: Path,
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    command = _again(finished, tmp_path, seeds=2)
    _json_runs(tmp_path, "auc", slow=[0.75, 0.75], fast=[0.75, 0.75])
    recwarn.clear()
    assert main([*command, "--tests", "auc"]) == 0
    said = capsys.readouterr()
    assert "one-way ANOVA n/a: no value varies over seeds" in said.out
    assert "n/a, fast against slow: neither varies over seeds" in said.out
    assert "arn" not in said.err
    assert not [warning for warning in recwarn if "scipy" in str(warning.filename)]
    assert "| fast | n/a |" in (tmp_path / "t.md").read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["own", "--tests", "auc"], "--tests compares experiments with one another"),
        (["own", "own", "--tests", "auc"], "name at least two different ones"),
        (
            ["own", "more", "--tests", "auc", "--seeds", "1"],
            "needs at least 2 seeds, but --seeds is 1",
        ),
        (["own", "more", "--paired"], "--paired has no effect without --tests"),
        (
            ["own", "mixed"],
            "of experiment 'mixed' continues over rounds, but that of 'own' restarts",
        ),
        (["own", "digits", "--tests", "auc"], "experiment 'digits' uses data set 'digits'"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_anything_runs(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _comparison(tmp_path, more="learning-rate: 0.1")
    file = tmp_path / "simulation.yaml"
    text = file.read_text()
    file.write_text(
        text
        + "  digits:\n    config: {method: local, dataset: digits}\n"
        + "  mixed:\n    base: own\n    config: {method: fedprox, optimiser-state: run}\n"
    )
    where = ["--file", str(file), "--out", str(tmp_path / "out")]
    assert main(["compare", *options, *where]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("in_process")
def test_metrics_that_are_asked_for_stand_in_the_place_of_the_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _table(tmp_path, one="01" * 12, two="011" * 8)
    command = [*table, "--jobs", "1", "--metrics", "loss,*entropy"]
    assert main(command) == 0
    with (tmp_path / "t.csv").open(newline="") as table:
        assert {row["metric"] for row in csv.DictReader(table)} == {"loss", "entropy"}
    capsys.readouterr()
    assert main([*command, "--metrics", "los"]) == 1
    error = capsys.readouterr().err
    assert "--metrics: unknown metric 'los'; did you mean 'loss'?" in error
    assert error.count("\n") == 1


def test_each_seed_may_draw_a_split_of_its_own(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    command[command.index("--seeds") + 1] = "2"
    folds = ["--set", "split.test-folds=2"]
    assert main([*command, *folds, "--splits"]) == 0
    assert main([*command, *folds]) == 0
    assert "2 runs, " in capsys.readouterr().out  # none is taken for one of another split

    def tested(name: str) -> str:
        silos = RunDirectory(tmp_path / "out" / name).read_json("silos.json")
        return str(silos["one"]["fingerprints"]["test"])

    assert tested("own-split0") != tested("own-split1")
    assert tested("own-seed0") == tested("own-seed1") == tested("own-split0")


@pytest.mark.usefixtures("in_process")
def test_splits_of_their_own_that_are_all_the_same_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    command[command.index("--seeds") + 1] = "3"
    for dry_run in ([], ["--dry-run"]):
        assert main([*command, "--splits", *dry_run]) == 1
        error = capsys.readouterr().err
        assert "--splits: 'own-split0' and 'own-split1' have the same split" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def _run_of(folder: Path, digests: dict[str, str], counts: tuple[int, int] = (1, 1)) -> FinishedRun:
    directory = RunDirectory(folder)
    directory.path.mkdir()
    facts = silo(fingerprints=digests, distribution="d", label_counts={"test": counts})
    directory.write_json("silos.json", {"one": facts})
    return FinishedRun(folder)


@pytest.mark.parametrize(("digests", "seeds", "mean"), [("ab", 2, 0.5), ("aa", 1, 0.25)])
def test_predicting_one_class_is_scored_on_each_split_there_is(
    tmp_path: Path, digests: str, seeds: int, mean: float
) -> None:
    planned = []
    for seed, counts in enumerate([(6, 2), (2, 6)]):  # groups of patients are of several sizes
        _run_of(tmp_path / f"x-{seed}", {"test": digests[seed]}, counts)
        keys = {"run.out": str(tmp_path), "run.name": f"x-{seed}", "seed": seed}
        planned.append(Job("x", resolve({**keys, "dataset": "heart-synthetic"}), {}, "inline"))
    metrics = {"mean": {"accuracy": 0.9}, "distributions": {}, "method": "fedavg"}
    runs = [job.directory for job in planned]
    table = over_seeds(_results(planned, runs, {"x": {0: metrics, 1: metrics}}, "test", "accuracy"))
    constant = table[(table["method"] == "constant") & (table["group"] == "all")].iloc[0]
    assert (constant["mean"], constant["seeds"]) == (mean, seeds)


def test_same_split_is_not_known_where_a_site_does_not_tell(tmp_path: Path) -> None:
    ab, same, cd = (_run_of(tmp_path / f"run-{n}", {"test": n[:2]}) for n in ("ab", "ab2", "cd"))
    silent = _run_of(tmp_path / "silent", {})
    assert same_split([ab]) is True
    assert same_split([ab, same]) is True
    assert same_split([ab, cd]) is False
    assert same_split([ab, silent]) is None
    assert same_split([silent, silent]) is None


@pytest.mark.usefixtures("in_process")
def test_rows_on_unequal_terms_are_refused_before_they_run_or_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _comparison(tmp_path, short="rounds: 1", long="rounds: 2, local-steps: 3")
    assert main(command) == 1
    error = capsys.readouterr().err
    assert (
        "experiment 'long' has another budget than 'short': rounds 2, not 1; train.local-steps"
        in error
    )
    assert "give all the same budget, or mark the row by --unequal" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([*command, "--unequal"]) == 0
    written = (tmp_path / "t.md").read_text()
    assert "| long * | all | " in written
    assert "| short | all | " in written
    assert "| short | 1 of 1 | 2 | 30 | " in written, "a step at two sites that train on 15 samples"
    assert "| long | 2 of 2 | 12 | 180 | " in written
    assert "rounds 2, not 1; 6 times" in written
    with (tmp_path / "t-budgets.csv").open(newline="") as table:
        rows = {row["experiment"]: row for row in csv.DictReader(table)}
    assert [float(rows["long"][key]) for key in ("rounds", "wanted", "steps")] == [2, 2, 12]
    assert rows["short"]["differs"] == ""
    assert rows["long"]["differs"].startswith("rounds 2, not 1")


@pytest.mark.usefixtures("in_process")
def test_a_row_that_took_more_than_its_settings_say_is_refused_once_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _comparison(tmp_path, one="learning-rate: 0.01", two="method: ditto")
    assert main(command) == 1
    said = capsys.readouterr()
    assert "2 runs, " in said.out
    assert "'two' has another budget than 'one': 2 times the steps; 2 times the samples" in said.err
    assert "all runs are kept; repeat with --unequal to mark the row" in said.err
    assert not (tmp_path / "t.md").exists()
    assert main([*command, "--unequal"]) == 0
    assert "runs, " not in capsys.readouterr().out, "all are there"
    assert "| two * | all | " in (tmp_path / "t.md").read_text()


@pytest.mark.usefixtures("in_process")
def test_rows_that_were_tuned_over_other_numbers_of_points_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _comparison(tmp_path, one="learning-rate: 0.01", two="learning-rate: 0.1")
    file = tmp_path / "simulation.yaml"
    file.write_text(f"{file.read_text()}    trials: 8\n")
    assert main(command) == 1
    assert (
        "'two' has another budget than 'one': tuned over 8 points, not 0" in capsys.readouterr().err
    )


# A script without 'if __name__ == "__main__"', because workers must not import and so repeat it
SCRIPT = """
import multiprocessing
import sys
import fedsilo
print("begun")
fedsilo.compare(["own"], file=sys.argv[1], out=sys.argv[2], seeds=1, jobs=1, tell=print)
print("the next process:", multiprocessing.Process().name)
"""


def test_a_run_is_a_silent_process_of_its_own_that_knows_a_plugins_method(tmp_path: Path) -> None:
    plugin = shutil.copy(ROOT / "docs" / "examples" / "own_method.py", tmp_path)
    (tmp_path / "simulation.yaml").write_text(
        "experiments:\n  own:\n    config: {dataset: digits, split.silos: 2, "
        "split.silo-train-size: 20, split.silo-test-size: 10, rounds: 1, train.local-steps: 1, "
        "network.width: 4, train.mc-passes: 0, machine.device: cpu, "
        f"method: own_method, plugin: {plugin}}}\n"
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", "simulation.yaml", str(tmp_path / "out")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    told = ["begun", "1 run, 1 at once", "1/1 own-seed0"]
    assert done.stdout.splitlines() == [*told, "the next process: Process-2"], "one for one run"
    run = RunDirectory(tmp_path / "out" / "own-seed0")
    assert run.has_ended()
    assert (run.path / "curves.png").is_file()


@pytest.mark.usefixtures("in_process")
def test_the_error_of_a_run_comes_back_as_an_error_of_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main([*command, "--no-floor", "--set", "privacy.sums-min-count=31"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error[run-failed]: own-seed0 failed: ")
    assert "sends no sums" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t.csv").exists()
