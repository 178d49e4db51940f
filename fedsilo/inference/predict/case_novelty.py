"""Measures how far a case is from the training samples of its model that are on this machine.

It is computed where predictions are made, and nothing of it leaves. A table's rows are compared as
the network gets them, images by the network's penultimate features. A case is unusual if its score
is beyond a limit, which held-out samples decide. With 45 of them or more, at most 5 % of such
samples are unusual, nine times in ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.standardised import standardise_silo
from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.one_line import format_count
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.explanations.embeddings import penultimate, single_classifier
from fedsilo.models.measures.conformal import rows_needed
from fedsilo.models.measures.novelty import (
    FEWEST,
    Booleans,
    Familiar,
    Floats,
    Novelty,
    familiar,
    limit_of,
)
from fedsilo.runs.trained_model import TrainedModel

SHARE = 0.05  # share of held-out samples that may count as unusual
# Held-out samples from which the share holds nine times in ten, because 0.95^45 is below 0.1
_SURE = 45
# The most images whose features are computed, for training and for held-out samples each
_IMAGES = 300
_SITES = 50  # most sites whose samples are read


@dataclass(frozen=True)
class Reference:
    """The training data of a model, as far as this machine knows them."""

    sites: tuple[str, ...]  # sites whose samples are the reference
    known: Familiar
    limit: float | None  # the score beyond which a case is unusual; None: too few held-out samples
    held: int  # held-out samples that decided the limit
    split: str  # split of the held-out samples
    rows: Floats  # (n, f), a table's training rows as they were read, NaN where one is missing
    others: str  # a sentence on sites whose training data are unknown here, or empty

    def lines(self) -> list[str]:
        """Describe the reference and its gaps, a sentence each."""
        sites = ", ".join(self.sites)
        basis = f"novelty rests on {self.known.rows} training samples of {sites}"
        lines = [f"{basis}; {self._limit_text()}"]
        if self.others:
            lines.append(self.others)
        return lines

    def _limit_text(self) -> str:
        """Describe how the limit was set, or why there is none."""
        if self.limit is None:
            return (
                f"every case is answered, since a limit takes {rows_needed(1 - SHARE)} held-out "
                f"samples and here are {self.held}"
            )
        if self.held < _SURE:
            return (
                f"its limit is the highest score of {self.held} {self.split} samples: on average "
                f"{1 / (self.held + 1):.1%} of such samples are beyond it"
            )
        return (
            f"its limit on {self.held} {self.split} samples: nine times in ten at most {SHARE:.0%} "
            "of such samples are beyond it"
        )

    def novelty(self, inputs: Tensor, missing: Tensor | None = None) -> CaseNovelty:
        """Score the novelty of cases (k, f): rows as the network gets them, or image features.

        ``missing`` (k, f) says which values are imputed.
        """
        values = inputs.numpy().astype(np.float64)
        lacking = np.zeros(values.shape, bool)
        if missing is not None:
            lacking = missing.numpy()
        return CaseNovelty(self, self.known.novelty(values, lacking))

    def document(self) -> dict[str, Any]:
        """Describe the reference for JSON; no number comes from a single sample."""
        return {
            "sites": list(self.sites),
            "training samples": self.known.rows,
            "held-out samples": self.held,
            "held-out split": self.split,
            "limit": self.limit,
            "share beyond it": SHARE,
            "not known": self.others,
        }


@dataclass(frozen=True)
class CaseNovelty:
    """The novelty of k cases, measured against a reference."""

    reference: Reference
    found: Novelty

    def scores(self) -> Floats:
        """Return the scores (k,), divided by the limit if there is one: above 1 is unusual."""
        return self.found.score / (self.reference.limit or 1.0)

    def unusual(self) -> Booleans:
        """Mark the cases beyond the limit, bool (k,); without a limit, none."""
        limit = self.reference.limit
        if limit is None:
            limit = np.inf
        beyond: Booleans = self.found.score > limit
        return beyond

    def columns(self, features: Sequence[str]) -> list[tuple[str, ...]]:
        """List for each case the columns of a table whose value is beyond all training values."""
        limit = max(self.reference.limit or 1.0, 0.0)
        names = [name.partition("=")[0] for name in features]
        beyond = self.found.values[:, : len(names)] > limit
        # A column of levels has several features, but is named once
        return [tuple(dict.fromkeys(compress(names, row))) for row in beyond]

    def reasons(self, features: Sequence[str]) -> list[str]:
        """Explain for each case why it is unusual; empty if it is not."""
        limit, unusual = self.reference.limit or np.inf, self.unusual()
        texts = []
        for place, columns in enumerate(self.columns(features)):
            parts = []
            if columns:
                parts.append(f"beyond the training values: {', '.join(columns)}")
            if self.found.distance[place] > limit:
                parts.append("unlike any training sample")
            if self.found.missing[place] > limit:
                parts.append("lacks unusual values")
            if not unusual[place]:
                parts = []
            texts.append("; ".join(parts))
        return texts


def reference_of(model: TrainedModel, site: str | None) -> Reference | str:
    """Read the training samples of a model that are on this machine, or say why it is impossible.

    ``site`` names the site whose own model it is; None for the shared model, which was trained by
    all sites.
    """
    try:
        if not model.silo.features:
            single_classifier(model.network)
        silos = _silos_here(model, site)
    except SettingError as error:
        return str(error)
    # Validation samples if they are enough, so that test samples decide nothing
    split = "val"
    if sum(len(silo.splits()["val"]) for silo in silos) < rows_needed(1 - SHARE):
        split = "test"
    total = sum(len(silo.train) for silo in silos)
    if total < FEWEST:
        return f"{total} training samples are here, but {FEWEST} are needed"
    training = _samples(model, silos, "train")
    held = _samples(model, silos, split)
    known = familiar(training.values, training.missing, training.groups)
    scores = known.novelty(held.values, held.missing).score
    limit: float | None = limit_of(scores, SHARE)
    if limit == np.inf:  # too few held-out samples for any limit
        limit = None
    names = [silo.name for silo in silos]
    return Reference(
        sites=tuple(names),
        known=known,
        limit=limit,
        held=len(scores),
        split=split,
        rows=training.read,
        others=_others(model, names),
    )


@dataclass(frozen=True)
class _Samples:
    """Samples of all sites here, in the form in which novelty compares them."""

    values: Floats  # (n, f) standardised rows of a table, or features of images
    missing: Booleans  # (n, f) whether a value was missing
    groups: np.ndarray[Any, np.dtype[np.int64]] | None  # (n,) classes of images; None for a table
    read: Floats  # (n, f) rows of a table as they were read, with NaN; (n, 0) for images


def _silos_here(model: TrainedModel, site: str | None) -> list[Silo]:
    """Read the data of the sites that trained the model, as far as they are on this machine."""
    sites = [model.site]
    if not site and not model.own:
        sites = list(model.sites)[:_SITES]
    silos = []
    for name in sites:
        silo = _silo(model, name)
        if silo:
            silos.append(silo)
    return silos


def _silo(model: TrainedModel, site: str) -> Silo | None:
    """Read a site's samples; None if they are not here, or were changed since the run."""
    try:
        silo = model.lab.session.silo
        if site != model.site:
            silo = load_silo(site, model.common)
    except FedsiloError:
        return None
    # Samples that were added since the run are not what the model was trained on
    then = model.sites[site].get("fingerprints", {})
    for part, digest in then.items():
        if silo.fingerprints[part] != digest:
            return None
    return silo


