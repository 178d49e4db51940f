"""The names of records, keys and metrics that server and sites exchange.

Every message has a ConfigRecord ``config`` (an ``Instruction``) and, if a method sends arrays, an
ArrayRecord ``arrays``. Every reply has a MetricRecord ``metrics`` with ``num-examples``,
``seconds`` and measurements named ``<model>.<split>.<metric>``. The model is ``incoming`` (the
model that came with the message) or ``trained`` (the model after local training).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fedsilo.core.errors import SiteError
from fedsilo.core.one_line import quote_value
from fedsilo.core.settings_schema import Value

ARRAYS = "arrays"
# The statistics (mean and std, float64) that standardise a table. The key keeps its old name,
# because earlier versions read it
STANDARDISED = "figures"
CONFIG = "config"
METRICS = "metrics"
SURVEYED = "survey"  # a site's answer to a survey
# This record names the site that must answer in a simulation, because a SuperNode has several
# sites. Its keys are those that Flower gives to SuperNodes: 'partition-id' and 'num-partitions'
SIMULATED_SITE = "simulated-site"

NUM_EXAMPLES = "num-examples"
SECONDS = "seconds"
PEAK_MEMORY = "peak-memory-bytes"
STEPS = "steps"  # optimiser steps that the site took for this reply
SAMPLES = "samples"  # samples in those steps; a sample in two steps counts twice
KEPT_STATE = "kept-state"  # 1 if the site has stored private state for this phase
DP_EPSILON = "dp-epsilon"  # epsilon that the site has spent in this run so far

# Prefix of an operation's name: the operation ran and is not deterministic
UNREPEATABLE = "unrepeatable."
# Prefix of an array that a site starts from, if the site then keeps its own network
START = "start/"
INCOMING = "incoming"
TRAINED = "trained"

_NOTE = "note."

# A run's name becomes a folder at the server and at every site. Without a '/' and without a '.' at
# the start it cannot lead out of the folder of runs
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{,127}")
RUN_NAME_WORDS = (
    "a plain name of at most 128 letters, digits, '.', '_', '+' and '-', the first of them a "
    "letter, a digit or '_'"
)

HELLO = "query.hello"
SURVEY = "query.survey"
TRAIN = "train"
DISTIL = "distil"
EVALUATE = "evaluate"
SECURE_KEYS = "secure-keys"  # phases around one whose weights are summed in secret
SECURE_SHARES = "secure-shares"
SECURE_AGREE = "secure-agree"
SECURE_UNMASK = "secure-unmask"
SECURING = frozenset({SECURE_KEYS, SECURE_SHARES, SECURE_AGREE, SECURE_UNMASK})
TRAINING = frozenset({TRAIN, DISTIL})  # phases where a site trains and measures its own model


@dataclass(frozen=True)
class Instruction:
    """One request from the server to a site.

    Attributes:
        round: the round that this message belongs to, from 1.
        phase: the phase of the round, one of the names above or a method's own.
        step: position of the phase in its round, from 0, which orders a site's stored states.
        run_name: name of the run; the site keeps its private state under this name.
        run_dir: run directory in a simulation, where sites without a state-dir keep their state;
            empty in a deployment.
        evaluate: whether to measure the incoming model.
        expects_state: ``state_key`` of the newest private state that the site has reported in this
            run, or 0 for none.
        returns: whether the reply must have arrays.
        notes: further values from the method, by name.
    """

    round: int
    phase: str
    step: int = 0
    run_name: str = ""
    run_dir: str = ""
    evaluate: bool = True
    expects_state: int = 0
    returns: bool = True
    notes: Mapping[str, Value] = field(default_factory=dict)

    def to_config(self) -> dict[str, Value]:
        """Convert this request of the server to the entries of a Flower ConfigRecord.

        Each attribute except ``notes`` becomes an entry of the same name, with '-' in place of '_'.
        Notes are further values from the method. Each note becomes an entry ``note.<name>``, whose
        name is not changed.
        """
        config = {name.replace("_", "-"): value for name, value in vars(self).items()}
        del config["notes"]
        for name, value in self.notes.items():
            config[f"{_NOTE}{name}"] = value
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], final: bool = False) -> Instruction:
        """Build the server's request to a site from the entries of a Flower ConfigRecord.

        Each entry ``note.<name>`` becomes a note, which is a further value from the method. Notes
        are not checked here. Other unknown keys are ignored.

        Args:
            config: the keys and values.
            final: whether this is the request for the final evaluation. The request then gets that
                phase, and the phase in ``config`` is ignored.

        Raises:
            SiteError: the run's name is not allowed, or a key is missing. The error for a missing
                key says that server and site run different versions.
            ValueError: the round, the step or 'expects-state' is not a whole number.
        """
        notes = {}
        for key, value in config.items():
            if key.startswith(_NOTE):
                notes[key.removeprefix(_NOTE)] = value
        # The name is checked first, because a hospital uses it in paths
        name = str(config.get("run-name", "_"))
        if not RUN_NAME.fullmatch(name):
            raise SiteError(
                f"a message's 'run-name' is {quote_value(name)}; it must be {RUN_NAME_WORDS}"
            )
        try:
            return cls(
                round=int(str(config["round"])),
                phase=EVALUATE if final else str(config["phase"]),
                step=int(str(config["step"])),
                run_name=str(config["run-name"]),
                run_dir=str(config["run-dir"]),
                evaluate=bool(config["evaluate"]),
                expects_state=int(str(config["expects-state"])),
                returns=bool(config["returns"]),
                notes=notes,
            )
        except KeyError as error:
            raise SiteError(
                f"a message lacks {error}: server and site run different versions of fedsilo"
            ) from None


# A round has far fewer phases than this, so the keys of two rounds never overlap
ROUND_KEYS = 10**6


def state_key(round_: int, step: int) -> int:
    """Return a number that orders a site's private states by round, then by step."""
    return ROUND_KEYS * round_ + step


