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

    Nothing is trained. The file also has the distances between sites (``survey_document``). ``say``
    prints a line for each refused answer, a line that lists the sites, and a line with the path of
    the file.

    Returns:
        The new run directory, in which survey.json is the only file.

    Raises:
        FedsiloError: in one of these cases, in which nothing is written:

            - No site gives a valid answer.
            - Too few or too many nodes are connected.
            - A file of the operator cannot be used.
            - The directory exists already or has an invalid name.
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

    The keys are:

    - "version": 1,
    - "run" and "dataset": the names of the run and of the data set,
    - "asked": the present time in UTC,
    - "sites": site -> its answer,
    - "columns": column -> its "title" and the words for its "levels" (values of a category), as
      this machine's schema has them,
    - "distances": split -> the result of ``distances``,
    - "refused": a line for each refused node.

    Args:
        surveyed: the sites' answers, and the refused nodes.
        common: the settings of the survey.
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

    A distance of 0 means equal distributions on the split, and 1 means distributions that have
    nothing in common (``distance``). Labels are compared only if both sites declare the same
    classes. A feature is compared only if both sites declare the same name and the same bins or
    levels.

    Args:
        answers: site -> its answer.
        split: "train", "val" or "test".

    Returns:
        "labels" and "features", each a list of entries with ``sites`` (two names) and ``distance``,
        largest distance first. A feature's entry also has its name under ``feature``. Distances
        that cannot be computed are left out.
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

    Cells that either site suppressed are merged into one cell at both sites. A site's count in this
    cell is its total minus its other counts. Merging can only reduce the distance, so the true
    distance is at least the returned one.

    The result is None in these cases:

    - A site sent no counts or has no samples.
    - Fewer than two cells are left.
    - Cells were merged, and a total is unknown or below the sum of the counts.

    Args:
        counts: for each of the two sites, the counts of the same cells, with None for a suppressed
            cell. The entry of a site that sent no counts is None.
        totals: the number of samples at each of the two sites, or None if unknown.
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

    Cells are the classes, or the bins of a histogram. Cells that this site or the compared site has
    suppressed are merged into one last cell. Its count is ``total`` minus the other counts.

    Args:
        counts: the counts of the cells that were not merged.
        total: the number of the site's samples, or None if unknown. It is used only if ``merged``
            is True.
        merged: whether some cells were merged.

    Returns:
        The shares, with shape (cells,). If ``merged``, one more share is at the end. The result is
        None if there are no samples, or if cells were merged but ``total`` is unknown or below the
        sum of ``counts``.
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
