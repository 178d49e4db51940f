from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from client_app.app import app
from datasets.silos import Silo
from models.contract import ARRAYS, CONFIG, EVALUATE, HELLO, METRICS, TRAIN

Node = Callable[..., Context]
Make = Callable[..., Message]


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    assert "\n" not in reply.error.reason
    return reply.error.reason


def test_hello_tells_counts_and_fingerprints_and_no_data(context: Node, silo: Silo) -> None:
    asked = Message(RecordDict(), 1001, HELLO)
    reply = app(asked, context({"partition-id": 0}))
    assert list(reply.content) == [CONFIG]
    facts = reply.content[CONFIG]
    assert facts["site"] == "s1a"
    assert facts["distribution"] == "D1"
    assert list(facts["image-shape"]) == [1, 16, 16]
    assert facts["classes"] == 10
    counts = json.loads(facts["label-counts"])
    assert {split: sum(found) for split, found in counts.items()} == {
        "train": 36,
        "val": 4,
        "test": 10,
    }
    assert json.loads(facts["fingerprints"]) == silo.fingerprints
    assert facts["homeless"] is True
    assert set(facts) == {
        *("site", "distribution", "image-shape", "classes", "label-counts", "fingerprints"),
        "homeless",
    }


def test_a_site_with_a_folder_of_its_own_says_so_and_not_where(context: Node) -> None:
    asked = Message(RecordDict(), 1001, HELLO)
    reply = app(asked, context({"site": "s2a", "state-dir": "/private"}))
    assert reply.content[CONFIG]["homeless"] is False
    assert not [value for value in reply.content[CONFIG].values() if "/private" in str(value)]


def test_a_training_message_is_answered_with_arrays_and_metrics(
    context: Node, message: Make, weights: dict[str, Any]
) -> None:
    reply = app(message(TRAIN, weights), context({"partition-id": 1}))
    assert set(reply.content) == {METRICS, ARRAYS}
    assert set(reply.content[ARRAYS]) == set(weights)


@pytest.mark.parametrize("flag", [True, False])
def test_an_evaluation_measures_always_trains_nothing_and_sends_no_array(
    context: Node, message: Make, weights: dict[str, Any], flag: bool
) -> None:
    asked = message(EVALUATE, weights, round=3, evaluate=flag)  # the flag is for training rounds
    reply = app(asked, context({"partition-id": 1}))
    assert set(reply.content) == {METRICS}
    measured = {key.rpartition(".")[0] for key in reply.content[METRICS] if "." in key}
    assert measured == {"incoming.val", "incoming.test"}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"site": "s9z"}, "s9z: there is no silo 's9z'"),
        ({}, "partition unknown: the node config names no 'site'"),
        ({"partition-id": 3}, "partition 3: SuperNode 4 has no silo: 'silos' is 3"),
    ],
)
def test_a_site_that_is_none_answers_with_one_line_that_says_who_it_claims_to_be(
    context: Node, node: dict[str, Any], said: str
) -> None:
    reply = app(Message(RecordDict(), 1001, HELLO), context(node))
    assert reason_of(reply).startswith(said)


def test_an_unknown_phase_is_an_error_reply_that_names_the_site(
    context: Node, message: Make, weights: dict[str, Any]
) -> None:
    reply = app(message(TRAIN, weights, phase="dream"), context({"partition-id": 2}))
    assert "site s3a: method 'fedavg' has no phase 'dream'" in reason_of(reply)


def test_an_unforeseen_error_names_its_type_and_does_not_end_the_app(context: Node) -> None:
    reply = app(Message(RecordDict(), 1001, TRAIN), context({"partition-id": 0}))
    assert reason_of(reply).startswith("KeyError: ")


def test_weights_of_another_network_are_an_error_reply(context: Node, message: Make) -> None:
    other = {"no.such.weight": np.zeros(3, np.float32)}
    reply = app(message(TRAIN, other), context({"partition-id": 0}))
    assert "weights do not fit the network: missing [" in reason_of(reply)
    assert "surplus ['no.such.weight']" in reason_of(reply)


def test_a_message_of_another_version_is_an_error_reply(context: Node, message: Make) -> None:
    asked = message(TRAIN)
    del asked.content[CONFIG]["step"]
    reply = app(asked, context({"partition-id": 0}))
    assert "a message lacks 'step'" in reason_of(reply)


def test_the_app_is_loaded_without_the_methods_and_torch() -> None:
    code = "import sys, client_app; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert [m for m in loaded if m.startswith("client_app")] == ["client_app", "client_app.app"]
    assert "torch" not in loaded
