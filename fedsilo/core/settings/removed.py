"""Settings, commands and options that earlier versions had, with their replacements.

A config.toml of an earlier version names every setting, even those that its run never changed. A
removed setting is therefore dropped if it has its former default, because the run does not depend
on it. Any other value is refused.

Until 0.1 the settings that all methods share had no groups. Their former names are still read, and
a command that reads any of them prints one note with the new names.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, key_of, keys_of

V = TypeVar("V")


@dataclass(frozen=True)
class Removed:
    """A setting that no longer exists.

    Attributes:
        default: the setting's former default.
        instead: what to do without the setting, as an imperative.
        decides_state: whether the setting decided how a site's private state is read. If so, its
            default still counts in the digest of ``private_state``, so that earlier states open.
    """

    default: Value
    instead: str
    decides_state: bool = False


_NO_QUORUM = (
    "use 'run.min-sites' and 'run.reply-timeout', which let a round go on without slow sites"
)
_BF16 = "use 'server.wire-precision' bf16, which halves the bytes of an update"
_UEFL = "leave it out, which is the paper's way; docs/results/uefl.md has what was found"
_PAPER = "leave it out: this version has the paper's way only"

SETTINGS: Mapping[str, Removed] = {
    "round-quorum": Removed(1.0, _NO_QUORUM),
    "late-replies": Removed("drop", _NO_QUORUM),
    "speeds": Removed("", _NO_QUORUM),
    "wire-top-k": Removed(1.0, _BF16),
    "wire-feedback": Removed(True, _BF16),
    "secure-bits": Removed(0, "leave it out: numbers of a secure sum have as many bits as fit"),
    "secure-samples": Removed(
        16384, "leave it out: each hospital's site file has it, because no run may change it"
    ),
    "join-timeout": Removed(60.0, "leave it out: the server waits a minute for 'run.min-sites'"),
    "minimum-delta": Removed(0.0, "use 'server.patience'"),
    "track-detail": Removed("means", "read the sites' rows in metrics.csv and traffic.csv"),
    "aggregation-faulty": Removed(
        1, "use 'server.aggregation' median, which bears almost half of them"
    ),
    "uefl.codebook-weight": Removed(1.0, _UEFL, decides_state=True),
    "uefl.commitment-weight": Removed(0.25, _UEFL, decides_state=True),
    "uefl.commitment-rounds": Removed(0, _UEFL, decides_state=True),
    "uefl.codebooks": Removed("shared", _UEFL, decides_state=True),
    "uefl.codeword-update": Removed("gradient", _UEFL, decides_state=True),
    "uefl.codeword-decay": Removed(0.99, _UEFL, decides_state=True),
    "uefl.dead-codes": Removed("keep", _UEFL, decides_state=True),
    "uefl.books-used": Removed("all", _UEFL, decides_state=True),
    "distrans.offset-alpha": Removed(0.2, _PAPER, decides_state=True),
    "distrans.embedding-learning-rate": Removed(0.01, _PAPER, decides_state=True),
    "moon.projection-size": Removed(256, _PAPER, decides_state=True),
    "fedadam.beta1": Removed(0.9, _PAPER, decides_state=True),
    "picsr.router-weight-decay": Removed(0.0, _PAPER, decides_state=True),
    "picsr.embedding": Removed("linear", _PAPER, decides_state=True),
    "picsr.train-experts": Removed(False, _PAPER, decides_state=True),
    "picsr.prototype-noise": Removed(0.0, _PAPER, decides_state=True),
    "fedaligncl.curriculum-sampling": Removed("permutation", _PAPER, decides_state=True),
    "fedaligncl.count-forgotten": Removed(False, _PAPER, decides_state=True),
    "fedaligncl.discriminator-learning-rate": Removed(0.0, _PAPER, decides_state=True),
    "fedaligncl.weighting": Removed("equal", _PAPER, decides_state=True),
    "fedefm.distillation-direction": Removed("forward", _PAPER, decides_state=True),
    "fedefm.student": Removed("own", _PAPER, decides_state=True),
    "fedefm.visitors": Removed("fresh", _PAPER, decides_state=True),
    "fedefm.teacher-weight": Removed("sum", _PAPER, decides_state=True),
}

# Removed choices of settings that still exist: (key, value) -> replacement
CHOICES: Mapping[tuple[str, Value], str] = {
    ("server.wire-precision", "int8"): _BF16,
}

# Names of 0.1, before settings had groups -> today's keys
RENAMED: Mapping[str, str] = {
    key_of(name): key for name, key in keys_of(CommonSettings).items() if key_of(name) != key
}
# Settings that came after 0.1, with the default under which a run is as it was without them.
# Checkpoints and private states of earlier runs lack them
ADDED: Mapping[str, Value] = {
    "fedefm.emd-gradient": False,
    "glm.ties": "efron",
    "glm.time": "",
    "plugin-digests": "",
    "server.sites": "",
    "task": "classification",
    "train.dice-weight": 1.0,
}

_READ_UNTIL = "0.3"
_FORMER = {key: former for former, key in RENAMED.items()}

_PICTURE = "use 'fedsilo compare EXPERIMENT ... --picture FILE.png'"
_MANIFESTS = "use docs/examples/manifests.py"
_PRINT = "open the page in a browser and print it to a PDF"

# Removed commands, which are also functions of the API: name -> replacement
COMMANDS: Mapping[str, str] = {
    "sweep": "use docs/examples/over_a_setting.py, ten lines of pandas",
    "against": "use docs/examples/over_a_setting.py, ten lines of pandas",
    "bars": _PICTURE,
    "benchmark": "use 'python -m benchmarks.ranking' in a checkout",
}

# Removed options: (command, option or argument, some with a value) -> replacement
OPTIONS: Mapping[tuple[str, str], str] = {
    ("report", "--pdf"): _PRINT,
    ("predict", "--pdf"): _PRINT,
    ("monitor", "--pdf"): _PRINT,
    ("manifest", "inbreast"): _MANIFESTS,
    ("manifest", "cbis-ddsm"): _MANIFESTS,
    ("manifest", "ranzcr"): _MANIFESTS,
    ("export", "--format monai"): "use '--format pt2' or '--format onnx'",
}


def former_defaults(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return the former defaults of the removed settings that private states depend on, by key.

    A private state has the arrays that a site keeps for itself between messages. It is stored with
    a digest of the settings, which the site compares before it opens the state. The digest still
    includes removed settings by their defaults, so that a site can open the states of earlier
    versions.

    Only removed settings that are marked ``decides_state`` are returned. The part of a key before
    the dot is its group. A removed setting with a group is returned only if a key in ``settings``
    has the same group.

    Args:
        settings: today's settings by key.
    """
    groups = {key.partition(".")[0] for key in settings if "." in key}
    former: dict[str, Value] = {}
    for key, removed in SETTINGS.items():
        group, dot, _ = key.partition(".")
        if removed.decides_state and (not dot or group in groups):
            former[key] = removed.default
    return former


