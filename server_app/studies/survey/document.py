"""``survey.json`` read back, for its page."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.survey import Survey


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
    """What a survey found."""

    version: Literal[1]  # ``studies.survey.collect.VERSION``
    run: str
    dataset: str
    asked: str  # when
    sites: dict[str, Annotated[Survey, BeforeValidator(_answer)]]  # the answers
    distances: dict[str, Distances]  # by split
    refused: tuple[str, ...]  # why others gave no answer


def read_survey_document(path: Path) -> SurveyDocument:
    """Return the content of a ``survey.json``.

    Raises:
        RunDirectoryError: it does not exist, is damaged, or is of another version.
    """
    try:
        return SurveyDocument.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from None
    except (ValidationError, AttributeError) as error:
        raise RunDirectoryError(
            f"{path} is damaged, or of another version of fedsilo ({type(error).__name__}): survey "
            "again"
        ) from None
