"""--json: one JSON document from every command that prints a table."""

import json
import math

import pytest

from fedsilo.cli.main import main
from fedsilo.cli.printing import print_json

WITH_TABLES = [
    *("compare", "crossvalidate", "tune", "finetune", "fit", "predict", "monitor", "explain"),
    *("runs", "datasets", "methods", "settings", "experiments", "audit"),
    *("deploy status", "doctor site", "doctor server"),
]


@pytest.mark.parametrize("command", WITH_TABLES)
def test_a_command_that_prints_a_table_has_the_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["methods"], {"method": "uefl"}),
        (["settings", "uefl"], {"group": "uefl", "key": "uefl.codes", "default": "32"}),
        (["experiments", "--method", "uefl"], {"experiment": "uefl-digits", "silos": 9}),
        (["experiments", "--method", "uefl", "--here"], {"experiment": "uefl-digits"}),
    ],
)
def test_a_list_is_one_json_document(
    words: list[str], keys: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert any(keys.items() <= row.items() for row in rows)


@pytest.mark.parametrize(
    "words",
    [["settings", "nonesuch"], ["settings", "--pyproject"], ["experiments", "uefl-digits"]],
)
def test_what_is_no_list_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 1
    assert "error[setting]" in capsys.readouterr().err


def test_a_number_that_is_not_finite_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [math.nan, 1.5], "b": {"c": math.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
