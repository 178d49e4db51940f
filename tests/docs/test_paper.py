"""The researcher's path of docs/paper.md, from own data to figure and table, as it is printed."""

import shutil
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.server_app.records.progress_hook import ProgressHook
from tests.support.data_folders import write_sorted, write_tables
from tests.support.page_commands import commands
from tests.support.soak import in_soak

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "paper.md"
OWN = ROOT / "docs" / "examples" / "paper"
# Added to commands in the suite, so that they take seconds
STEPS = ["--set", "train.local-steps=1", "--set", "train.mc-passes=0"]
SMALL = {"compare": ["--seeds", "2", *STEPS], "tune": ["--trials", "2", *STEPS], "simulate": STEPS}


def test_the_path_takes_few_commands_and_lines_of_ones_own(tmp_path: Path) -> None:
    lines = 0
    for path in OWN.iterdir():
        lines += sum(bool(line.strip()) for line in path.read_text().splitlines())
    assert lines <= 40
    assert len(commands(PAGE, tmp_path)) <= 12


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("rounds", in_soak([1, 20], but=[1]))
def test_the_path_leads_to_figure_table_and_report(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sorted(tmp_path / "IMAGES", 60)
    write_tables(tmp_path / "TABLES", 120)
    for path in OWN.iterdir():
        shutil.copy(path, tmp_path)
    shutil.move(tmp_path / "schema.yaml", tmp_path / "TABLES" / "schema.yaml")
    monkeypatch.chdir(tmp_path)
    for _, command, *words in commands(PAGE, tmp_path):
        added: list[str] = []
        if "--file" in words:
            added = ["--set", f"rounds={rounds}"]
        if rounds == 1:
            added += SMALL.get(command, [])
        with monkeypatch.context() as patched:
            if command == "simulate":
                patched.setattr(ProgressHook, "round_ended", interrupt)
            assert main([command, *words, *added]) == (130 if command == "simulate" else 0)
    assert (tmp_path / "images.pdf").read_bytes().startswith(b"%PDF")
    table = (tmp_path / "images.tex").read_text()
    assert all(name in table for name in ("fedavg-images", "mine-images", r"\toprule"))
    assert table.count(r"\begin{table}") == 2
    assert (tmp_path / "final.html").is_file()
