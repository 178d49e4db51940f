"""``survey.json`` read back, for its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.survey import Survey
from fedsilo.server_app.studies.survey.collect import VERSION


@dataclass(frozen=True)
class Between:
    """How far two sites are apart: in a feature, or in the labels (no feature)."""

    sites: tuple[str, str]
    distance: float
    feature: str = ""


@dataclass(frozen=True)
class SurveyDocument:
    """What a survey found.

    Attributes:
        run, dataset, asked: which survey it is, of which data set, and when.
        answers: by site.
        labels, features: distances per split, worst first.
        refused: why others gave no answer.
    """

    run: str
    dataset: str
    asked: str
    answers: Mapping[str, Survey]
    labels: Mapping[str, list[Between]]
    features: Mapping[str, list[Between]]
    refused: tuple[str, ...]


def read_survey_document(path: Path) -> SurveyDocument:
    """Return the content of a ``survey.json``.

    Raises:
        RunDirectoryError: it is not there, damaged, or of another version.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise RunDirectoryError(
                f"{path} is of another version of fedsilo ({content['version']!r:.20}): survey anew"
            )
        return SurveyDocument(
            run=str(content["run"]),
            dataset=str(content["dataset"]),
            asked=str(content["asked"]),
            answers={site: _answer(parts) for site, parts in content["sites"].items()},
            labels={split: _all(d["labels"]) for split, d in content["distances"].items()},
            features={split: _all(d["features"]) for split, d in content["distances"].items()},
            refused=tuple(map(str, content["refused"])),
        )
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
        raise RunDirectoryError(
            f"{path} is damaged ({type(error).__name__}): survey anew"
        ) from None


def _answer(parts: Mapping[str, Any]) -> Survey:
    fields = {name.replace("-", "_"): part for name, part in parts.items()}
    return Survey.model_validate_json(json.dumps(fields))


def _all(listed: list[dict[str, Any]]) -> list[Between]:
    return [
        Between(
            (str(one["sites"][0]), str(one["sites"][1])),
            float(one["distance"]),
            str(one.get("feature", "")),
        )
        for one in listed
    ]