class _Notes:
    """The former names of settings that this process has read, so that one note can list all."""

    def __init__(self) -> None:
        self._unsaid: dict[str, str] = {}
        self._said: set[str] = set()

    def add(self, former: str, key: str) -> None:
        """Record that a former name was read, if no note has named it yet."""
        if former not in self._said:
            self._unsaid[former] = key

    def tell(self) -> None:
        """Log one warning with the former names of settings that were read since the last warning.

        Each name is listed with its new key, and only once per process. Nothing is logged if no
        further names were read.
        """
        if not self._unsaid:
            return
        pairs = ", ".join(f"'{former}' is now '{key}'" for former, key in self._unsaid.items())
        names = "the old name is" if len(self._unsaid) == 1 else "the old names are"
        logging.getLogger("flwr").warning(
            "fedsilo: note: %s; %s read until %s", pairs, names, _READ_UNTIL
        )
        self._said |= self._unsaid.keys()
        self._unsaid.clear()


_notes = _Notes()


def tell_renamed() -> None:
    """Log one note about the former names that were read since the last note."""
    _notes.tell()


def with_current_keys(
    values: Mapping[str, V], where: str = "", *, quietly: bool = False
) -> dict[str, V]:
    """Return a copy of ``values`` with today's keys in place of former names of settings.

    A former name is accepted, and noted for the warning that ``tell_renamed`` logs later. Keys that
    are not former names are not checked.

    Args:
        values: settings by key, or other values by the key of a setting.
        where: the file that the settings come from, for errors; empty if the user typed them.
        quietly: whether to leave former names out of that warning. A run's record is read quietly,
            because users cannot change it.

    Raises:
        SettingError: ``values`` has both the former name and today's key of one setting.
    """
    current = {}
    for name, value in values.items():
        key = RENAMED.get(name, name)
        if key != name and key in values:
            raise SettingError(
                f"{_prefix_of(where)}'{name}' is the old name of '{key}', but both are given: "
                f"remove '{name}'"
            )
        if key != name and not quietly:
            _notes.add(name, key)
        current[key] = value
    return current


def with_former_keys(values: Mapping[str, Value]) -> dict[str, Value]:
    """Replace today's keys by their names in version 0.1, for digests that must not change.

    Keys that have no such name stay.
    """
    return {_FORMER.get(key, key): value for key, value in values.items()}


def current_settings(
    values: Mapping[str, Value], where: str = "", *, quietly: bool = False
) -> dict[str, Value]:
    """Convert settings of an earlier version to today's keys, and drop removed settings.

    A removed setting is dropped only if it has its former default. Unknown settings stay.

    Args:
        values: settings by key.
        where: the file that the settings come from, for errors; empty if the user typed them.
        quietly: whether to leave former names out of the warning that ``tell_renamed`` logs. A
            run's record is read quietly, because users cannot change it.

    Raises:
        SettingError: a removed setting does not have its former default, a setting has a value that
            is no longer allowed, or a setting is given by its former name and by today's key.
    """
    remaining = {}
    for key, value in with_current_keys(values, where, quietly=quietly).items():
        # A former mapping such as 'speeds' also stands there as 'speeds.va'
        removed = SETTINGS.get(key) or SETTINGS.get(key.partition(".")[0])
        # A file's value may be a list, for example, which cannot be a key of a mapping
        if isinstance(value, str) and (key, value) in CHOICES:
            raise SettingError(
                f"{_prefix_of(where)}setting '{key}' no longer takes {quote_value(value)}: "
                f"{CHOICES[key, value]}"
            )
        if removed is None:
            remaining[key] = value
        elif value != removed.default:
            raise SettingError(
                f"{_prefix_of(where)}setting '{key}' is {quote_value(value)}, but this version of "
                f"fedsilo has no such setting: {removed.instead}"
            )
    return remaining


def _prefix_of(where: str) -> str:
    return f"{where}: " if where else ""
