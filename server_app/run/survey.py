"""A survey: every site's answer, and how far apart the sites are, as ``survey.json``.

Distances are the Jensen-Shannon distance, base 2: 0 for the same distribution, 1 for nothing in
common. They are computed here, from what has left the sites.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from fedsilo.core.one_line import counted
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SPLITS
from fedsilo.core.survey import Count, Survey
from fedsilo.datasets.registry import silo_count
from fedsilo.server_app.config.operator_files import operator_terms
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory, open_run_directory, with_run_name
from fedsilo.strategies.meeting.survey import Surveyed, survey_sites

SURVEY = "survey.json"


def run_survey(
    grid: Grid, settings: RunSettings, say: Callable[[str], None] = print
) -> RunDirectory:
    """Ask the sites of ``grid`` and write ``survey.json`` into the run directory.

    Raises:
        FedsiloError: no site answers, or the directory exists already; nothing is written then.
    """
    settings = with_run_name(settings)
    common = settings.common
    directory = open_run_directory(common.out, common.run_name, resume=False)
    surveyed = survey_sites(grid, common, silo_count(common), operator_terms(common).registry)
    for line in surveyed.refused:
        say(f"without an answer: {line}")
    directory.write_json(SURVEY, survey_document(surveyed, common))
    say(f"answers of {counted(len(surveyed.answers), 'site')}: {', '.join(surveyed.answers)}")
    say(f"survey: {directory.path / SURVEY}")
    return directory


def survey_document(surveyed: Surveyed, common: CommonSettings) -> dict[str, Any]:
    """Return ``survey.json``."""
    answers = surveyed.answers
    return {
        "version": 1,
        "run": common.run_name,
        "dataset": common.dataset,
        "asked": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "sites": {
            site: {key: json.loads(part) for key, part in answer.to_config().items()}
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
    for names in combinations(answers, 2):
        pair = [answers[name] for name in names]
        a, b = (answer.about for answer in pair)
        totals = [(answer.samples or {}).get(split) for answer in pair]
        if a.classes == b.classes:
            labels = [(answer.labels or {}).get(split) for answer in pair]
            if (apart := distance(labels, totals)) is not None:
                found["labels"].append({"sites": [*names], "distance": apart})
        cells = [(answer.histograms or {}).get(split, {}) for answer in pair]
        for name in [feature.name for feature in a.features if feature in b.features]:
            if (apart := distance([of_site.get(name) for of_site in cells], totals)) is not None:
                entry = {"feature": name, "sites": [*names], "distance": apart}
                found["features"].append(entry)
    for listed in found.values():
        listed.sort(key=lambda entry: -entry["distance"])
    return found


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
    merged = len(shown) < len(pairs)
    first = _shares([a for a, _ in shown], totals[0], merged)
    second = _shares([b for _, b in shown], totals[1], merged)
    if first is None or second is None or len(first) < 2:
        return None
    apart = float(jensenshannon(first, second, base=2))
    return round(apart, 4) if np.isfinite(apart) else None


def _shares(
    counts: Sequence[int], total: int | None, merged: bool
) -> npt.NDArray[np.float64] | None:
    """Return the shares of cells, with the rest of the total last, or None if none is known."""
    known = sum(counts)
    every = total if merged else known
    if not every or every < known:
        return None
    cells = [*counts, every - known] if merged else counts
    return np.array(cells, dtype=np.float64) / every
