"""A word that the command line does not know, and what is offered in its place."""

import pytest

from fedsilo.cli.main import main


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("simulate fedavg --rounds 3", "--set rounds=3"),
        ("simulate fedavg --rounds=3", "--set rounds=3"),
        ("compare fedavg --learning-rate 0.1", "--set train.learning-rate=0.1"),
        ("simulate fedavg --gamma --out x", "--set uefl.gamma=VALUE"),
        ("compare fedavg --seed 3", "'--seeds'"),
        ("fedavg", "fedsilo simulate fedavg"),
        ("fedavgg --set rounds=1", "fedsilo simulate fedavg"),
        ("simulatee", "'simulate'"),
    ],
)
def test_settings_and_methods_are_offered(
    words: str, offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert offered in capsys.readouterr().err


@pytest.mark.parametrize("words", ["methods --rounds 3", "simulate fedavg --zzz", "zzz"])
def test_nothing_is_offered_where_nothing_is_near(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert "--set" not in capsys.readouterr().err
