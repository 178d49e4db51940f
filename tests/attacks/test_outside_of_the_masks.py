"""At ``trust: sums`` the patients decide nothing outside of the masks: the property, and its parts.

A hospital declares its data by a first hello. Whatever its patients are from then on, the same
messages get the same bytes: names, types and shapes of what is masked, everything else to the
letter, errors and their codes, and what its audit log says of what left.

The short form runs a few sequences. ``make fuzz`` runs ``FUZZ_TRIALS`` of them.
"""

import logging
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedsilo.core.messages import SECURE_AGREE, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping, rule_of
from fedsilo.server_app.config.settings import resolve
from tests.support.two_worlds import (
    RUN,
    SITES,
    VICTIM,
    WEIGHTS,
    Federation,
    known_randomness,
    table,
)

TRIALS = int(os.environ.get("FUZZ_TRIALS", "") or 1)
NUMBERS = (0.0, 1e-45, 1e-30, 1e-3, 1.0, 5.0, 1e3, 1e30, 1e38, 1e300, math.nan, math.inf, -1.0)
WHOLE = (0, 1, 2, 3, 7, 8, 16, 61, 64, 4096, 2**31, -1)
LOSSES = ("train.loss",)
METRICS = ("trained.train.loss", "incoming.test.loss", "incoming.test.accuracy", "steps", "x.y.z")


@dataclass(frozen=True)
class Step:
    """What the server does next."""

    kind: str  # of ``KINDS``
    weights: str = "zeros"  # of ``arrays_of``
    scale: float = 0.0
    metrics: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None  # in place of the run's, from here on
    round: int = 1
    returns: bool = True
    evaluate: bool = False


KINDS = (
    *("hello", "survey", "round", "round", "round", "evaluate", "twice"),
    *("no-keys", "unknown", "other-shapes", "begin-again"),
)


def value_of(key: str) -> st.SearchStrategy[Any]:
    """Draw a value of a setting, also such as its range excludes."""
    value = as_mapping(CommonSettings())[key]
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from(WHOLE) | st.integers(-1, 300)
    if isinstance(value, float):
        return st.sampled_from(NUMBERS) | st.floats(width=32)
    choices = rule_of(CommonSettings, key).choices or ()
    return st.sampled_from([*choices, "", "auto", "balanced", "1,1", "0.001,1", "../x", "nan"])


# A file that a run names is never opened, and how long a site may take is a matter of the clock
KEYS = sorted(as_mapping(CommonSettings()).keys() - {"run.name", "machine.threads", "plugin"})
CHANGES = st.lists(st.sampled_from(KEYS), max_size=3, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: value_of(key) for key in keys})
)
TRAINING = (
    "train.learning-rate",
    "train.batch-size",
    "train.local-epochs",
    "train.local-steps",
    "train.optimiser",
    "network.name",
)
TRAINING_CHANGES = st.lists(st.sampled_from(TRAINING), max_size=2, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: value_of(key) for key in keys})
)
STEPS = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    weights=st.sampled_from(("zeros", "random", "plane", "nan", "scaled")),
    scale=st.sampled_from(NUMBERS),
    metrics=st.lists(st.sampled_from(METRICS), max_size=2, unique=True).map(sorted).map(tuple),
    settings=st.none() | CHANGES | TRAINING_CHANGES,
    round=st.integers(1, 4),
    returns=st.sampled_from((True, True, True, False)),
    evaluate=st.booleans(),
)


def _rows(lines: list[str]) -> str:
    return "\n".join(["age,dose,ill", *lines, ""])


CELLS = st.sampled_from(("50", "1e30", "-1e38", "1e400", "", "nan", "x", "7.5", "0"))
PATIENTS = st.one_of(
    st.integers(0, 80).map(table),
    st.tuples(st.integers(0, 60), CELLS, CELLS, st.sampled_from(("0", "1", "2", ""))).map(
        lambda drawn: with_patient(*drawn)
    ),
    st.just(None),
    st.just("age,dose\n1,2\n"),
    st.just(_rows([f"{30 + i},{9},0" for i in range(61)])),
)


def with_patient(number: int, age: str, dose: str, ill: str) -> str:
    """Return the declared patients with one of them replaced."""
    lines = table().splitlines()
    lines[1 + number] = f"{age},{dose},{ill}"
    return "\n".join([*lines, ""])


