"""The server's side of ``cross``: what is collected, sent, and put into the matrix."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.models.contract.messages import ARRAYS, EVALUATE
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.method import State, initial_weights
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.cross import Cross
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected

ALL = ["s1a", "s2a", "s3a"]
COMMON = CommonSettings(rounds=3, silos=3, width=1, run_name="run")
WEIGHTS = initial_weights(build_classifier(COMMON, Task((1, 16, 16), 10)))
STATE = State({}, 3)
Run = Callable[..., tuple[Any, RoundLoop]]


@pytest.fixture
def cross(participants: Participants) -> Cross:
    return Cross(COMMON, NoSettings(), participants)


@pytest.mark.parametrize(("round_", "expects"), [(0, False), (1, False), (2, True)])
def test_only_the_last_round_expects_the_sites_own_models(
    cross: Cross, round_: int, expects: bool
) -> None:
    every = {name: ArraySpec(array.shape) for name, array in WEIGHTS.items()}
    assert arrays_expected(cross, State({}, round_))["s1a"] == (every if expects else {})


def test_weights_cross_the_wire_once_up_and_once_down(
    spied_run: Run, tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy = spied_run(tiny("cross", rounds=3))
    sent, replies = grid.sent[3:], grid.replies[3:]
    carry = [ARRAYS in message.content.array_records for message in sent]
    assert carry == [False] * 9 + [True] * 3
    assert [ARRAYS in reply.content.array_records for reply in replies] == (
        [False] * 6 + [True] * 3 + [False] * 3
    )
    assert [told(message)["returns"] for message in sent] == [False] * 6 + [True] * 3 + [False] * 3
    for message in sent[9:]:
        assert set(message.content[ARRAYS]) == set(strategy.state.arrays)
        for site, reply in zip(ALL, replies[6:9], strict=True):
            for name, array in reply.content[ARRAYS].items():
                received = message.content[ARRAYS][f"expert/{site}/{name}"]
                np.testing.assert_array_equal(received.numpy(), array.numpy())


def failing_in(round_: int, told: Any, good: Callable[[Message], RecordDict]) -> Any:
    def answer(message: Message) -> RecordDict:
        if told(message)["round"] == round_:
            raise OSError("the network is down")
        return good(message)

    return answer


@pytest.mark.parametrize(("round_", "models"), [(2, ALL), (3, ["s1a", "s3a"]), (4, ALL)])
def test_the_run_goes_on_without_the_model_of_a_site_that_failed_in_the_last_round(
    participants: Participants,
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    told: Any,
    round_: int,
    models: list[str],
) -> None:
    def good(message: Message) -> RecordDict:
        arrays = WEIGHTS if told(message)["returns"] else None
        found: RecordDict = content(arrays, **measured)
        return found

    common = CommonSettings(rounds=3, silos=3, width=1, run_name="run", min_sites=2)
    strategy = RoundLoop(Cross(common, NoSettings(), participants), run_dir="/somewhere")
    grid = spy_grid(fake_app(good, s2a=failing_in(round_, told, good)))
    strategy.start(grid, 3, 20)
    for arrays in (strategy.state.arrays, grid.sent[-1].content[ARRAYS]):
        assert sorted({name.split("/")[1] for name in arrays}) == models
    assert told(grid.sent[-1])["phase"] == EVALUATE


def figures(**auc: float) -> dict[str, float]:
    return {f"auc-from-{site}": value for site, value in auc.items()} | {"auc": 0.1, "loss": 2.0}


def test_the_matrix_has_a_row_per_training_site_and_a_column_per_testing_one(cross: Cross) -> None:
    values = {
        "s1a": figures(s1a=0.9, s2a=0.5, s3a=0.6),
        "s2a": figures(s1a=0.55, s2a=0.8, s3a=0.65),
        "s3a": figures(s1a=0.7, s2a=0.75, s3a=0.95),
    }
    assert cross.documents(STATE, values) == {
        "cross.json": {
            "auc": {
                "trained": ALL,
                "tested": ALL,
                "values": [[0.9, 0.55, 0.7], [0.5, 0.8, 0.75], [0.6, 0.65, 0.95]],
            }
        }
    }


def test_what_failed_or_is_undefined_is_null(cross: Cross) -> None:
    values = {
        "s1a": {"accuracy": 0.5, "accuracy-from-s1a": 0.5, "accuracy-from-s3a": 0.25},
        # s2a's model is missing, and so are s3a's figures
        "s2a": {"accuracy": 1.0, "accuracy-from-s1a": 1.0, "accuracy-from-s3a": 0.75, "auc": 0.5},
    }
    document = cross.documents(STATE, values)["cross.json"]
    assert list(document) == ["accuracy"]
    assert document["accuracy"]["values"] == [[0.5, 1.0, None], [None] * 3, [0.25, 0.75, None]]


def test_without_test_figures_there_is_no_matrix_and_no_picture(cross: Cross) -> None:
    assert cross.documents(STATE, {}) == {}


def test_cross_says_that_models_go_to_all_others_once_and_are_measured_there(cross: Cross) -> None:
    models, measured = cross.disclosures().leaves
    assert "go to all other sites once" in models
    assert "auc" in measured
    assert "every site's model" in measured
