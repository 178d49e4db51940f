"""What the tab key offers, and commands that print nothing but their result."""

import json
from pathlib import Path

import pytest

from fedsilo.cli.completion import VARIABLE, complete_experiment, complete_setting
from fedsilo.cli.main import main


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fedsilo simulate picsr-heart", {"picsr-heart"}),
        ("fedsilo simulate fedavg --set uefl.gamm", {"uefl.gamma="}),
        ("fedsilo comp", {"compare"}),
        ("fedsilo simulate fedavg --super", {"--supernodes"}),
    ],
)
def test_a_shell_gets_the_words_that_fit(
    words: str,
    offered: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert offered <= set(capsys.readouterr().out.split())


def test_methods_are_offered_where_the_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simulation.yaml").write_text("experiments: [")
    assert complete_experiment("fedpr") == ["fedproto", "fedprox"]
    assert complete_setting("nothing") == []


@pytest.mark.usefixtures("in_process")
def test_a_quiet_run_prints_its_directory_and_json_nothing_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--set",
        "dataset=heart-synthetic",
        "--set",
        "rounds=1",
        "--set",
        "train.local-steps=1",
    ]
    where = [*small, "--out", str(tmp_path)]
    assert main(["simulate", "fedavg-heart", "--name", "one", "-q", "--no-pictures", *where]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one'}\n"
    assert main(["compare", "fedavg-heart", "local-heart", "--seeds", "1", "--json", *where]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["experiment"] for row in document["results"]} >= {"fedavg-heart", "local-heart"}
    assert len(document["budgets"]) == 2
