"""Printed results of commands, and the files that their options name."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from fedsilo.cli import results
from fedsilo.core.errors import SettingError
from fedsilo.deployment.doctor.findings import Finding, Status
from fedsilo.deployment.joining import MadeKit
from fedsilo.deployment.member_status import MemberStatus
from fedsilo.reports.regression import Regression
from fedsilo.reports.watch.view import View
from tests.fedsilo.reports.test_regression import LOGISTIC
from tests.support.errors import refuses

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return a function that gives the printed lines."""
    return lambda: capsys.readouterr().out.splitlines()


@pytest.fixture
def regression() -> Regression:
    return Regression(Path(), {**LOGISTIC, "heterogeneity": LOGISTIC["heterogeneity"][:1]})


def _cells(table: list[str]) -> list[list[str]]:
    """Return the cells of a printed table's rows, without its titles."""
    rows = [line.strip("│").split("│") for line in table if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_fit_prints_tables_and_writes_only_the_named_files(
    regression: Regression, tmp_path: Path, lines: Lines
) -> None:
    results.fit(regression)
    assert any("odds ratio" in line for line in lines())
    assert not list(tmp_path.iterdir())
    results.fit(
        regression,
        csv=tmp_path / "fit.csv",
        latex=tmp_path / "fit.tex",
        picture=tmp_path / "fit.svg",
    )
    assert lines()[-1] == f"picture: {tmp_path / 'fit.svg'}"
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".tex", ".svg"}


