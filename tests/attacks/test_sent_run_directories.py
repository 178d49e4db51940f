"""A run directory that somebody sends: reading it runs none of its code and shows texts as text."""

import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from markdown_it import MarkdownIt

from fedsilo.cli.main import main
from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import plan, read_deployment
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.errors import refuses

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("the code of the directory ran")
def build(shape, classes):
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(13, 2))
"""
VALUES: dict[str, Value] = {
    "method": "fedavg",
    "dataset": "heart-synthetic",
    "data.standardise": "declared",
    "rounds": 1,
    "train.local-epochs": 1,
    "train.mc-passes": 0,
    "network.dropout": 0.0,
    "machine.device": "cpu",
    "network.name": "mlp",
    "network.width": 4,
}
# What the sender writes into config.toml
CHANGES: dict[str, dict[str, str]] = {
    "a file by the folder of the process": {
        "plugin": "/proc/self/cwd/sent/evil.py",
        "network.name": "evil:build",
    },
    "a file by a relative path": {"plugin": "sent/evil.py", "network.name": "evil:build"},
    "a file that no setting uses": {"plugin": "sent/evil.py"},
    "a network's file": {"network.name": "/proc/self/cwd/sent/evil.py:build"},
    "a module of the working folder as network": {"network.name": "sent.evil:build"},
    "a module of the working folder as data set": {"dataset": "sent.evil:build"},
    "a module of the working folder as method": {"method": "sent.evil"},
    "a module of the working folder as partition": {"split.partition": "sent.evil:build"},
    "a module of the path": {"network.name": "code:interact"},
}
COMMANDS: dict[str, list[str]] = {
    "report": ["report", "sent", "--out", "r.html"],
    "report for the clinic": ["report", "sent", "--for", "clinic", "--out", "r.html"],
    "report by a column": ["report", "sent", "--for", "clinic", "--by", "sex", "--out", "r.html"],
    "report for a data protection officer": ["report", "sent", "--for", "dpo", "--out", "r.html"],
    "card": ["card", "sent"],
    "plot": ["plot", "sent"],
    "watch": ["watch", "sent", "--once"],
    "predict": ["predict", "sent", "--table", "new.csv", "--out", "p.csv"],
    "predict a split": ["predict", "sent", "--site", "va", "--split", "test", "--out", "p.csv"],
    "calibrate": ["calibrate", "sent", "--site", "va"],
    "explain": ["explain", "sent", "--site", "va", "--row", "0"],
    "monitor": ["monitor", "sent", "--data", "new.csv", "--site", "va"],
    "export": ["export", "sent", "--out", "e"],
    "histograms": ["histograms", "sent"],
    "embeddings": ["embeddings", "sent"],
    "gradcam": ["gradcam", "sent", "--site", "va", "--rows", "0"],
    "attention": ["attention", "sent", "--site", "va"],
    "finetune": ["finetune", "--task", "classification", "--weights", "sent", "--out", "f"],
    "resume": ["resume", "sent"],
    "simulate by its settings": ["simulate", "fedavg", "--config", "sent/config.toml"],
}
READ_NO_SETTINGS = ("plot", "watch")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an honest run directory."""
    out = tmp_path_factory.mktemp("base")
    return run_inline(resolve(VALUES | {"run.out": str(out), "run.name": "base"}), 4).path


