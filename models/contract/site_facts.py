"""What a site says of itself at the start of a run: written and read back in one place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fedsilo.models.contract.feature_statistics import Sums

T = TypeVar("T")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SiteFacts:
    """Who a site is and what its silo holds (never a row of its data).

    Attributes:
        site: the site's name.
        distribution: the group that its data belong to.
        input_shape: shape of one input, without the batch.
        classes: number of classes.
        label_counts: per split, samples of each class.
        fingerprints: per split, the digest of its samples.
        simulated: a site of a simulation, without a folder of its own: it keeps its private state
            in the run directory, and only such a one is told where that is.
        features: names of a table's features.
        sums: those of a table's training rows, where figures are pooled.
        dropped: samples that were left out.
        schema: digest of a table's schema.
        backbone: digest of the weights that the network starts from.
        class_names: names of the classes, empty where there are none.
        floor: the site's 'sums-min-count', which its hospital may have raised: of fewer samples no
            mean leaves it.
        software: of a hospital, what it runs: versions, revision and device, by name.
        measured: the splits of which the site sends measurements; a hospital may withhold those of
            too few samples, or all of them.
    """

    site: str
    distribution: str
    input_shape: tuple[int, ...]
    classes: int
    label_counts: dict[str, list[int]]
    fingerprints: dict[str, str]
    simulated: bool = False
    features: tuple[str, ...] = ()
    sums: Sums | None = None
    dropped: int = 0
    schema: str = ""
    backbone: str = ""
    class_names: tuple[str, ...] = ()
    floor: int = 1
    measured: tuple[str, ...] = SPLITS
    software: dict[str, str] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Return the number of samples per split."""
        return {split: sum(counts) for split, counts in self.label_counts.items()}

    def held(self) -> list[str]:
        """Return the splits of which the site has samples and sends measurements."""
        return [split for split, size in self.sizes().items() if size and split in self.measured]

    def to_config(self) -> dict[str, Any]:
        """Return the facts as keys and values of a ConfigRecord."""
        config: dict[str, Any] = {
            "site": self.site,
            "distribution": self.distribution,
            "input-shape": list(self.input_shape),
            "classes": self.classes,
            "label-counts": json.dumps(self.label_counts),
            "fingerprints": json.dumps(self.fingerprints),
            "simulated": self.simulated,
            "features": json.dumps(self.features),
            "dropped": self.dropped,
            "schema": self.schema,
            "backbone": self.backbone,
            "class-names": json.dumps(self.class_names),
            "floor": self.floor,
            "measured": json.dumps(self.measured),
        }
        if self.software:
            config["software"] = json.dumps(self.software)
        if self.sums is not None:
            config |= {f"sums-{part}": values.tolist() for part, values in vars(self.sums).items()}
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SiteFacts:
        """Read the facts back.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: it is none, or one that
                cannot be; server and site then run different versions.
        """
        features = tuple(str(feature) for feature in json.loads(config["features"]))
        classes = _of(int, config, "classes")
        facts = cls(
            site=_of(str, config, "site"),
            distribution=_of(str, config, "distribution"),
            input_shape=tuple(int(length) for length in config["input-shape"]),
            classes=classes,
            label_counts=_label_counts(json.loads(config["label-counts"]), classes),
            fingerprints=json.loads(config["fingerprints"]),
            simulated=_of(bool, config, "simulated"),
            features=features,
            sums=_sums(config, len(features)),
            dropped=_of(int, config, "dropped"),
            schema=_of(str, config, "schema"),
            backbone=_of(str, config, "backbone"),
            class_names=tuple(str(name) for name in json.loads(config["class-names"])),
            floor=_of(int, config, "floor"),
            measured=_measured(json.loads(config["measured"])),
            software=_texts(json.loads(str(config.get("software", "{}")))),
        )
        facts.sizes()["train"]  # what every reply's weight is held against
        return facts


def _of(kind: type[T], config: Mapping[str, Any], key: str) -> T:
    value = config[key]
    if type(value) is not kind:
        raise TypeError(f"'{key}' is of type {type(value).__name__}, not {kind.__name__}")
    return value


def _texts(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise ValueError("'software' is no mapping of texts")
    return dict(given)


def _measured(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or any(split not in SPLITS for split in given):
        raise ValueError(f"'measured' names other splits than {', '.join(SPLITS)}")
    return tuple(split for split in SPLITS if split in given)


def _label_counts(given: Mapping[str, list[int]], classes: int) -> dict[str, list[int]]:
    for split, counts in given.items():
        if len(counts) != classes:
            raise ValueError(f"'label-counts' of {split} are {len(counts)} of {classes} classes")
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"'label-counts' of {split} are not whole numbers of 0 or more")
    return dict(given)


def _sums(config: Mapping[str, Any], features: int) -> Sums | None:
    if "sums-count" not in config:
        return None
    parts = {
        part: np.array([float(value) for value in config[f"sums-{part}"]])
        for part in ("count", "total", "squares")
    }
    for part, values in parts.items():
        if len(values) != features or not np.isfinite(values).all():
            raise ValueError(f"'sums-{part}' are not {features} finite numbers")
        if part != "total" and (values < 0).any():
            raise ValueError(f"'sums-{part}' has a number below 0")
    return Sums(**parts)