def arrays_of(step: Step) -> dict[str, Any]:
    """Return the weights that a server sends: honest, crafted, or no numbers."""
    source = np.random.default_rng(3)
    arrays: dict[str, Any] = {}
    for name, shape in WEIGHTS.items():
        values = source.normal(size=shape)
        if step.weights == "zeros":
            values = np.zeros(shape)
        elif step.weights == "nan":
            values.flat[0] = math.nan
        elif step.weights == "scaled":
            with np.errstate(all="ignore"):
                values = values * step.scale
        elif step.weights == "plane" and name.endswith("weight"):
            values = np.array([[0.0, 0.0], [3e38, -1e38]])  # overflows beyond a plane
        with np.errstate(all="ignore"):
            arrays[name] = np.asarray(values, np.float32)
    return arrays


def play(federation: Federation, steps: list[Step]) -> None:
    """Send what the steps say."""
    config = resolve(RUN).as_mapping()
    for step in steps:
        if step.settings is not None:
            config = resolve(RUN).as_mapping() | step.settings
        asked = {"round": step.round, "run_name": "r", "evaluate": step.evaluate}
        arrays = arrays_of(step)
        if step.kind in ("hello", "survey"):
            federation.send(VICTIM, f"query.{step.kind}", config)
            continue
        if step.kind not in ("no-keys", "twice"):
            federation.secure(SECURE_KEYS, config, **asked)
            if set(federation.keys) == set(SITES):
                federation.secure(SECURE_SHARES, config, **asked)
        if step.kind == "begin-again":
            continue
        final = step.kind == "evaluate"
        if step.kind == "other-shapes":
            arrays["head.1.bias"] = np.zeros(3, np.float32)
        secure = {
            "round": step.round,
            "sites": list(SITES),
            "metrics": list(step.metrics),
            "arrays": [] if final else sorted(arrays),
        }
        asked |= {"returns": step.returns, "phase": "evaluate" if final else "train"}
        asked["phase"] = "nonsense" if step.kind == "unknown" else asked["phase"]
        for site in SITES:
            federation.send(site, "evaluate" if final else "train", config, arrays, secure, **asked)
        del asked["phase"], asked["returns"]
        federation.secure(SECURE_AGREE, config, **asked)
        federation.secure(SECURE_UNMASK, config, **asked)


def world(steps: list[Step], patients: str | None) -> tuple[list[Any], list[Any]]:
    """Return what leaves a hospital that has declared one table and now holds ``patients``."""
    with tempfile.TemporaryDirectory() as home:
        federation = Federation(Path(home))
        with known_randomness(federation.stream):
            for site in SITES:
                federation.send(site, "query.hello", resolve(RUN).as_mapping())
            federation.patients(VICTIM, patients)
            play(federation, steps)
        return federation.seen, federation.log()


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # thousands of tracebacks of the hospitals' own logs
    yield
    logging.disable(before)


PLAIN = [Step("round", metrics=("trained.train.loss",)), Step("evaluate", round=2)]


@settings(
    max_examples=TRIALS, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False
)
@given(st.lists(STEPS, min_size=1, max_size=3), PATIENTS, PATIENTS)
@example(PLAIN, table(), None)
@example(PLAIN, table(), with_patient(7, "1e30", "1e30", "1"))
@example([Step("round", "plane")], table(), with_patient(7, "9e9", "0", "1"))
def test_two_tables_of_patients_give_the_same_bytes_outside_of_the_masks(
    steps: list[Step], patients: str | None, others: str | None
) -> None:
    (seen, log), (also, also_logged) = world(steps, patients), world(steps, others)
    for number, (one, other) in enumerate(zip(seen, also, strict=True)):
        assert repr(one) == repr(other), f"message {number}"
    assert repr(log) == repr(also_logged)


def test_the_property_is_about_answers_too() -> None:
    """Rounds are answered to the end: the property does not hold because all is refused."""
    seen, log = world(PLAIN, table())
    answers = [answer for answer in seen if answer[0] != "error"]
    assert len(answers) == len(seen) == 11
    masked = answers[3][1]["arrays"]
    assert masked["head.1.weight"] == ("uint32", (2, 2))
    assert masked["secure/counts"] == ("uint32", (2,))
    assert [line["phase"] for line in log[1:6]] == [
        *("secure-keys", "secure-shares", "train"),
        *("secure-agree", "secure-unmask"),
    ]