def measurement(model: str, split: str, metric: str) -> str:
    """Return the MetricRecord key of a measurement, ``<model>.<split>.<metric>``."""
    return f"{model}.{split}.{metric}"


def measurements(metrics: Mapping[str, object]) -> Iterable[tuple[str, str, str, float]]:
    """Yield (model, split, metric, value) for each measurement in ``metrics``, sorted by key.

    The key of a measurement is ``<model>.<split>.<metric>``, in which only the metric may have
    dots. All other keys are skipped. Metrics that fedsilo does not know are yielded too, because a
    hospital uses this function to find the metrics that it withholds.

    Raises:
        ValueError: the value of a measurement is not a number.
    """
    for key in sorted(metrics):
        model, _, rest = key.partition(".")
        split, _, metric = rest.partition(".")
        if metric:
            yield model, split, metric, float(str(metrics[key]))


@dataclass(frozen=True)
class Notes:
    """Typed values that a method's server sends to its sites in addition to arrays.

    This base class has no values. A method that needs some derives a dataclass with one field per
    note. The class is next to the method's settings, and both server and site use it. In a message,
    each note is a plain value or JSON. A field that has a default may be missing there.
    """

    def to_values(self) -> dict[str, Value]:
        """Convert the notes to a mapping from the names of the fields to plain values.

        Notes are values that a method's server sends to its sites in addition to arrays. A number,
        string or bool stays unchanged, and any other value becomes a JSON string. The mapping is
        sent as ``Instruction.notes``.
        """
        values: dict[str, Value] = {}
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, Value):
                values[name] = value
            else:
                values[name] = json.dumps(value, sort_keys=True)
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> Self:
        """Build the notes from the mapping that ``to_values`` made.

        Notes are values that a method's server sends to its sites in addition to arrays. A missing
        note gets the default of its field. A value whose name is not that of a field is ignored.
        The value of a bool, int, float or str field is taken unchanged, without a check of its
        type. Any other value is parsed as JSON.

        Raises:
            SiteError: a note without a default is missing, or a value is not valid JSON. The error
                says that server and site run different versions.
        """
        notes: dict[str, Any] = {}
        try:
            for field in dataclasses.fields(cls):
                if field.name not in values:
                    continue
                value = values[field.name]
                # A field's type is a class, or its name where annotations are texts
                if getattr(field.type, "__name__", field.type) in ("bool", "int", "float", "str"):
                    notes[field.name] = value
                else:
                    notes[field.name] = json.loads(str(value))
            return cls(**notes)
        except (TypeError, ValueError) as error:
            raise SiteError(
                f"a message's notes cannot be read ({type(error).__name__}): server and site run "
                "different versions of fedsilo"
            ) from None