def _samples(model: TrainedModel, silos: Sequence[Silo], split: str) -> _Samples:
    """Return the samples of a split of all silos."""
    if model.silo.standardisation is not None:
        return _table_samples(silos, model.silo.standardisation, split)
    return _image_samples(model, silos, split)


def _table_samples(
    silos: Sequence[Silo], standardisation: FeatureStatistics, split: str
) -> _Samples:
    read, ready = [], []
    for silo in silos:
        read.append(silo.splits()[split].inputs)
        ready.append(standardise_silo(silo, standardisation).splits()[split].inputs)
    values = torch.cat(ready).numpy().astype(np.float64)
    raw = torch.cat(read).numpy().astype(np.float64)
    return _Samples(values, np.isnan(raw), None, raw)


def _image_samples(model: TrainedModel, silos: Sequence[Silo], split: str) -> _Samples:
    network = model.network
    # The run's precision may be 16 bits, but distances need fp32
    exact = model.lab.compute.exact()
    each = max(1, _IMAGES // len(silos))

    def penultimate_features(images: Tensor) -> Tensor:
        return penultimate(network, network.encode(images))

    labels, parts = [], []
    for silo in silos:
        chosen = _spread(silo.splits()[split], each)
        labels.append(chosen.labels)
        if len(chosen):
            parts.append(over_batches(network, chosen.inputs, exact, penultimate_features))
    features = np.zeros((0, 1))
    if parts:
        features = torch.cat(parts).numpy().astype(np.float64)
    groups = torch.cat(labels).numpy()
    return _Samples(features, np.zeros(features.shape, bool), groups, features[:, :0])


def _spread(split: Split, count: int) -> Split:
    """Choose at most ``count`` samples of a split, evenly spread over it."""
    chosen = torch.linspace(0, len(split) - 1, min(count, len(split))).long()
    return Split(split.inputs[chosen], split.labels[chosen])


def _others(model: TrainedModel, sites: Sequence[str]) -> str:
    """Describe the sites whose training data are unknown here; empty if there are none."""
    others = [site for site in model.sites if site not in sites]
    # No other site has trained a site's own model
    if not others or model.own:
        return ""
    level = model.common.trust
    kept = "nothing of theirs"
    if model.silo.features and model.common.standardise == "pooled":
        kept = "of theirs only the mean and standard deviation of all sites together"
    return (
        f"not known here is what {format_count(len(others), 'other site')} trained on: the run, "
        f"made for trust {level}, keeps {kept}"
    )
