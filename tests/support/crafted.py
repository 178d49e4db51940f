"""What a server may say to a hospital that trusts nobody: settings, weights, messages, patients.

All of it is drawn by hypothesis, over the whole range of each setting, whatever its rule says.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import EVALUATE, HELLO, SURVEY, TRAIN
from fedsilo.core.methods import METHODS, settings_class, why_not_private
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build, defaults
from fedsilo.models.methods.moon import build_projection
from tests.support.attackers.planes import FEATURES, WAYS
from tests.support.neighbours import Patient, Question

WIDTH = 4
EXTREMES = (
    *(0.0, -0.0, 1.0, -1.0, 5e-324, 1e-45, 1e-38, 1e-36, 1e-28, 1e-7, 1e-6, 1e6, 1e7, 1e30, 1e38),
    *(3.4e38, 1e154, 1.7e308, float("nan"), float("inf"), float("-inf")),
)
ANY_NUMBER = st.one_of(st.sampled_from(EXTREMES), st.floats(), st.floats(0.01, 10.0))
# Mostly what gets as far as the arithmetic
NUMBER = st.one_of(st.floats(0.05, 5.0), st.floats(0.05, 5.0), ANY_NUMBER)
METHODS_HERE = sorted(
    name for name in METHODS if why_not_private(name) is None and name not in ("distrans", "mix")
)
_SHAPES = {
    "encoder.layers.0.weight": (WIDTH, FEATURES),
    "encoder.layers.0.bias": (WIDTH,),
    "head.1.weight": (2, WIDTH),
    "head.1.bias": (2,),
}
# Settings of a run that scale, weigh or lengthen what patients do
_SCALES = (
    *(
        "privacy.sample-clip-norm",
        "privacy.noise-multiplier",
        "privacy.statistics-clip-norm",
        "privacy.statistics-noise",
    ),
    *("train.learning-rate", "train.weight-decay", "privacy.max-epsilon", "secure.clip-norm"),
)


@dataclass(frozen=True)
class Case:
    """A run, a patient and messages."""

    method: str
    run: dict[str, Any]  # settings, whatever a server's own command says of them
    open_limits: bool  # whether the hospital takes any bound and noise
    patient: Patient
    questions: list[Question]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a case."""
    method = draw(st.sampled_from(METHODS_HERE))
    run: dict[str, Any] = {
        "network.name": "mlp",
        "network.width": WIDTH,
        "network.dropout": 0.0,
        "train.optimiser": draw(st.sampled_from(["sgd", "adam", "adamw", "rmsprop"])),
        "train.batch-size": draw(st.sampled_from([8, 16, 64, 2**20])),
        "train.local-steps": draw(st.integers(2, 4)),
        "train.loss": draw(st.sampled_from(["cross-entropy", "cross-entropy", "evidential"])),
        "machine.precision": draw(st.sampled_from(["fp32", "fp32", "bf16"])),
    }
    if run["train.loss"] != "evidential" and draw(st.booleans()):
        first, second = draw(NUMBER), draw(NUMBER)
        run["train.class-weights"] = f"{abs(first):g},{abs(second):g}"
    if method == "uefl":
        own = {"uefl.codes": 2, "uefl.codeword-start": "gaussian", "uefl.refresh": "none"}
        run |= own
    if method == "fedrep":
        run["train.local-steps"] = 4
    for key in draw(st.sets(st.sampled_from(_SCALES), max_size=3)):
        run[key] = draw(_numbers(CommonSettings, key))
    own = settings_class(method)
    for key, value in defaults(own).items():
        if type(value) is float and draw(st.integers(0, 2)) == 0:
            run[key] = draw(_numbers(own, key))
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)
    patient = Patient(
        draw(st.sampled_from(["train", "train", "train", "test", "val"])),
        draw(st.integers(0, 23)),
        draw(st.lists(st.one_of(st.floats(-3, 3), values), min_size=FEATURES, max_size=FEATURES)),
        draw(st.integers(0, 1)),
    )
    questions = [draw(_questions(method, number + 1)) for number in range(draw(st.integers(1, 3)))]
    return Case(method, run, draw(st.booleans()), patient, questions)


