"""A survey: every site's answer, and how far apart the sites are, in ``survey.json``.

The distance between two sites is the Jensen-Shannon distance, base 2: 0 for equal distributions,
and 1 for distributions that have nothing in common. The server computes it from the statistics that
the sites have sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SPLITS
from fedsilo.core.survey import Count, Survey
from fedsilo.datasets.registry import data_set, silo_count
from fedsilo.server_app.config.operator_files import operator_terms
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory, open_run_directory, with_run_name
from fedsilo.strategies.meeting.survey import Surveyed, survey_sites

SURVEY = "survey.json"
T = TypeVar("T")


def run_survey(
    grid: Grid, settings: RunSettings, say: Callable[[str], None] = print
) -> RunDirectory:
    """Ask the connected sites to describe their data, and write the answers to survey.json.

    ``say`` prints the refused answers, the sites and the file's path.

    Returns:
        The new run directory, in which survey.json is the only file.

    Raises:
        FedsiloError: no site gives a valid answer, or the nodes, the registry or the directory are
            unusable. Nothing is written.
    """
    settings = with_run_name(settings)
    common = settings.common
    directory = open_run_directory(common.out, common.run_name, resume=False)
    surveyed = survey_sites(grid, common, silo_count(common), operator_terms(common).registry)
    for line in surveyed.refused:
        say(f"without an answer: {line}")
    directory.write_json(SURVEY, survey_document(surveyed, common))
    say(f"answers of {format_count(len(surveyed.answers), 'site')}: {', '.join(surveyed.answers)}")
    say(f"survey: {directory.path / SURVEY}")
    return directory


def survey_document(surveyed: Surveyed, common: CommonSettings) -> dict[str, Any]:
    """Build survey.json: each site's answer, the distances between sites, and the refused nodes.

    The key "columns" has each column's title and the words for its categories, from this machine's
    schema. "distances" has the result of ``distances`` for each split. "refused" has a line for
    each refused node.
    """
    answers = surveyed.answers
    sites: dict[str, dict[str, Any]] = {}
    for site, answer in answers.items():
        sites[site] = {}
        for key, part in answer.to_config().items():
            sites[site][key] = json.loads(part)
    # Words come from the schema on this machine, because hospitals do not send them
    columns = {}
    for name, words in data_set(common.dataset).column_words(common).items():
        columns[name] = {"title": words.title, "levels": dict(words.levels)}
    return {
        "version": 1,
        "run": common.run_name,
        "dataset": common.dataset,
        "asked": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "sites": sites,
        "columns": columns,
        "distances": {split: distances(answers, split) for split in SPLITS},
        "refused": list(surveyed.refused),
    }


def distances(answers: Mapping[str, Survey], split: str) -> dict[str, list[dict[str, Any]]]:
    """Return the Jensen-Shannon distance of each pair of sites, for labels and for each feature.

    0 means equal distributions, and 1 means nothing in common. Pairs need the same classes or bins.

    Returns:
        "labels" and "features", each a list of entries, largest distance first. A feature's entry
        has its name. An unknown distance is left out.
    """
    of_labels: list[dict[str, Any]] = []
    of_features: list[dict[str, Any]] = []
    for one, other in combinations(answers, 2):
        a, b = answers[one], answers[other]
        sites = [one, other]
        totals = [_get_part(a.samples, split), _get_part(b.samples, split)]
        if a.about.classes == b.about.classes:
            labels = [_get_part(a.labels, split), _get_part(b.labels, split)]
            apart = distance(labels, totals)
            if apart is not None:
                of_labels.append({"sites": sites, "distance": apart})
        # Without histograms from a site, its features have no distance to another site
        cells_of_a = _get_part(a.histograms, split) or {}
        cells_of_b = _get_part(b.histograms, split) or {}
        for feature in a.about.features:
            if feature not in b.about.features:
                continue
            name = feature.name
            apart = distance([cells_of_a.get(name), cells_of_b.get(name)], totals)
            if apart is not None:
                of_features.append({"feature": name, "sites": list(sites), "distance": apart})
    of_labels.sort(key=_sort_key)
    of_features.sort(key=_sort_key)
    return {"labels": of_labels, "features": of_features}


def _get_part(by_split: Mapping[str, T] | None, split: str) -> T | None:
    """Return a site's part for one split, or None if the site sent no such part."""
    if by_split is None:
        return None
    return by_split.get(split)


def _sort_key(entry: Mapping[str, Any]) -> float:
    return -float(entry["distance"])


def distance(
    counts: Sequence[Sequence[Count] | None], totals: Sequence[int | None]
) -> float | None:
    """Return the Jensen-Shannon distance (base 2) between two sites' counts, rounded to 4 places.

    A suppressed cell is None. Such cells are merged, so the true distance is at least the returned
    one. ``totals`` has each site's number of samples. The result is None without counts or samples,
    or if fewer than two cells are left.
    """
    from scipy.spatial.distance import jensenshannon

    one, other = counts
    if one is None or other is None:
        return None
    counts_of_one, counts_of_other = [], []
    for a, b in zip(one, other, strict=True):
        if a is not None and b is not None:
            counts_of_one.append(a)
            counts_of_other.append(b)
    # A cell that only one site shows cannot be compared, so it joins the rest at both sites
    merged = len(counts_of_one) < len(one)
    first = _cell_shares(counts_of_one, totals[0], merged)
    second = _cell_shares(counts_of_other, totals[1], merged)
    if first is None or second is None or len(first) < 2:
        return None
    apart = float(jensenshannon(first, second, base=2))
    if not np.isfinite(apart):
        return None
    return round(apart, 4)


def _cell_shares(
    counts: Sequence[int], total: int | None, merged: bool
) -> npt.NDArray[np.float64] | None:
    """Convert one site's counts to shares of its samples, which add up to 1.

    If ``merged``, one more cell at the end has the rest of ``total``. The result is None without
    samples, or if the rest is unknown or negative.
    """
    cells, every = list(counts), sum(counts)
    if merged:
        # If the total is unknown or below the cells, the rest is unknown
        if total is None or total < every:
            return None
        cells.append(total - every)
        every = total
    if not every:
        return None
    return np.array(cells, dtype=np.float64) / every
