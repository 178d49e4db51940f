"""Reads a survey again: the content of ``survey.json``."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.survey import MeasuredFeature, Survey
from fedsilo.pages.page import edge_names


class Between(BaseModel):
    """The distance between two sites in a feature, or in the labels if ``feature`` is empty."""

    model_config = ConfigDict(frozen=True)

    sites: tuple[str, str]
    distance: float
    feature: str = ""


class Distances(BaseModel):
    """The distances in a split, largest first."""

    labels: list[Between] = []
    features: list[Between] = []


def _answer(parts: dict[str, Any]) -> Survey:
    """Build a site's answer from its JSON, whose keys have hyphens."""
    fields = {name.replace("-", "_"): part for name, part in parts.items()}
    return Survey.model_validate_json(json.dumps(fields))


class ColumnTitle(BaseModel):
    """The readable title of a column, from the server's copy of the schema."""

    title: str
    levels: dict[str, str] = {}  # level -> its name with the level


class SurveyDocument(BaseModel):
    """The result of a survey, read from ``survey.json``."""

    version: Literal[1]
    run: str
    dataset: str
    asked: str  # the time when the sites were asked
    sites: dict[str, Annotated[Survey, BeforeValidator(_answer)]]  # the answers
    distances: dict[str, Distances]  # split -> distances
    refused: tuple[str, ...]  # the reasons why other sites gave no answer
    columns: dict[str, ColumnTitle] = {}  # column -> its words, if the server has a schema

    def title(self, feature: str) -> str:
        """Return the title of a feature for readers, such as "Age (age, years)".

        Brackets hold the feature's name and unit. If the survey has no title, the result is the
        name.
        """
        if feature in self.columns:
            return self.columns[feature].title
        return feature

    def cell_titles(self, feature: MeasuredFeature) -> list[str]:
        """Return the titles of the cells in a feature's histogram, in order.

        The titles are the names from ``cell_names``, such as levels or ranges. If the data set
        declares a title for a level, the cell has this title.
        """
        names = cell_names(feature)
        if feature.levels and feature.name in self.columns:
            levels = self.columns[feature.name].levels
            return [levels.get(name, name) for name in names]
        return names


def read_survey_document(path: Path) -> SurveyDocument:
    """Read the answers of the sites to a survey from its ``survey.json``.

    Raises:
        RunDirectoryError: the file does not exist, cannot be read, is damaged, or was written by
            another version of fedsilo.
    """
    fault = file_fault(path)  # reading a pipe would never end
    if fault:
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


def cell_names(feature: MeasuredFeature) -> list[str]:
    """Name the cells of a feature's histogram, in order.

    The names are the feature's levels. For a numeric feature, they are the ranges between its
    edges. If the feature declares that values may be missing, "no value" is the last name. A
    feature without levels and edges has no cells.
    """
    if not feature.cells:
        return []
    names = list(feature.levels)
    if feature.edges:
        names = edge_names(feature.edges)
    if feature.lacking:
        names.append("no value")
    return names
