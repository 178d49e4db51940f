from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, RecordDict

from fedsilo.models.contract.errors import EpsilonSpentError, RefusedError, SiteError
from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.strategies.loop.phase import Phase
from fedsilo.strategies.loop.reply_checks import needed_metrics, refusal, refuse_too_few
from fedsilo.strategies.loop.state import ArraySpec

Content = Callable[..., RecordDict]
SPEC = {"w": ArraySpec((2, 3))}
GOOD = np.zeros((2, 3), np.float32)
NAN = float("nan")


def test_a_reply_that_keeps_the_contract_is_not_refused(content: Content) -> None:
    assert refusal(content({"w": GOOD}, **{"incoming.val.loss": 0.3}), SPEC) is None


def test_a_reply_of_metrics_alone_is_fine_where_no_array_is_expected(content: Content) -> None:
    assert refusal(content(), {}) is None


def test_a_reply_of_many_records_is_refused(content: Content) -> None:
    reply = content({"w": GOOD})
    for number in range(20):
        reply[f"arrays{number}"] = reply["arrays"]
    told = "21 records of arrays, more than 16: was it altered?"
    assert refusal(reply, SPEC) == told


def test_a_reply_without_metrics_is_refused(content: Content) -> None:
    reply = content({"w": GOOD})
    del reply["metrics"]
    assert refusal(reply, SPEC) == "the reply has no metrics"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"num_examples": None}, "metric 'num-examples' is missing"),
        ({"seconds": None}, "metric 'seconds' is missing"),
        ({"peak_memory_bytes": None}, "metric 'peak-memory-bytes' is missing"),
        ({"num_examples": 0}, "'num-examples' is 0, less than 1"),
        ({"num_examples": -4}, "'num-examples' is -4, less than 1"),
        ({"loss": NAN}, "metric 'loss' is nan"),
        ({"loss": float("inf")}, "metric 'loss' is inf"),
        ({"loss": [0.1, 0.2]}, "metric 'loss'"),
        ({"num_examples": NAN}, "metric 'num-examples' is nan"),
    ],
)
def test_bad_metrics_are_refused_by_name(
    content: Content, metrics: dict[str, Any], said: str
) -> None:
    assert said in str(refusal(content({"w": GOOD}, **metrics), SPEC))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (None, "missing ['w'], surplus []"),
        ({}, "missing ['w'], surplus []"),
        ({"v": GOOD}, "missing ['w'], surplus ['v']"),
        ({"w": GOOD, "v": GOOD}, "missing [], surplus ['v']"),
        ({"w": GOOD.T}, "array 'w' is float32 (3, 2), expected float32 (2, 3)"),
        ({"w": GOOD[None]}, "array 'w' is float32 (1, 2, 3)"),
        ({"w": np.float32(0)}, "array 'w' is float32 ()"),
        ({"w": GOOD.astype(np.float64)}, "array 'w' is float64 (2, 3), expected float32"),
        ({"w": GOOD.astype(np.int32)}, "array 'w' is int32"),
        ({"w": GOOD * np.float32(NAN)}, "array 'w' holds values that are not finite"),
        ({"w": GOOD + np.float32(np.inf)}, "array 'w' holds values that are not finite"),
    ],
)
def test_bad_arrays_are_refused_by_name(
    content: Content, arrays: dict[str, Any] | None, said: str
) -> None:
    assert said in str(refusal(content(arrays), SPEC))


def test_a_metric_that_the_phase_needs_is_asked_for_by_name(content: Content) -> None:
    reply = content({"w": GOOD}, loss=0.5)
    assert refusal(reply, SPEC, ["loss"]) is None
    assert refusal(reply, SPEC, ["loss", "entropy"]) == "metric 'entropy' is missing"


