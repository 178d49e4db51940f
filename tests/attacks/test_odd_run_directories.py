"""A run directory with one thing wrong: every command that reads it works or says a line."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedsilo.cli.main import main
from fedsilo.engines.inline_engine import run_inline
from fedsilo.pictures.learning_curves import draw_pictures
from fedsilo.server_app.config.settings import resolve
from tests.attacks.test_sent_run_directories import COMMANDS, VALUES
from tests.support.odd_values import make_odd

FILES = ("summary.json", "silos.json", "progress.json", "config.toml", "metrics.csv", "traffic.csv")
WRITTEN = {"r.html", "p.csv", "p.csv.json", "e", "f"}  # by the options of COMMANDS
# The others open a model or data first, which takes seconds: each has a few cases, not many
QUICK = (
    *("report", "report for the clinic", "report for a data protection officer"),
    *("card", "watch"),
)
SLOW = (
    *("plot", "predict a split", "calibrate", "explain", "monitor", "export", "embeddings"),
    *("gradcam", "attention", "histograms", "finetune", "report by a column", "resume"),
)
# FUZZ_TRIALS is of 'make fuzz'
CASES = int(os.environ.get("FUZZ_TRIALS", "0"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return an honest run of each kind: with and without differential privacy."""
    out, private = tmp_path_factory.mktemp("bases"), {"privacy.sample-clip-norm": 1.0}
    private["privacy.noise-multiplier"] = 2.0
    paths: dict[str, Path] = {}
    for name, own in (("plain", {}), ("private", private)):
        directory = run_inline(resolve(VALUES | own | {"run.out": str(out), "run.name": name}), 4)
        draw_pictures(directory, print)
        paths[name] = directory.path
    return paths


def refuse_faults(command: str, said: str, text: str, folder: Path) -> None:
    """Fail if a command did anything but work or end with one line."""
    for name in ("r.html", "p.csv", "p.csv.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("e", "f"):
        shutil.rmtree(folder / name, ignore_errors=True)
    before = {path.name for path in folder.iterdir()}
    code = main(COMMANDS[command])
    made = {path.name for path in folder.iterdir()} - before
    assert code in (0, 1), text
    assert made <= WRITTEN, f"{text}: {command} wrote {made}"


def check(
    command: str, kind: str, name: str, where: int, what: int, bases: dict[str, Path], folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Change one place of a run directory, and have a command read it."""
    shutil.rmtree(folder / "sent", ignore_errors=True)
    shutil.copytree(bases[kind], folder / "sent")
    text = f"{command}: {make_odd(folder / 'sent', name, where, what)}"
    if command == "resume":
        (folder / "sent" / "summary.json").unlink(missing_ok=True)
    refuse_faults(command, name, text, folder)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert all(c.isprintable() or c in "\n\t" for c in shown), f"{text}: {shown!r}"
    assert "Traceback" not in shown
    if captured.err.startswith("fedsilo: error"):
        assert captured.err.count("\n") == 1, text


CASE = {
    "kind": st.sampled_from(("plain", "private")),
    "name": st.sampled_from(FILES),
    "where": st.integers(0, 10**4),
    "what": st.integers(0, 10**3),
}
UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=CASES or 15, suppress_health_check=UNHURRIED, deadline=None)
@given(command=st.sampled_from(QUICK), **CASE)
# An accuracy outside of 0 and 1
@example(command="card", kind="plain", name="summary.json", where=8, what=308)
def test_a_page_a_card_or_a_look_at_an_odd_run_is_made_or_refused_in_a_line(
    command: str,
    kind: str,
    name: str,
    where: int,
    what: int,
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    check(command, kind, name, where, what, bases, tmp_path, capsys)


@settings(max_examples=(CASES // 4) or 5, suppress_health_check=UNHURRIED, deadline=None)
@given(command=st.sampled_from(SLOW), **CASE)
def test_a_model_of_an_odd_run_is_used_or_refused_in_a_line(
    command: str,
    kind: str,
    name: str,
    where: int,
    what: int,
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.csv").write_text("age,sex\n")
    check(command, kind, name, where, what, bases, tmp_path, capsys)


@pytest.mark.parametrize("name", [*FILES, ".lock", "checkpoints", "sites", "model.safetensors"])
@pytest.mark.parametrize("command", ["report", "resume", "watch"])
def test_a_link_out_of_the_directory_is_not_followed(
    command: str,
    name: str,
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bases["plain"], "sent")
    own = tmp_path / "own"
    own.write_text("a file of the reader's own\n")
    if command == "resume":
        (tmp_path / "sent" / "summary.json").unlink()
    place = tmp_path / "sent" / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(own)
    code = main(COMMANDS[command])
    said = capsys.readouterr()
    assert own.read_text() == "a file of the reader's own\n"
    assert "reader's own" not in said.out + said.err
    assert code == 1 or name not in ("summary.json", "config.toml", ".lock")
