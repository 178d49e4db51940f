"""A survey: every site's answer, and how far apart the sites are, as ``survey.json``.

Distances are the Jensen-Shannon distance, base 2: 0 for the same distribution, 1 for nothing in
common. They are computed here, from what has left the sites.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from fedsilo.datasets.io.text_files import file_fault
from fedsilo.datasets.registry import silo_count
from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.one_line import counted
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SPLITS
from fedsilo.models.contract.survey import Count, Measured, Survey
from fedsilo.server_app.config.operator_files import operator_terms
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory, open_run_directory, with_run_name
from fedsilo.server_app.studies.report.numbers import edge_names
from fedsilo.strategies.meeting.survey import Surveyed, survey_sites

FILE = "survey.json"
Say = Callable[[str], None]


class Between(BaseModel):
    """How far two sites are apart in a feature, or in the labels if ``feature`` is empty."""

    model_config = ConfigDict(frozen=True)

    sites: tuple[str, str]
    distance: float
    feature: str = ""


class Distances(BaseModel):
    """The distances in a split, largest first."""

    labels: list[Between] = []
    features: list[Between] = []


def _answer(parts: dict[str, Any]) -> Survey:
    fields = {name.replace("-", "_"): part for name, part in parts.items()}
    return Survey.model_validate_json(json.dumps(fields))


class SurveyDocument(BaseModel):
    """The result of a survey, read from ``survey.json``."""

    version: Literal[1]
    run: str
    dataset: str
    asked: str  # when
    sites: dict[str, Annotated[Survey, BeforeValidator(_answer)]]  # the answers
    distances: dict[str, Distances]  # split -> distances
    refused: tuple[str, ...]  # why others gave no answer


def run_survey(grid: Grid, settings: RunSettings, say: Say = print) -> RunDirectory:
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
    directory.write_json(FILE, survey_document(surveyed, common))
    say(f"answers of {counted(len(surveyed.answers), 'site')}: {', '.join(surveyed.answers)}")
    say(f"survey: {directory.path / FILE}")
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


def read_survey_document(path: Path) -> SurveyDocument:
    """Return the content of a ``survey.json``.

    Raises:
        RunDirectoryError: it does not exist, is damaged, or is of another version.
    """
    if fault := file_fault(path):  # a pipe would be waited for
        raise RunDirectoryError(f"{path} {fault}: survey again")
    try:
        return SurveyDocument.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from None
    except (ValidationError, AttributeError) as error:
        raise RunDirectoryError(
            f"{path} is damaged, or of another version of fedsilo ({type(error).__name__}): survey "
            "again"
        ) from None


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


def cell_names(feature: Measured) -> list[str]:
    """Return the names of the cells of a feature's histogram."""
    if not feature.cells:  # it declares neither edges nor levels
        return []
    names = edge_names(feature.edges) if feature.edges else feature.levels
    return [*names, *(["no value"] if feature.lacking else [])]
