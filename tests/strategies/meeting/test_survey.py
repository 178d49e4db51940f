"""Asking for surveys: who answers, who is left out and why, each in one line."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import SURVEYED
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.engines.inline_engine import InlineGrid, partition_configs
from fedsilo.strategies.meeting import hello
from fedsilo.strategies.meeting.survey import read_survey, survey_sites
from fedsilo.strategies.meeting.terms import Registry
from fedsilo.strategies.wire.messaging import send_and_receive
from tests.fedsilo.core.test_survey import made

SETTINGS = CommonSettings(dataset="table")
Answers = dict[int, Any]


def _content(**about: Any) -> RecordDict:
    answer = made().model_copy(update={"about": made().about.model_copy(update=about)})
    return RecordDict({SURVEYED: ConfigRecord(dict(answer.to_config()))})


def _grid(answers: Answers) -> InlineGrid:
    """Return a grid whose nodes 1001, 1002, ... answer so."""
    app = ClientApp()

    @app.query("survey")
    def survey(message: Message, context: Any) -> Message:
        answer = answers[message.metadata.dst_node_id]
        if isinstance(answer, Error):
            return Message(answer, reply_to=message)
        return Message(answer, reply_to=message)

    return InlineGrid(app, {}, partition_configs(len(answers)))


def test_answers_are_by_site_and_sorted() -> None:
    grid = _grid({1001: _content(site="south"), 1002: _content(site="north")})
    surveyed = survey_sites(grid, SETTINGS)
    assert list(surveyed.answers) == ["north", "south"]
    assert surveyed.refused == ()


def test_a_node_is_given_up_after_the_time_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def send(grid: object, messages: object, timeout: float, away: float) -> list[Any]:
        waits.append(away)
        return []

    monkeypatch.setattr(hello, "send_and_receive", send)
    with pytest.raises(SiteError):
        survey_sites(_grid({1001: _content()}), dataclasses.replace(SETTINGS, away_timeout=7.0))
    assert waits == [7.0]


def test_who_refuses_or_says_what_cannot_be_is_left_out_in_one_line() -> None:
    answers: Answers = {
        1001: _content(),
        1002: Error(1002, "site south: the hospital has no site file\nand more"),
        1003: RecordDict({SURVEYED: ConfigRecord({"about": "{}"})}),
        1004: _content(site="../north"),
        1005: _content(site="east", dataset="heart"),
        1006: RecordDict({"arrays": ArrayRecord({"a": Array(np.zeros(3, np.float32))})}),
        1007: RecordDict({SURVEYED: ConfigRecord({"about": "x" * 2**23})}),
    }
    surveyed = survey_sites(_grid(answers), SETTINGS)
    assert list(surveyed.answers) == ["north"]
    told = dict(zip(range(1002, 1008), surveyed.refused, strict=True))
    assert told[1002] == "site south: the hospital has no site file and more"
    assert "cannot be read" in told[1003]
    assert "north" in told[1004]
    assert "is about data set 'heart', not 'table'" in told[1005]
    assert "has other records" in told[1006]
    assert "bytes, more than" in told[1007]
    assert all("\n" not in line and len(line) < 500 for line in told.values())


def test_of_two_with_one_name_neither_is_believed() -> None:
    grid = _grid({1001: _content(), 1002: _content(), 1003: _content(site="south")})
    surveyed = survey_sites(grid, SETTINGS)
    assert list(surveyed.answers) == ["south"]
    assert len(surveyed.refused) == 2


def test_a_name_is_bound_to_its_key() -> None:
    grid = _grid({1001: _content(), 1002: _content(site="south")})
    surveyed = survey_sites(grid, SETTINGS, registry=Registry("r.json", {"north": 1001}))
    assert list(surveyed.answers) == ["north"]
    assert "its line in" in surveyed.refused[0]


def test_a_node_that_the_registry_refuses_does_not_block_the_site_whose_name_it_takes() -> None:
    grid = _grid({1001: _content(), 1002: _content()})
    surveyed = survey_sites(grid, SETTINGS, registry=Registry("r.json", {"north": 1001}))
    assert list(surveyed.answers) == ["north"]
    assert len(surveyed.refused) == 1


def test_an_error_without_a_reason_is_still_a_refusal_in_words() -> None:
    surveyed = survey_sites(_grid({1001: _content(), 1002: Error(0, "")}), SETTINGS)
    assert surveyed.refused == ("an error",)


def test_a_node_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_second(*asking: Any) -> list[tuple[int, Message]]:
        return [(node, reply) for node, reply in send_and_receive(*asking) if node != 1002]

    monkeypatch.setattr("fedsilo.strategies.meeting.hello.send_and_receive", without_the_second)
    surveyed = survey_sites(_grid({1001: _content(), 1002: _content(site="south")}), SETTINGS)
    assert list(surveyed.answers) == ["north"]
    assert surveyed.refused == ("node 1002: no answer",)


def test_without_any_answer_it_is_an_error_with_the_reasons() -> None:
    with pytest.raises(SiteError, match="no site has answered the survey: no disk"):
        survey_sites(_grid({1001: Error(0, "no disk")}), SETTINGS)


def test_a_reader_of_its_own_reads_what_a_site_writes(
    spy_grid: Callable[..., Any],  # its fixture lets Flower's messages be made
) -> None:
    assert read_survey(_content(), "table") == made()