@st.composite
def _numbers(draw: st.DrawFn, cls: type, key: str) -> float:
    """Return a number for a setting, one in eight times whatever its rule says."""
    number = draw(NUMBER)
    try:
        build(cls, {key: number})
    except SettingError:
        if draw(st.integers(0, 7)):
            return float(defaults(cls)[key])
    return number


@st.composite
def _questions(draw: st.DrawFn, method: str, round_: int) -> Question:
    kind = draw(st.sampled_from([HELLO, *[TRAIN] * 8, EVALUATE, EVALUATE, SURVEY]))
    if kind in (HELLO, SURVEY):
        return Question(kind)
    phases = ["train"] * 20 + ["uncertainty", "centroids", "measured", "distil", "no-such-phase"]
    asked: dict[str, Any] = {
        "round": draw(st.sampled_from([round_, round_, round_, round_, round_, 1, 7])),
        "phase": draw(st.sampled_from(phases)),
        "evaluate": draw(st.booleans()),
        "returns": draw(st.sampled_from([True, True, False])),
    }
    if method == "picsr":
        asked["notes"] = {"stage": draw(st.sampled_from(["warmup", "experts"]))}
    return Question(kind, draw(_arrays(method)), asked)


@st.composite
def _arrays(draw: st.DrawFn, method: str) -> dict[str, Any] | None:
    """Return weights: honest ones, or of numbers that overflow, vanish or are none."""
    if draw(st.integers(0, 9)) == 0:
        return None
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = {name: draw(st.one_of(st.just(1.0), ANY_NUMBER)) for name in _SHAPES}
    if draw(st.booleans()):
        scale = dict.fromkeys(_SHAPES, draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0, 10.0])))
    with np.errstate(all="ignore"):
        weights = {
            name: (scale[name] * rng.normal(size=shape)).astype(np.float32)
            for name, shape in _SHAPES.items()
        }
    sent = named(method, weights, rng)
    if method == "scaffold":
        control = float(draw(st.one_of(st.just(0.0), ANY_NUMBER)))
        with np.errstate(all="ignore"):
            sent |= {f"control/{n}": np.full(s, control, np.float32) for n, s in _SHAPES.items()}
    if method in ("fedproto", "feddistill") and draw(st.booleans()):
        prefix, size = ("prototype/", WIDTH) if method == "fedproto" else ("logits/", 2)
        far = float(draw(ANY_NUMBER))
        with np.errstate(all="ignore"):
            sent |= {f"{prefix}{k}": np.full(size, far, dtype=np.float32) for k in range(2)}
    return sent


def honest_arrays(method: str) -> dict[str, Any]:
    """Return arrays of a method with weights as a run begins."""
    rng = np.random.default_rng(1)
    weights = {name: 0.3 * rng.normal(size=shape) for name, shape in _SHAPES.items()}
    sent = named(method, weights, rng)
    if method == "scaffold":
        sent |= {f"control/{name}": np.zeros(shape) for name, shape in _SHAPES.items()}
    return {name: np.asarray(array, dtype=np.float32) for name, array in sent.items()}


def named(method: str, weights: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return weights by the names under which a method takes them, with what else it wants."""
    way = WAYS.get(method)
    to = way.to if way else "start/"
    sent = {f"{to}{name}": array for name, array in weights.items()}
    if way and way.personal:
        sent |= {f"start/{name}": array for name, array in weights.items() if "head" in name}
    if method == "moon":
        head = build_projection(0, WIDTH).state_dict()
        sent |= {f"projection/{name}": array.numpy() for name, array in head.items()}
    if method == "uefl":
        sent["codebook.0"] = rng.normal(size=(2, WIDTH)).astype(np.float32)
    return sent