@pytest.fixture
def sent(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the run as somebody sent it, in the working folder, which Python may import from."""
    shutil.copytree(base, tmp_path / "sent")
    (tmp_path / "sent" / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "RAN")))
    (tmp_path / "new.csv").write_text("age,sex\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path / "sent"
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("evil", "sent"):
            del sys.modules[name]


def rewrite(config: Path, change: dict[str, str]) -> None:
    """Write settings over those of a config.toml, with digests that fit the sent file."""
    digest = hashlib.sha256(config.with_name("evil.py").read_bytes()).hexdigest()
    values = {"plugin-digests": f"evil={digest}, sent={digest}, code={digest}"} | change
    document = tomllib.loads(config.read_text())
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        table = document[group] if group else document
        assert name in table, "the file has no such setting"
        table[name] = value
    config.write_text(tomli_w.dumps(document))


# Every command with two changes, or with one if it reads no settings; and every change with a
# command of each kind
ALL_CHANGES = ("report", "predict a split", "resume", "simulate by its settings")
TWO = ("a file by the folder of the process", "a module of the working folder as network")
TRIED = dict.fromkeys(COMMANDS, TWO)
TRIED |= dict.fromkeys(READ_NO_SETTINGS, TWO[:1]) | dict.fromkeys(ALL_CHANGES, tuple(CHANGES))
PAIRS = [(command, change) for command, changes in TRIED.items() for change in changes]


@pytest.mark.parametrize(("command", "change"), PAIRS)
def test_no_command_runs_the_code_that_a_run_directory_names(
    command: str, change: str, sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(sent / "config.toml", CHANGES[change])
    if command == "resume":
        (sent / "summary.json").unlink()
    code = main(COMMANDS[command])
    said = capsys.readouterr().err
    assert not (sent.parent / "RAN").exists(), "the code of the directory ran"
    assert "Traceback" not in said
    if command not in READ_NO_SETTINGS and change != "a file that no setting uses":
        assert code == 1
        assert "--plugin" in said.splitlines()[-1], said


def put(path: Path, key: str, value: object) -> None:
    """Write a value over a key of a JSON file, whose path has dots; None removes it."""
    document = json.loads(path.read_text())
    *parents, last = key.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[last]
    else:
        place[last] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("key", ["run", "title", "phase", "why"])
def test_no_terminal_escape_of_a_run_reaches_the_terminal(
    key: str, sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(sent / "progress.json", key, "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202e")
    put(sent / "progress.json", "state", "failed")
    main(["watch", "sent", "--once"])
    said = "".join(capsys.readouterr()).replace("\n", "")
    assert said.isprintable(), repr(said)


@pytest.mark.parametrize("key", ["title", "dataset", "method", "stopped", "aggregation"])
def test_no_html_picture_or_link_of_a_run_is_in_its_card(key: str, sent: Path) -> None:
    evil = "<script>alert(1)</script> ![x](http://evil.test/x.png) [y](javascript:z) | a"
    put(sent / "summary.json", key, evil)
    if main(["card", "sent"]) == 0:
        card = (sent / "model-card.md").read_text()
        assert not tags_of(card) & {"script", "img", "a"}
        assert "<script>" not in card.split("\n---\n", 1)[0], "the front matter has no escapes"


def tags_of(card: str) -> set[str]:
    """Return the HTML tags that a Markdown reader makes of a card, without its front matter."""
    page = MarkdownIt("commonmark").enable("table").render(card.split("\n---\n", 1)[1])
    return set(re.findall(r"<(\w+)", page))


MARKUP = {
    "HTML": "<img src=x onerror=alert(1)>",
    "a script": "<script>alert(1)</script>",
    "a picture": "![x](http://evil.test/x.png)",
    "a link": "[x](javascript:alert(1))",
    "a link by itself": "<http://evil.test>",
    "a heading": "# Safe for clinical use",
    "code": "`x` ``y",
    "a cell": "a | b | <b>c</b>",
    "a backslash before it": "\\<script>alert(1)</script> \\[x](http://evil.test)",
}


@pytest.mark.parametrize("kind", MARKUP)
def test_no_text_of_a_run_is_markup_in_a_card_or_a_page(kind: str, sent: Path) -> None:
    assert main(["card", "sent", "--out", "honest.md"]) == 0
    put(sent / "summary.json", "privacy.leaves each site", [MARKUP[kind]])
    put(sent / "summary.json", "title", MARKUP[kind].replace("\\", ""))
    put(sent / "summary.json", "stopped", MARKUP[kind])
    silos = json.loads((sent / "silos.json").read_text())
    silos["va"]["distribution"] = MARKUP[kind].replace("\\", "")
    (sent / "silos.json").write_text(json.dumps(silos))
    assert main(["card", "sent"]) == 0
    assert main(["report", "sent", "--for", "dpo", "--out", "r.html"]) == 0
    honest, card = Path("honest.md").read_text(), (sent / "model-card.md").read_text()
    assert tags_of(card) <= tags_of(honest)
    assert card.count("\n#") == honest.count("\n#")
    assert not re.search("<(img|b|script)[ >]", Path("r.html").read_text())


KEYS = ("failures", "dataset", "seed", "stopped", "privacy", "sites", "mean", "rounds", "title")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("command", ["report", "card", "watch", "plot"])
def test_a_key_that_is_missing_is_one_line(
    key: str, command: str, sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(sent / "summary.json", key, None)
    code = main(COMMANDS[command])
    said = capsys.readouterr().err
    assert code == 0 or said.count("\n") == 1, said
    assert command == "watch" or code == 1


def test_a_sent_folder_of_finetune_runs_no_code(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "task": "segmentation",
        "network": "unet",
        "dataset": "sent.evil:build",
        "classes": ["background", "catheter"],
        "settings": {"dataset": "sent.evil:build", "plugin": "sent/evil.py"},
    }
    (sent / "finetune.json").write_text(json.dumps(document))
    (sent.parent / "images").mkdir()
    code = main(["predict", "sent", "--images", "images", "--out", "masks"])
    assert not (sent.parent / "RAN").exists()
    assert code == 1
    assert "--plugin" in capsys.readouterr().err


def test_a_plugin_that_its_reader_names_is_executed_in_his_version_only(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(sent / "config.toml", CHANGES["a file by a relative path"])
    copy = sent.parent / "mine" / "evil.py"
    copy.parent.mkdir()
    copy.write_text(Path("sent/evil.py").read_text() + "# another version\n")
    explain = [*COMMANDS["explain"], "--plugin", "mine/evil.py"]
    assert main(explain) == 1
    assert "another version of plugin 'evil'" in capsys.readouterr().err
    assert not (sent.parent / "RAN").exists()
    copy.write_text(Path("sent/evil.py").read_text())
    main(explain)
    assert (sent.parent / "RAN").exists(), "its reader has named it"


def test_a_sent_deployment_starts_no_site_with_code_that_its_file_names(sent: Path) -> None:
    mine = sent.parent / "mine.py"
    mine.write_text("x = 1\n")
    folder = sent.parent / "deployed"
    made = plan(folder, ["north"], [8000, 9092, 9101], {"plugin": str(mine)})
    assert str(mine) in " ".join(made.write().supernode_command("north")), "the user named it"
    text = (folder / "deployment.json").read_text()
    (folder / "deployment.json").write_text(text.replace(str(mine), str(sent / "evil.py")))
    with refuses(SettingError, "evil.py"):
        read_deployment(folder).command("north")


def test_a_list_of_experiments_executes_no_code(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = (
        "experiments:\n  x:\n    method: fedavg\n    config:\n      dataset: sent.evil:build\n"
    )
    Path("simulation.yaml").write_text(declared)
    main(["experiments"])
    assert not (sent.parent / "RAN").exists()
    assert "Traceback" not in capsys.readouterr().err