def packed(array: Any, **changes: Any) -> Array:
    """Return an array on the wire whose record says something else of it than its payload."""
    good = Array(array)
    told = {"dtype": good.dtype, "shape": good.shape, "stype": good.stype, "data": good.data}
    return Array(**{**told, **changes})


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (packed(GOOD, data=b"no array at all"), "array 'w' cannot be unpacked: "),
        (packed(GOOD, data=b""), "array 'w' cannot be unpacked: "),
        (packed(GOOD, data=Array(GOOD).data[:-5]), "array 'w' cannot be unpacked: "),
        (packed(GOOD, stype="pickle"), "array 'w' cannot be unpacked: "),
        (
            packed(GOOD.astype(np.float64), dtype="float32"),
            "array 'w' is float64 (2, 3), expected float32 (2, 3)",
        ),
        (
            packed(np.zeros((4, 3), np.float32), shape=(2, 3)),
            "array 'w' is float32 (4, 3), expected float32 (2, 3)",
        ),
    ],
)
def test_what_counts_is_the_payload_not_what_its_record_says(
    content: Content, array: Array, said: str
) -> None:
    reply = content({"w": GOOD})
    reply["arrays"]["w"] = array
    assert said in str(refusal(reply, SPEC))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_none_in_a_spec_stands_for_any_length_and_only_there(content: Content, rows: int) -> None:
    spec = {"w": ArraySpec((None, 3))}
    assert refusal(content({"w": np.zeros((rows, 3), np.float32)}), spec) is None
    told = refusal(content({"w": np.zeros((rows, 4), np.float32)}), spec)
    assert "expected float32 ('any', 3)" in str(told)


@pytest.mark.parametrize("payload", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00\x10\x00{(((\n"])
def test_bytes_that_are_no_array_are_a_refusal_and_not_a_crash(
    payload: bytes, content: Content
) -> None:
    reply = content({"w": GOOD})
    bad = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=payload)
    reply.array_records["arrays"]["w"] = bad
    reason = refusal(reply, SPEC)
    assert reason is not None
    assert reason.startswith("array 'w' cannot be unpacked")
    assert "\n" not in reason


ON_VAL = [f"incoming.val.{metric}" for metric in ("accuracy", "entropy", "loss")]
ON_TEST = [f"incoming.test.{metric}" for metric in ("accuracy", "entropy", "loss")]
LOSS = "trained.train.loss"


@pytest.mark.parametrize(
    ("phase", "measures", "held", "needed"),
    [
        (TRAIN, True, ["train", "val", "test"], [LOSS, *ON_VAL, *ON_TEST]),
        (TRAIN, True, ["train", "test"], [LOSS, *ON_TEST]),
        (TRAIN, True, ["train"], [LOSS]),
        (TRAIN, False, ["train", "val", "test"], [LOSS]),
        (EVALUATE, False, ["train", "val", "test"], [*ON_VAL, *ON_TEST]),
        (EVALUATE, True, ["train", "val"], ON_VAL),
        (EVALUATE, True, ["train"], []),
        ("centroids", True, ["train", "val", "test"], []),
    ],
)
def test_a_reply_owes_what_its_phase_measures_on_what_the_site_holds(
    phase: str, measures: bool, held: list[str], needed: list[str]
) -> None:
    assert needed_metrics(Phase(phase, 1, measures=measures), held) == needed


@pytest.mark.parametrize(
    ("answered", "failed", "min_sites"),
    [
        (3, {}, 0),
        (2, {"c": "gone"}, 2),
        (1, {}, 3),  # a phase that asked a single site
    ],
)
def test_enough_answers_are_enough(answered: int, failed: dict[str, str], min_sites: int) -> None:
    refuse_too_few(Phase(TRAIN, 4), answered, failed, min_sites)


@pytest.mark.parametrize(("min_sites", "least"), [(0, 4), (3, 3), (9, 4)])
def test_too_few_answers_are_refused_with_each_reason_once(min_sites: int, least: int) -> None:
    failed = {"a": "gone", "b": "full", "c": "gone"}
    told = (
        "^site a, site c, round 4, phase train: gone; site b, round 4, phase train: full -- "
        rf"1 of 4 sites answered and {least} are needed \('min-sites'\)"
    )
    with pytest.raises(SiteError, match=told):
        refuse_too_few(Phase(TRAIN, 4), 1, failed, min_sites)


def test_at_the_end_of_a_run_a_site_whose_epsilon_is_spent_owes_no_measurements() -> None:
    def phase(name: str) -> Phase:
        return Phase(name, 4, codes={"a": EpsilonSpentError.code, "b": RefusedError.code})

    refuse_too_few(phase(EVALUATE), 2, {"a": "epsilon is spent"}, 0)
    refuse_too_few(phase(EVALUATE), 0, {"a": "epsilon is spent"}, 1)
    with pytest.raises(SiteError, match="3 are needed"):
        refuse_too_few(phase(TRAIN), 2, {"a": "epsilon is spent"}, 0)
    with pytest.raises(SiteError, match="2 are needed"):
        refuse_too_few(phase(EVALUATE), 1, {"a": "epsilon is spent", "b": "refused"}, 0)
