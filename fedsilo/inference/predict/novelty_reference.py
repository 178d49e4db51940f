"""Reads the training samples on this machine, which ``predict`` compares with new cases."""

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
from fedsilo.core.one_line import format_count
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.explanations.embeddings import penultimate, single_classifier
from fedsilo.inference.predict.case_novelty import SHARE, Code, Reference, find_codes
from fedsilo.models.measures.calibration import rows_needed
from fedsilo.models.measures.novelty import FEWEST, Booleans, Floats, estimate_region, limit_of
from fedsilo.runs.trained_model import TrainedModel

# The most images whose features are computed, for training and for held-out samples each
_IMAGES = 300
_SITES = 50  # largest number of sites whose samples are read


def reference_of(model: TrainedModel, site: str | None) -> Reference | str:
    """Collect the training samples on this machine with which ``predict`` compares new cases.

    Rows of a table are compared after standardisation, and images by features that the network
    computes. The limit above which a case is unusual is computed from held-out samples. These are
    the validation samples or, if there are fewer than 19, the test samples. If there are fewer than
    19 test samples too, there is no limit.

    Args:
        model: the model.
        site: the only site whose samples are used, which must be ``model.site``. None for all sites
            that trained the model.

    Returns:
        The reference. If it cannot be built, a text with the reason. For example, fewer than 20
        training samples are here, or a network for images is a mixture of several networks.
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
    # Fitted on training samples only; the held-out ones below decide what counts as unusual
    known = estimate_region(training.values, training.missing, training.groups)
    scores = known.novelty(held.values, held.missing).score
    limit: float | None = limit_of(scores, SHARE)
    if limit == np.inf:  # too few held-out samples for any limit
        limit = None
    codes: dict[int, Code] = {}
    if model.silo.features:
        codes = find_codes(training.values, training.missing)
    names = [silo.name for silo in silos]
    return Reference(
        sites=tuple(names),
        known=known,
        limit=limit,
        held_out=len(scores),
        split=split,
        rows=training.read,
        others=_others(model, names),
        codes=codes,
    )


@dataclass(frozen=True)
class _Samples:
    """Samples of all sites on this machine, in the form that novelty compares."""

    values: Floats  # (n, f) standardised rows of a table, or features of images
    missing: Booleans  # (n, f) whether a value was missing
    groups: np.ndarray[Any, np.dtype[np.int64]] | None  # (n,) classes of images; None for a table
    read: Floats  # (n, f) rows of a table as they were read, with NaN; (n, 0) for images


def _silos_here(model: TrainedModel, site: str | None) -> list[Silo]:
    """Read the data of the sites that trained the model, as far as they are on this machine.

    If ``site`` is given, or if the model belongs to one site, only the data of ``model.site`` are
    read. Otherwise the data of the run's first 50 sites are read. A site is left out if its data
    are not on this machine or have changed since the run.
    """
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
    """Read the data of a site on which the model was trained, to compare new cases with them.

    The result is None if the data are not on this machine or have changed since the run. A change
    is found by the fingerprints (digests of the data) that the site sent in the run. If the site
    sent none, the data are taken as unchanged.
    """
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
    """Collect the samples of a split from all silos, so that novelty can compare cases with them.

    For a table, the result has the standardised rows, the rows before standardisation, and a mark
    for each missing value. For images, it has the features that the network computes, and the true
    classes.
    """
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
    # Sites share the limit equally, so that a large site does not decide what is familiar
    each = max(1, _IMAGES // len(silos))

    def penultimate_features(images: Tensor) -> Tensor:
        return penultimate(network, network.encode(images))

    labels, parts = [], []
    for silo in silos:
        chosen = _spread(silo.splits()[split], each)
        labels.append(model.lab.task.strata(chosen.labels))
        if len(chosen):
            parts.append(over_batches(network, chosen.inputs, exact, penultimate_features))
    features = np.zeros((0, 1))
    if parts:
        features = torch.cat(parts).numpy().astype(np.float64)
    groups = torch.cat(labels).numpy()
    return _Samples(features, np.zeros(features.shape, bool), groups, features[:, :0])


def _spread(split: Split, count: int) -> Split:
    """Choose at most ``count`` samples of a split, about equally far apart in its order."""
    chosen = torch.linspace(0, len(split) - 1, min(count, len(split))).long()
    return Split(split.inputs[chosen], split.labels[chosen])


def _others(model: TrainedModel, sites: Sequence[str]) -> str:
    """Describe in a sentence which training data of the model are unknown on this machine.

    The sentence counts the sites that are not in ``sites``, the sites whose data were read. It also
    says how much the run stores about the data of the counted sites. For a table that was
    standardised over all sites (setting 'standardise'), this is the pooled mean and standard
    deviation. Otherwise it is nothing.

    If no site is missing, or if only one site trained the model, the text is empty.
    """
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