def test_a_fit_as_json_prints_one_document_even_with_a_picture(
    regression: Regression, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.fit(regression, picture=tmp_path / "fit.svg", as_json=True)
    assert json.loads(capsys.readouterr().out) == regression.document
    assert (tmp_path / "fit.svg").is_file()


def test_a_comparison_is_drawn_if_a_picture_is_named(tmp_path: Path, lines: Lines) -> None:
    drawn: list[Path] = []
    compared: Any = SimpleNamespace(
        document=lambda: {"rows": []},
        lines=lambda median: [f"median: {median}"],
        write=lambda *paths, **more: None,
        draw=drawn.append,
    )
    results.compare(compared, median=True)
    assert (lines(), drawn) == (["median: True"], [])
    results.compare(compared, picture=tmp_path / "a.svg")
    assert lines()[-1] == f"picture: {tmp_path / 'a.svg'}"
    results.compare(compared, picture=tmp_path / "b.svg", as_json=True)
    assert "picture" not in " ".join(lines())
    assert drawn == [tmp_path / "a.svg", tmp_path / "b.svg"]


@pytest.mark.parametrize("local", [True, False])
def test_a_watched_run_is_served_on_the_port_until_ctrl_c(
    local: bool, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []

    class Server:
        is_local = local

        def __init__(self, port: int, look: object, address: str) -> None:
            self.address = f"http://{address}:{port}"

        def serve(self) -> None:
            served.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr("fedsilo.reports.watch.web.serve.WatchServer", Server)
    view: Any = SimpleNamespace(line=lambda: "trial: running")
    host = "127.0.0.1" if local else "0.0.0.0"
    results.watch(lambda: view, port=8080, address=None if local else host)
    first, second, *more = lines()
    assert first == "trial: running"
    assert f"http://{host}:8080" in second
    assert (len(served), len(more)) == (1, 0 if local else 1), "others may read the pages"


def test_options_of_watching_that_contradict_each_other_are_refused() -> None:
    def never() -> View:
        raise AssertionError("nothing is read")

    with refuses(SettingError, "--once", "--port"):
        results.watch(never, once=True, port=0)
    with refuses(SettingError, "--address", "--port"):
        results.watch(never, address="0.0.0.0")


def test_a_started_deployment_names_its_sites_and_its_address(lines: Lines) -> None:
    deployment: Any = SimpleNamespace(sites=["north"], address="")
    results.deploy_up(deployment)
    assert lines() == ["1 site online: north"]
    deployment = SimpleNamespace(sites=[], address="fl.example.org:443")
    results.deploy_up(deployment)
    (line,) = lines()
    assert "fl.example.org:443" in line
    assert "fedsilo deploy add" in line


def test_kits_and_renewals_are_printed_with_their_codes(lines: Lines) -> None:
    kit = MadeKit("north", Path("north.kit"), "ab12")
    results.deploy_renew(kit)
    first, _ = lines()
    assert first == "north: north.kit (code ab12)"
    results.deploy_renew("the server has a new certificate")
    assert lines() == ["the server has a new certificate"]


def test_a_backup_and_its_restored_copy_are_told_by_files_and_size(lines: Lines) -> None:
    manifest = SimpleNamespace(files={"a": 1, "b": 2}, made="2026-03-03")
    made: Any = SimpleNamespace(path=Path("b.backup"), size=3_000_000, manifest=manifest)
    results.deploy_backup(made)
    assert lines()[0].startswith("b.backup: 2 files, 3")
    deployment = SimpleNamespace(folder=Path("there"))
    restored: Any = SimpleNamespace(deployment=deployment, manifest=manifest, notes=["one run"])
    results.deploy_restore(restored, deployment="my folder")
    first, note, last = lines()
    assert first.startswith("there: 2 files of the backup of 2026-03-03")
    assert note == "note: one run"
    assert last.endswith("fedsilo deploy up --deployment 'my folder'")


def test_the_state_of_a_deployment_is_a_table_and_its_newest_run(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("COLUMNS", "300")
    looked = SimpleNamespace(run=SimpleNamespace(line=lambda: "trial: running"))
    monkeypatch.setattr("fedsilo.reports.watch.view.look_at_deployment", lambda folder: looked)
    members = [
        MemberStatus("server", 7, "", log),
        MemberStatus("north", None, "offline", tmp_path / "none"),
    ]
    results.deploy_status(members, deployment=tmp_path)
    *table, last = lines()
    assert last == "trial: running"
    assert _cells(table) == [["server", "7", "", str(log)], ["north", "-", "offline", "-"]]
    looked.run = None
    results.deploy_status(members, deployment=tmp_path)
    assert lines() == table
    results.deploy_status(members, deployment=tmp_path, as_json=True)
    document = json.loads("\n".join(lines()))
    assert [(one["member"], one["pid"]) for one in document] == [("server", 7), ("north", None)]


@pytest.mark.parametrize("status", [Status.PASSED, Status.FAILED])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_finding_is_printed_when_its_check_ends_and_a_failure_ends_the_command(
    status: Status, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def findings() -> Iterator[Finding]:
        yield Finding("disk", status, "2 GB free", "free some space")
        printed.append(capsys.readouterr().out)

    code = 0
    try:
        results.doctor_site(findings(), as_json=as_json)
    except typer.Exit as end:
        code = end.exit_code
    assert code == int(status is Status.FAILED)
    assert bool(printed[0]) is not as_json, "a silent server takes seconds"
    rest = capsys.readouterr().out
    if as_json:
        assert json.loads(rest)["findings"][0]["check"] == "disk"
    else:
        assert "disk" in printed[0]
        assert rest.count("\n") == 1


def test_a_broken_chain_ends_the_command_after_everything_is_written(
    tmp_path: Path, lines: Lines
) -> None:
    audit: Any = SimpleNamespace(
        document=lambda: {"breaks": 1},
        lines=lambda: ["message 1"],
        csv=lambda: "day\n",
        breaks=["line 3"],
    )
    with pytest.raises(typer.Exit):
        results.audit(audit, csv=tmp_path / "audit.csv")
    assert lines() == ["message 1", f"table: {tmp_path / 'audit.csv'}"]
    assert (tmp_path / "audit.csv").read_text() == "day\n"
    audit.breaks = []
    results.audit(audit, csv=tmp_path / "again.csv", as_json=True)
    assert json.loads("\n".join(lines())) == {"breaks": 1}


def test_data_sets_are_a_table_or_json(lines: Lines) -> None:
    keys = ("name", "kind", "tasks", "licence", "terms", "size", "here")
    row = dict.fromkeys(keys, "x") | {"name": "hearts"}
    results.datasets([row])
    assert _cells(lines()) == [["hearts", *"xxxxxx"]]
    results.datasets([row], as_json=True)
    assert json.loads("\n".join(lines())) == [row]


def test_a_bar_of_progress_is_not_drawn_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with results.progress_bar("weights") as move:
        move(1, 2)
    assert capsys.readouterr() == ("", "")


def test_results_of_one_word_are_labelled_and_a_run_names_what_comes_next(lines: Lines) -> None:
    results.pretrain(Path("w.pt"))
    assert lines() == ["weights: w.pt"]
    run: Any = SimpleNamespace(path=Path("my run"))
    results.simulate(run)
    assert "fedsilo report 'my run' --out 'my run.html'" in lines()[0]
