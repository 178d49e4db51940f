"""A survey: every site's answer, and how far apart the sites are, as ``survey.json``.

Distances are the Jensen-Shannon distance, base 2: 0 for the same distribution, 1 for nothing in
common. They are computed here, from what has left the sites.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from fedsilo.datasets.registry import silo_count
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SPLITS
from fedsilo.models.contract.survey import Count, Measured, Survey
from fedsilo.server_app.config.operator_files import operator_terms
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory, named, open_run_directory
from fedsilo.strategies.meeting.survey import Surveyed, survey_sites

FILE = "survey.json"
VERSION = 1
Say = Callable[[str], None]


def run_survey(grid: Grid, settings: RunSettings, say: Say = print) -> RunDirectory:
    """Ask the sites of ``grid`` and write ``survey.json`` into the run directory.

    Raises:
        FedsiloError: no site answers, or the directory exists already; nothing is written then.
    """
    settings = named(settings)
    common = settings.common
    directory = open_run_directory(common.out, common.run_name, resume=False)
    surveyed = survey_sites(grid, common, silo_count(common), operator_terms(common).registry)
    for line in surveyed.refused:
        say(f"without an answer: {line}")
    directory.write_json(FILE, survey_document(surveyed, common))
    say(f"{len(surveyed.answers)} sites have answered: {', '.join(surveyed.answers)}")
    say(f"survey: {directory.path / FILE}")
    return directory


def survey_document(surveyed: Surveyed, common: CommonSettings) -> dict[str, Any]:
    """Return ``survey.json``."""
    answers = surveyed.answers
    return {
        "version": VERSION,
        "run": common.run_name,
        "dataset": common.dataset,
        "asked": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "sites": {
            site: {
                key.replace("_", "-"): part
                for key, part in answer.model_dump(mode="json").items()
                if part is not None
            }
            for site, answer in answers.items()
        },
        "distances": {split: distances(answers, split) for split in SPLITS},
        "refused": list(surveyed.refused),
    }


def distances(answers: Mapping[str, Survey], split: str) -> dict[str, list[dict[str, Any]]]:
    """Return the distances of each two sites' labels and of each feature, largest first.

    Only sites whose data sets declare the same classes or feature are compared.
    """
    found: dict[str, list[dict[str, Any]]] = {"labels": [], "features": []}
    for one, other in combinations(answers, 2):
        a, b = answers[one], answers[other]
        pair = {"sites": [one, other]}
        if a.about.classes == b.about.classes:
            labels = [(each.labels or {}).get(split) for each in (a, b)]
            if (apart := distance(labels, [_total(each, split) for each in (a, b)])) is not None:
                found["labels"].append({**pair, "distance": apart})
        for feature in a.about.features:
            if feature in b.about.features:
                cells = [(each.histograms or {}).get(split, {}) for each in (a, b)]
                histograms = [by_name.get(feature.name) for by_name in cells]
                totals = [_total(each, split) for each in (a, b)]
                if (apart := distance(histograms, totals)) is not None:
                    found["features"].append({"feature": feature.name, **pair, "distance": apart})
    return {
        kind: sorted(listed, key=lambda entry: -entry["distance"]) for kind, listed in found.items()
    }


def distance(
    counts: Sequence[Sequence[Count] | None], totals: Sequence[int | None]
) -> float | None:
    """Return the Jensen-Shannon distance of two sites' counts, or None if it is not known.

    Cells that one of them has suppressed are merged into one, the rest of the total. That can only
    bring the sites nearer: their distance is at least the one returned.
    """
    from scipy.spatial.distance import jensenshannon

    one, other = counts
    if one is None or other is None:
        return None
    pairs = list(zip(one, other, strict=True))
    shown = [(a, b) for a, b in pairs if a is not None and b is not None]
    shares = [
        _shares([pair[place] for pair in shown], totals[place], len(shown) < len(pairs))
        for place in (0, 1)
    ]
    if shares[0] is None or shares[1] is None or len(shares[0]) < 2:
        return None
    apart = float(jensenshannon(shares[0], shares[1], base=2))
    return round(apart, 4) if np.isfinite(apart) else None


def _shares(
    counts: Sequence[int], total: int | None, merged: bool
) -> npt.NDArray[np.float64] | None:
    """Return the shares of cells, with the rest of the total last, or None if none is known."""
    whole = total if merged else sum(counts)
    if not whole or whole < sum(counts):
        return None
    cells = [*counts, whole - sum(counts)] if merged else counts
    return np.array(cells, dtype=np.float64) / whole


def _total(answer: Survey, split: str) -> int | None:
    return (answer.samples or {}).get(split)


BINARY = ("0 (no)", "1 (yes)")  # the cells of a number whose only edge is 0.5


def cell_names(feature: Measured) -> list[str]:
    """Return the names of the cells of a feature's histogram."""
    if feature.edges == [0.5]:
        return [*BINARY, *(["no value"] if feature.lacking else [])]
    edges = [f"{edge:g}" for edge in feature.edges]
    between = [f"{low} to {high}" for low, high in pairwise(edges)]
    named = [f"below {edges[0]}", *between, f"from {edges[-1]}"] if edges else feature.levels
    return [*named, *(["no value"] if feature.lacking else [])]
