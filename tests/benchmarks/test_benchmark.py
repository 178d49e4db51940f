"""The command on two tiny settings: its runs, a cut, the page, and the README's column."""

import csv
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from benchmarks.ranking import runs
from benchmarks.ranking.__main__ import main
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RunSettings

SIMULATION = """
experiments:
  hearts:
    config: &tiny {method: fedavg, dataset: heart-synthetic, rounds: 1, local-steps: 3,
                   batch-size: 16, dropout: 0.0, mc-passes: 0, val-folds: 4, device: cpu}
  digits:
    config: {<<: *tiny, dataset: digits, silos: 3, silo-train-size: 40, silo-test-size: 10,
             width: 4, val-folds: 0}
benchmark:
  seeds: 2
  rates: [0.001, 0.01]
  experiments: {hearts: accuracy, digits: accuracy}
  methods:
    fedprox: {about: a term more, own: {fedprox.proximal-mu: [0.1, 1.0]}}
    mix: {only: [digits], otherwise: it pools patients, unranked: it pools data}
"""
README = """
| method | idea | what leaves a site | average rank |
|---|---|---|---|
| [`fedavg`, `fedprox`](x.md) | means | weights | old |
| [`mix`](x.md) | pools | all | old |
| you want to | read |
"""


def _command(folder: Path, *more: str) -> int:
    files = ["--file", str(folder / "simulation.yaml"), "--csv", str(folder / "rows.csv")]
    return main(["--methods", "fedavg,fedprox,mix,distrans,star", *files, *more])


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as table:
        return list(csv.DictReader(table))


def _points(rows: list[dict[str, str]], experiment: str, method: str) -> list[tuple[str, ...]]:
    own = [row for row in rows if (row["experiment"], row["method"]) == (experiment, method)]
    return [(row["seed"], row["rate"], row["own"]) for row in own]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rows of a benchmark that was cut at its sixth run and given again.

    ``before.csv`` is what the cut left.
    """
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "simulation.yaml").write_text(SIMULATION)
    begun: list[RunSettings] = []

    def cut(settings: RunSettings) -> AbstractContextManager[FinishedRun]:
        begun.append(settings)
        if len(begun) == 6:
            raise KeyboardInterrupt
        return whole(settings)

    whole = runs.run_and_forget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run_and_forget", cut)
        assert _command(folder) == 130
    shutil.copy(folder / "rows.csv", folder / "before.csv")
    assert _command(folder) == 0
    return folder


def test_what_was_there_before_a_cut_is_not_run_again(ran: Path) -> None:
    before = (ran / "before.csv").read_text()
    assert before.count("\n") == 6, "a header and five runs"
    assert (ran / "rows.csv").read_text().startswith(before), "with the same seconds"
    after = _rows(ran)
    points = [
        (row["experiment"], row["method"], row["seed"], row["rate"], row["own"]) for row in after
    ]
    assert len(points) == len(set(points))


def test_each_method_has_two_trials_and_the_seeds_of_the_better_one(ran: Path) -> None:
    rows = _rows(ran)
    *trials, last = _points(rows, "digits", "fedavg")
    assert trials == [("0", "0.001", ""), ("0", "0.01", "")]
    metrics = {
        row["rate"]: (float(row["validation"]), -float(row["loss"]))
        for row in rows
        if (row["experiment"], row["method"], row["seed"]) == ("digits", "fedavg", "0")
    }
    assert last == ("1", max(metrics, key=lambda rate: metrics[rate]), "")
    *trials, last = _points(rows, "digits", "fedprox")
    assert trials == [("0", "0.001", f"fedprox.proximal-mu={mu}") for mu in ("0.1", "1.0")]
    assert last[0] == "1"


def test_what_was_not_run_says_why(ran: Path) -> None:
    notes = {(row["experiment"], row["method"]): row["note"] for row in _rows(ran) if row["note"]}
    assert set(notes) == {("hearts", "mix"), ("hearts", "distrans")}
    assert notes["hearts", "mix"] == "it pools patients"
    assert "is a table" in notes["hearts", "distrans"]


def test_a_changed_setting_is_no_run_of_before(
    ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(ran, "--set", "train.local-steps=2") == 1
    assert "with other settings or data: name another --csv" in capsys.readouterr().err


def test_the_page_has_ranks_costs_and_what_is_missing(
    ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ran / "README.md").write_text(README)
    page = ran / "page.md"
    files = ["--page", str(page), "--readme", str(ran / "README.md")]
    assert _command(ran, "--show-only", *files) == 0
    assert "not yet on `hearts`: APFL" in capsys.readouterr().out
    text = page.read_text()
    assert "| FedProx |" in text
    assert "Equal to the last digit on `digits`: FedAvg, Star" in text
    assert "FedProx: a term more." in text
    assert "Mix (oracle) on `hearts`: it pools patients" in text
    assert "not yet on `digits`" in text
    for name in ("page-table.csv", "page-ranks.csv", "page-ranks.png", "page-costs.png"):
        assert (ran / name).stat().st_size > 0
    two, one, other = (ran / "README.md").read_text().splitlines()[-3:]
    assert "old" not in two
    assert one == "| [`mix`](x.md) | pools | all | [not yet](../results/benchmark.md) |"
    assert other == "| you want to | read |"


def test_what_has_run_is_shown_without_the_data(ran: Path, tmp_path: Path) -> None:
    text = SIMULATION.replace("dataset: heart-synthetic", "dataset: heart, data-dir: nowhere")
    (tmp_path / "simulation.yaml").write_text(text)
    shutil.copy(ran / "rows.csv", tmp_path / "rows.csv")
    assert _command(tmp_path, "--show-only") == 0


def test_before_any_run_what_is_missing_is_told_and_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "simulation.yaml").write_text(SIMULATION)
    assert _command(tmp_path, "--show-only") == 0
    assert "not yet on `digits`: all methods" in capsys.readouterr().out
    assert _command(tmp_path, "--show-only", "--page", str(tmp_path / "page.md")) == 1
    assert "no method has all its runs" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["nowhere"], "unknown experiment 'nowhere'"),
        (["--methods", "fedprix"], "unknown method 'fedprix'"),
        (["--section", "bench"], "unknown benchmark 'bench'"),
    ],
)
def test_an_unknown_name_is_one_line(
    more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "simulation.yaml").write_text(SIMULATION)
    assert main([*more, "--file", str(tmp_path / "simulation.yaml")]) == 1
    assert told in capsys.readouterr().err
