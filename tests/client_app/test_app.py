import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.core.errors import ERROR_CODES
from fedsilo.core.files.locations import Places
from fedsilo.core.messages import ARRAYS, CONFIG, EVALUATE, HELLO, METRICS, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.tables.heart import HEART
from fedsilo.server_app.config.settings import resolve
from tests.support.setting_keys import as_keys

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
    assert list(facts["input-shape"]) == [1, 16, 16]
    assert facts["classes"] == 10
    counts = json.loads(facts["label-counts"])
    assert {split: sum(found) for split, found in counts.items()} == {
        "train": 36,
        "val": 4,
        "test": 10,
    }
    assert json.loads(facts["fingerprints"]) == silo.fingerprints
    assert facts["simulated"] is True
    assert set(facts) == {
        *("site", "distribution", "input-shape", "classes", "label-counts", "fingerprints"),
        *("simulated", "features", "dropped", "schema", "backbone", "class-names"),
        "floor",
        "measured",
        "task",
    }
    assert (json.loads(facts["features"]), facts["dropped"], facts["schema"]) == ([], 0, "")
    assert facts["floor"] == 10
    raised = app(asked, context({"partition-id": 0, "sums-min-count": 12})).content[CONFIG]
    assert raised["floor"] == 12


def table_node(partition: int | str, method: str = "fedavg", **changes: Value) -> Context:
    """Return the context of a made-up heart hospital: partition or name, settings."""
    values = {"method": method, "dataset": "heart-synthetic"}
    settings = resolve(values | as_keys(changes))
    node: dict[str, Value] = {"partition-id": partition}
    if isinstance(partition, str):
        node = {"site": partition, "trust": "server"}
    return Context(1, 1001, node, RecordDict(), settings.as_mapping())


SUMS = {"sums-count", "sums-total", "sums-squares"}


def test_the_hello_of_a_table_names_its_features_and_sends_sums_of_its_training_rows() -> None:
    facts = app(Message(RecordDict(), 1001, HELLO), table_node(2)).content[CONFIG]
    silo = load_silo("switzerland", CommonSettings(dataset="heart-synthetic"))
    assert (facts["site"], facts["distribution"]) == ("switzerland", "switzerland")
    assert list(facts["input-shape"]) == [13]
    assert json.loads(facts["features"]) == list(silo.features)
    assert facts["dropped"] == silo.dropped == 0
    assert facts["schema"] == HEART.schema(Places(None, Path())).digest()
    rows = silo.train.inputs.double()
    assert list(facts["sums-count"]) == [30] * 13
    assert list(facts["sums-total"]) == pytest.approx(rows.sum(dim=0).tolist())
    assert list(facts["sums-squares"]) == pytest.approx(rows.square().sum(dim=0).tolist())
    assert sum(len(value) > 13 for value in facts.values() if isinstance(value, list)) == 0


@pytest.mark.parametrize(("standardise", "sent"), [("pooled", SUMS), ("site", set())])
def test_sums_are_sent_where_statistics_are_pooled_and_never_else(
    standardise: str, sent: set[str]
) -> None:
    facts = app(Message(RecordDict(), 1001, HELLO), table_node(2, standardise=standardise))
    assert {key for key in facts.content[CONFIG] if key.startswith("sums-")} == sent


def test_a_table_of_too_few_rows_for_sums_is_an_error_reply_that_names_the_site() -> None:
    reply = app(Message(RecordDict(), 1001, HELLO), table_node(2, sums_min_count=31))
    told = reason_of(reply)
    assert told.startswith("switzerland: site switzerland sends no sums: it has 30 training rows")


@pytest.mark.parametrize("kind", [HELLO, TRAIN, EVALUATE])
def test_a_method_refuses_a_site_before_anything_leaves_it(message: Make, kind: str) -> None:
    node = table_node(2, "picsr")
    assert app(Message(RecordDict(), 1001, HELLO), node).has_content()
    node.run_config["picsr.prototype-min-count"] = 31  # which this server should have refused
    reason = reason_of(app(message(kind, notes={"stage": "experts"}), node))
    assert "site switzerland sends no prototype: it has fewer than 31 training samples" in reason
    assert reason.startswith("switzerland: ") == (kind == HELLO)


def test_the_hello_of_a_real_site_refuses_folds_by_its_name() -> None:
    asked = Message(RecordDict(), 1001, HELLO)
    reason = reason_of(app(asked, table_node("va", val_folds=5)))
    assert reason.startswith("va: the run's split.val-folds choose which of this site's samples")
    assert "'allow-folds=true'" in reason
    refused = app(asked, table_node("va", val_folds=5))
    assert refused.error.code == ERROR_CODES["refused"]
    assert app(asked, table_node(3, val_folds=5)).has_content(), "a simulated site has no patients"


def test_a_site_with_a_folder_of_its_own_says_so_and_not_where(context: Node) -> None:
    asked = Message(RecordDict(), 1001, HELLO)
    reply = app(asked, context({"site": "s2a", "state-dir": "/private", "trust": "server"}))
    assert reply.content[CONFIG]["simulated"] is False
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
    measured = {tuple(key.split(".")[:2]) for key in reply.content[METRICS] if "." in key}
    assert measured == {("incoming", "val"), ("incoming", "test")}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"site": "s9z", "trust": "server"}, "s9z: there is no silo 's9z'"),
        ({"trust": "server"}, "partition unknown: the node config names no 'site'"),
        ({"partition-id": 3}, "partition 3: SuperNode 4 has no silo: there are 3 (s1a, s2a, s3a)"),
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
    assert reason_of(reply) == "KeyError (its text is in the site's own log)"


@pytest.mark.parametrize("kind", [HELLO, TRAIN, EVALUATE])
def test_the_text_of_a_foreign_error_stays_in_the_sites_own_log(
    context: Node, message: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("cannot convert '63,1,4,140'")

    logged = io.StringIO()
    handler, log = logging.StreamHandler(logged), logging.getLogger("flwr")
    monkeypatch.setattr("fedsilo.client_app.session.open_site", fail)
    log.addHandler(handler)
    try:
        reply = app(message(kind), context({"partition-id": 0}))
    finally:
        log.removeHandler(handler)
    assert reason_of(reply) == "ValueError (its text is in the site's own log)"
    assert "ValueError: cannot convert '63,1,4,140'" in logged.getvalue()


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
    assert reply.error.code == 2, "Flower's own of a client app that raised"


def test_the_app_is_loaded_without_the_methods_and_torch() -> None:
    code = "import sys, fedsilo.client_app; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert [m for m in loaded if m.startswith("fedsilo.client_app")] == [
        "fedsilo.client_app",
        "fedsilo.client_app.app",
        "fedsilo.client_app.site",
        "fedsilo.client_app.site.node",
        "fedsilo.client_app.site.trust",
    ]
    assert "torch" not in loaded
