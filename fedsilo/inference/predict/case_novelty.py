"""Whether a case is like those that a model was trained on, by the training samples that are here.

It is computed where predictions are made and nothing of it leaves. A table's rows are compared as
the network gets them, images by the network's penultimate features. Samples that nobody trained on
decide from which score on a case is unusual: of 45 and more, nine times in ten at most 5 % are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.standardised import standardise_silo
from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.one_line import counted
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
_SURE = 45  # held-out samples: as 0.95^45 is below 0.1, one is beyond the share nine times in ten
_IMAGES = 300  # most images whose features are computed, each for training and held-out samples
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
        limit = (
            f"its limit on {self.held} {self.split} samples: nine times in ten at most {SHARE:.0%} "
            "of such samples are beyond it"
        )
        if self.held < _SURE:
            limit = (
                f"its limit is the highest score of {self.held} {self.split} samples: on average "
                f"{1 / (self.held + 1):.1%} of such samples are beyond it"
            )
        if self.limit is None:
            limit = (
                f"every case is answered, since a limit takes {rows_needed(1 - SHARE)} held-out "
                f"samples and here are {self.held}"
            )
        sites = ", ".join(self.sites)
        basis = f"novelty rests on {self.known.rows} training samples of {sites}; {limit}"
        return [basis, self.others] if self.others else [basis]

    def novelty(self, inputs: Tensor, missing: Tensor | None = None) -> CaseNovelty:
        """Score the novelty of cases (k, f): rows as the network gets them, or image features.

        ``missing`` (k, f) says which values are imputed.
        """
        values = inputs.numpy().astype(np.float64)
        lacking = np.zeros(values.shape, bool) if missing is None else missing.numpy()
        return CaseNovelty(self, self.known.novelty(values, lacking))

    def document(self) -> dict[str, Any]:
        """Return it for JSON; nothing of it is one sample's."""
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
    """How new each of k cases is, by a reference."""

    reference: Reference
    found: Novelty

    def scores(self) -> Floats:
        """Return (k,) scores, in units of the limit where there is one: above 1 is unusual."""
        return self.found.score / (self.reference.limit or 1.0)

    def unusual(self) -> Booleans:
        """Mark the cases beyond the limit, bool (k,); without a limit, none."""
        limit = self.reference.limit
        beyond: Booleans = self.found.score > (np.inf if limit is None else limit)
        return beyond

    def columns(self, features: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the columns of a table whose values are beyond all training values, per case."""
        limit = max(self.reference.limit or 1.0, 0.0)
        names = [name.partition("=")[0] for name in features]
        beyond = self.found.values[:, : len(names)] > limit
        return [
            tuple(dict.fromkeys(name for name, odd in zip(names, row, strict=True) if odd))
            for row in beyond
        ]

    def reasons(self, features: Sequence[str]) -> list[str]:
        """Explain for each case why it is unusual; empty if it is not."""
        limit, unusual = self.reference.limit or np.inf, self.unusual()
        texts = []
        for place, columns in enumerate(self.columns(features)):
            parts = [f"beyond the training values: {', '.join(columns)}"] * bool(columns)
            parts += ["unlike any training sample"] * bool(self.found.distance[place] > limit)
            parts += ["lacks unusual values"] * bool(self.found.missing[place] > limit)
            texts.append("; ".join(parts) if unusual[place] else "")
        return texts


def reference_of(model: TrainedModel, site: str | None) -> Reference | str:
    """Return where a model was trained, or why that is not known.

    ``site`` is whose model it is; None is the shared one, which all sites here are asked about.
    """
    try:
        if not model.silo.features:
            single_classifier(model.network)
        sites = [model.site] if site or model.own else list(model.sites)[:_SITES]
        silos = [silo for name in sites if (silo := _silo(model, name))]
    except SettingError as error:
        return str(error)
    counts = {part: sum(len(one.splits()[part]) for one in silos) for part in ("val", "test")}
    split = "val" if counts["val"] >= rows_needed(1 - SHARE) else "test"
    total = sum(len(silo.train) for silo in silos)
    if total < FEWEST:
        return f"{total} training samples are here, and {FEWEST} are needed"
    training, held = (_samples(model, silos, part) for part in ("train", split))
    known = familiar(training.values, training.missing, training.groups)
    scores = known.novelty(held.values, held.missing).score
    limit = limit_of(scores, SHARE)
    return Reference(
        sites=tuple(silo.name for silo in silos),
        known=known,
        limit=None if np.isinf(limit) else limit,
        held=len(scores),
        split=split,
        rows=training.read,
        others=_others(model, [silo.name for silo in silos]),
    )


@dataclass(frozen=True)
class _Samples:
    """Samples as they are compared; ``read`` (n, f) of a table with NaN, else (n, 0)."""

    values: Floats
    missing: Booleans
    groups: np.ndarray[Any, np.dtype[np.int64]] | None
    read: Floats


def _silo(model: TrainedModel, site: str) -> Silo | None:
    """Return a site's samples as they were read, None if they are not here or were changed."""
    try:
        own = site == model.site
        silo = model.lab.session.silo if own else load_silo(site, model.common)
    except FedsiloError:
        return None
    then = model.sites[site].get("fingerprints", {})
    same = all(silo.fingerprints[part] == digest for part, digest in then.items())
    return silo if same else None


def _samples(model: TrainedModel, silos: Sequence[Silo], split: str) -> _Samples:
    if (standardisation := model.silo.standardisation) is not None:
        read = torch.cat([silo.splits()[split].inputs for silo in silos])
        ready = torch.cat(
            [standardise_silo(s, standardisation).splits()[split].inputs for s in silos]
        )
        values, raw = ready.numpy().astype(np.float64), read.numpy().astype(np.float64)
        return _Samples(values, np.isnan(raw), None, raw)
    network, each = model.network, max(1, _IMAGES // len(silos))
    exact = model.lab.compute.exact()
    chosen = [_spread(silo.splits()[split], each) for silo in silos]
    parts = [
        over_batches(network, own.inputs, exact, lambda x: penultimate(network, network.encode(x)))
        for own in chosen
        if len(own)
    ]
    features = torch.cat(parts).numpy().astype(np.float64) if parts else np.zeros((0, 1))
    groups = torch.cat([own.labels for own in chosen]).numpy()
    return _Samples(features, np.zeros(features.shape, bool), groups, features[:, :0])


def _spread(split: Split, count: int) -> Split:
    """Return so many samples of a split, evenly spread over it."""
    chosen = torch.linspace(0, len(split) - 1, min(count, len(split))).long()
    return Split(split.inputs[chosen], split.labels[chosen])


def _others(model: TrainedModel, sites: Sequence[str]) -> str:
    """Describe the sites whose training data are unknown here; empty if there are none."""
    others = [site for site in model.sites if site not in sites]
    if not others or model.own:
        return ""
    level = model.common.trust
    kept = "nothing of theirs"
    if model.silo.features and model.common.standardise == "pooled":
        kept = "of theirs only the mean and standard deviation of all sites together"
    return (
        f"not known here is what {counted(len(others), 'other site')} trained on: the run, made "
        f"for trust {level}, keeps {kept}"
    )
