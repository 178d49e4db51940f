"""What both sides of the wire must agree on: the names of records, keys and metrics.

Every message carries a ConfigRecord ``config`` (an ``Instruction``) and, where a method sends
arrays, an ArrayRecord ``arrays``. Every reply carries a MetricRecord ``metrics`` with
``num-examples``, ``seconds`` and measurements named ``<model>.<split>.<metric>``, where the model
is ``incoming`` (the model as it was when the message came) or ``trained`` (after local training).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.one_line import quote_value
from fedsilo.models.contract.settings_schema import Value

ARRAYS = "arrays"
FIGURES = "figures"  # mean and std to standardise a table by, float64
CONFIG = "config"
METRICS = "metrics"
SURVEYED = "survey"  # a site's answer to a survey
# A simulation names the site that is to answer by this record, because a SuperNode has several. It
# has the keys by which Flower tells its own SuperNodes apart: 'partition-id' and 'num-partitions'
SIMULATED_SITE = "simulated-site"

NUM_EXAMPLES = "num-examples"
SECONDS = "seconds"
PEAK_MEMORY = "peak-memory-bytes"
STEPS = "steps"  # optimiser steps that the site took for this reply
SAMPLES = "samples"  # that those steps saw, each as often as it was seen
KEPT_STATE = "kept-state"  # 1 where the site has stored private state for this phase
DP_EPSILON = "dp-epsilon"  # what the site has spent of its patients' privacy in this run

UNREPEATABLE = "unrepeatable."  # before an operation's name: it was used, and not deterministic
START = "start/"  # before a name: what a site starts from that keeps its own network
INCOMING = "incoming"
TRAINED = "trained"

_NOTE = "note."

# A run's name, which names folders at the server and at its sites
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{,127}")
RUN_NAME_WORDS = (
    "a plain name of at most 128 letters, digits, '.', '_', '+' and '-', the first of them a "
    "letter, a digit or '_'"
)

# A site's name, which names folders, columns and metrics
SITE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")

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
TRAINING = frozenset({TRAIN, DISTIL})  # phases in which a site trains and measures its own model


@dataclass(frozen=True)
class Instruction:
    """What the server asks of a site.

    Attributes:
        round: the round that this message belongs to, from 1.
        phase: the phase of the round, see the strategy.
        step: position of the phase in its round, from 0; orders a site's stored states.
        run_name: names the run, and with it the site's private state.
        run_dir: run directory in simulation, where sites without a state-dir keep their state.
        evaluate: whether to measure the incoming model.
        expects_state: the newest private state of this run that the site has reported, as
            ``state_key``, or 0 for none.
        returns: whether the reply is to carry arrays.
        notes: what else a method tells its sites, by name.
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
        """Return the instruction as keys and values of a ConfigRecord."""
        said = {name.replace("_", "-"): value for name, value in vars(self).items()}
        del said["notes"]
        return said | {f"{_NOTE}{name}": value for name, value in self.notes.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Instruction:
        """Read an instruction back.

        Raises:
            SiteError: a key is missing, then server and site run different versions; or the run's
                name cannot be one.
        """
        if not RUN_NAME.fullmatch(name := str(config.get("run-name", "_"))):
            raise SiteError(
                f"a message's 'run-name' is {quote_value(name)}; it must be {RUN_NAME_WORDS}"
            )
        try:
            return cls(
                round=int(str(config["round"])),
                phase=str(config["phase"]),
                step=int(str(config["step"])),
                run_name=str(config["run-name"]),
                run_dir=str(config["run-dir"]),
                evaluate=bool(config["evaluate"]),
                expects_state=int(config["expects-state"]),
                returns=bool(config["returns"]),
                notes={
                    key.removeprefix(_NOTE): value
                    for key, value in config.items()
                    if key.startswith(_NOTE)
                },
            )
        except KeyError as error:
            raise SiteError(
                f"a message lacks {error}: server and site run different versions of fedsilo"
            ) from None


ROUND_KEYS = 10**6  # more than a round has phases


def state_key(round_: int, step: int) -> int:
    """Return one number for the private state of a phase, larger for later ones."""
    return ROUND_KEYS * round_ + step


def measurement(model: str, split: str, metric: str) -> str:
    """Return the MetricRecord key of a measurement."""
    return f"{model}.{split}.{metric}"


def measurements(metrics: Mapping[str, object]) -> Iterable[tuple[str, str, str, float]]:
    """Yield (model, split, metric, value) of every measurement among ``metrics``, sorted.

    A hospital decides by it what may not leave, so whatever looks like a measurement is one here,
    also with a name that ``metric_names``, the server's grammar, does not have.
    """
    for key in sorted(metrics):
        model, _, rest = key.partition(".")
        split, _, metric = rest.partition(".")
        if metric:
            yield model, split, metric, float(str(metrics[key]))


@dataclass(frozen=True)
class Notes:
    """Typed notes: what a method's server sends its sites in addition to arrays; here none.

    A method derives its own class next to its settings, and both ends use it. It has a field for
    each note, with a default if it may be missing; on the wire a plain value, or JSON.
    """

    def to_values(self) -> dict[str, Value]:
        """Return the notes as ``Instruction.notes`` carries them."""
        return {
            name: value if isinstance(value, Value) else json.dumps(value, sort_keys=True)
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> Self:
        """Read them back; a field that is missing has its default.

        Raises:
            SiteError: it has none, or one cannot be read; server and site run different versions.
        """
        plain = ("bool", "int", "float", "str")
        try:
            return cls(
                **{
                    field.name: values[field.name]
                    if getattr(field.type, "__name__", field.type) in plain  # a class, or its name
                    else json.loads(str(values[field.name]))
                    for field in dataclasses.fields(cls)
                    if field.name in values
                }
            )
        except (TypeError, ValueError) as error:
            raise SiteError(
                f"a message's notes cannot be read ({type(error).__name__}): server and site run "
                "different versions of fedsilo"
            ) from None
