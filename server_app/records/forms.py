"""Typed models of a run directory's files: one pydantic class for each kind of object in them.

Anybody may have written a run directory, so a file is checked as a whole when it is read. Each
value must have its type, and every key that all runs write must be there. Readers can therefore use
the keys without checking them again. Unknown keys are accepted, because later versions may
add some.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.files.declarations import check_content, misfit
from fedsilo.core.metric_names import METRICS, OUTCOME
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.core.settings_schema import key_of
from fedsilo.core.tasks import CLASSIFICATION, TASKS
from fedsilo.datasets.silo.declared_silos import SiteName

_LARGEST, _LONGEST = 10**15, 4000
# Columns that a table must have
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "metrics.csv": ("round", "site", "split", "metric", "value"),
    "traffic.csv": ("round", "phase", "site", "bytes_down", "bytes_up", "seconds"),
}


class Content(dict[str, Any]):
    """The content of a file. Reading a missing key raises a RunDirectoryError."""

    def __init__(self, content: Iterable[tuple[str, Any]], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> NoReturn:
        raise RunDirectoryError(f"{self.path} lacks '{one_line(key, 80)}': start a new run")


def read_content(text: str, path: Path) -> Any:
    """Parse the text of a run's JSON file, and check its content by the name of the file.

    ``FORMS`` has the type of the content for each known file name. The content of a file with
    another name is not checked. Each JSON object becomes a ``Content``, a dict that raises a
    RunDirectoryError for a missing key.

    Args:
        text: the text of the file.
        path: the path of the file, for its name and for errors. It is not opened.

    Raises:
        RunDirectoryError: the content does not have the type in ``FORMS``.
        ValueError: the text is not valid JSON.
    """
    content = json.loads(text, object_pairs_hook=lambda pairs: Content(pairs, path))
    check(FORMS.get(path.name, Any), content, str(path))
    return content


def check(form: Any, content: Any, where: str) -> None:
    """Check that the parsed content of a run's file has the type ``form``.

    Args:
        form: a type that pydantic can check, usually one of the models of a run's files.
        content: the parsed content.
        where: the file, for the error.

    Raises:
        RunDirectoryError: the content is of another type. The message names the faulty place and
            the fault.
    """
    check_content(form, content, lambda sentence: _form_error(where, sentence), quoted=True)


def check_table(path: Path, columns: Iterable[str], rows: Iterable[Mapping[Any, Any]]) -> None:
    """Check the columns and cells of a run's CSV file.

    A cell is invalid in one of these cases:

    - It is not printable.
    - It is not a number, although its column needs one.
    - It is the value of a metric that cannot have this value, such as an infinite accuracy.

    Args:
        path: the file. Only metrics.csv and traffic.csv must have certain columns, which
            ``COLUMNS`` lists. More columns are allowed.
        columns: the names in the first line.
        rows: the other lines. Each maps column names to cells.

    Raises:
        RunDirectoryError: a column is missing, or a line has an invalid cell or another number of
            cells. The message names the first faulty line.
    """
    fault = ""
    for column in COLUMNS.get(path.name, ()):
        if column not in columns and not fault:
            fault = f"line 1 lacks the column '{column}'"
    for line, cells in enumerate(rows, start=2):
        if fault:
            break
        line_fault = _find_line_fault(cells)
        if line_fault:
            fault = f"line {line}{line_fault}"
    if fault:
        raise _form_error(str(path), fault)


def _find_line_fault(cells: Mapping[Any, Any]) -> str:
    """Describe the first fault in one line of a table, or return "" if the line has no fault.

    The text continues a sentence that begins with, for example, "line 7". These are faults:

    - The line has too many or too few cells.
    - A cell is not printable.
    - A cell is not a number, although its column needs one, such as 'round' or 'seconds'.
    - The cell 'value' is impossible for the line's metric, such as an infinite accuracy.

    Args:
        cells: column -> cell, as csv.DictReader returns a line.
    """
    # csv.DictReader has the key None if there are too many cells, and the value None if too few
    if None in cells or None in cells.values():
        return " has more or fewer cells than the first"
    for column, cell in cells.items():
        fault = _find_cell_fault(column, cell)
        if fault:
            return f", '{column}' is {quote_value(cell)}, {fault}"
    # Checked after the cells, so that 'value' is a number here
    if not _is_possible(cells.get("metric", ""), float(cells.get("value", 0))):
        return ", 'value' is not possible for its metric"
    return ""


def _find_cell_fault(column: str, cell: str) -> str | None:
    if column in ("round", "bytes_down", "bytes_up", "steps", "samples") and not _is_count(cell):
        return "not a whole number"
    if column in ("value", "seconds"):
        wrong = {"value": "not a number", "seconds": "not a number of seconds"}[column]
        try:
            number = float(cell)
        except ValueError:
            return wrong
        if column == "seconds" and not 0 <= number <= _LARGEST:
            return wrong
    if not cell.isprintable():
        return "not printable text"
    return None


def _is_possible(metric: str, value: float) -> bool:
    """Return whether a metric in a file of the run can have this value.

    The first rule that fits the metric's name decides:

    - A name that begins with ``outcome.`` needs a value from -10^15 to 10^15.
    - Any other name with a dot, such as ``class.0.auc``, needs a value from 0 to 10^15.
    - A score of at most 1, such as accuracy, needs a value from -10^15 to 10^15, because noise may
      move it beyond 1. A prefix ``trained-`` or ``own-`` is ignored, and so is everything from
      ``-from-`` on.
    - Every other metric may have any value, including NaN and infinity.

    NaN is not possible under the first three rules.
    """
    # The limits exclude numbers that pages and plots could not show
    if metric.startswith(f"{OUTCOME}."):
        return abs(value) <= _LARGEST
    if "." in metric:
        return 0 <= value <= _LARGEST
    # trained-accuracy and own-auc-from-north, for example, are on the scale of the plain metric
    name = metric.removeprefix("trained-").removeprefix("own-").partition("-from-")[0]
    rule = METRICS.get(name)
    is_score = rule is not None and rule.better != 0 and rule.high == 1
    return not is_score or abs(value) <= _LARGEST


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 16


def _form_error(where: str, sentence: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{where} does not have the expected form: {one_line(sentence)}; was it altered, or made "
        "by another version of fedsilo?"
    )


def _check_line(text: str) -> str:
    if not text.isprintable() or len(text) > _LONGEST:
        raise misfit("must be a line of text")
    return text


def _check_no_formula(text: str) -> str:
    if {"$", "\\"} & set(text):
        raise misfit("must have no '$' or '\\', which plots take for a formula")
    return text


def _check_count(text: str) -> str:
    if not _is_count(text):
        raise misfit("must be a whole number")
    return text


def _check_setting(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise misfit("must be a setting")
    return value


class RunObject(BaseModel):
    """Base of an object in a run's file: kebab-case keys, and values of the declared types.

    Unknown keys are accepted. A field that may be None here may also be absent in the file.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", hide_input_in_errors=True, alias_generator=key_of
    )


def _check_metrics(metrics: dict[str, float]) -> dict[str, float]:
    for metric, value in metrics.items():
        if not _is_possible(metric, value):
            raise misfit(f"must have a possible value of '{one_line(metric, 80)}'")
    return metrics


def _check_task(text: str) -> str:
    if text not in TASKS:
        raise misfit(f"must be one of {', '.join(TASKS)}")
    return text


Whole = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
Number = Annotated[float, Field(strict=True)]  # also NaN, because a metric may be undefined
Amount = Annotated[float, Field(strict=True, ge=0, le=_LARGEST, allow_inf_nan=False)]
Line = Annotated[str, Field(strict=True), AfterValidator(_check_line)]
Label = Annotated[Line, AfterValidator(_check_no_formula)]
Metrics = Annotated[dict[Line, Number], AfterValidator(_check_metrics)]
Round = Annotated[str, AfterValidator(_check_count)]
Setting = Annotated[Any, BeforeValidator(_check_setting)]
Split = Literal["train", "val", "test"]
TaskName = Annotated[Line, AfterValidator(_check_task)]


class Standardisation(RunObject):
    """Mean and standard deviation of each feature, used to standardise tables."""

    mean: list[Number]
    std: list[Number]


class Site(RunObject):
    """One site of ``silos.json``: its samples by split and class, and digests of its data."""

    distribution: Label
    sizes: dict[Split, Whole]
    label_counts: dict[Split, list[Whole]] = Field(alias="label_counts")
    fingerprints: dict[Split, Line]
    dropped: Whole
    data_schema: Line = Field("", alias="schema")
    classes: list[Label]
    task: TaskName = CLASSIFICATION
    backbone: Line = ""
    software: dict[Line, Line] | None = None
    agreed: Whole | None = None


def _check_silos(silos: dict[str, Site]) -> dict[str, Site]:
    numbers, named, fault = set(), set(), ""
    for site in silos.values():
        for counts in site.label_counts.values():
            numbers.add(len(counts))
        # Only in a task with one stratum per class are there as many counts as names
        if site.classes and not TASKS[site.task].strata:
            named.add(len(site.classes))
    # Sites that send no label counts may still name their classes, each in its own way
    if numbers:
        numbers |= named
    if not silos:
        fault = "must name a site"
    elif len(numbers) > 1:
        fault = "must have 'classes' and 'label_counts' of one number of classes"
    if fault:
        raise misfit(fault)
    return silos


# Every run has at least one site, so readers may take the first one
Silos = Annotated[dict[SiteName, Site], AfterValidator(_check_silos)]


class Failure(RunObject):
    """A message without a usable reply: round, phase, site, kind of failure, and reason."""

    round: Whole
    phase: Line
    site: Line
    code: Line = ""  # version 0.1 wrote none
    reason: Line


class Means(RunObject):
    """Means over all sites, and over the sites of each distribution."""

    mean: Metrics
    distributions: dict[Label, Metrics]


class Best(RunObject):
    """The best round of a run with early stopping; all fields are None if there is none."""

    round: Whole | None = None
    metric: Line | None = None
    value: Number | None = None
    model: bool | None = None


class Seconds(RunObject):
    """Seconds of a run, of its rounds, and of the work of each site."""

    total: Amount
    rounds: Amount
    sites: dict[SiteName, Amount]


class Bytes(RunObject):
    """Total size of all messages, to the sites ("down") and from them ("up")."""

    down: Whole
    up: Whole


class Trust(RunObject):
    """The level of trust that a run is made for, and what the level means."""

    level: Literal["server", "sums", "nobody"]
    promise: Line


class Guarantee(RunObject):
    """Differential privacy: the epsilon that each site has spent, and the mechanism."""

    epsilon: Amount
    sites: dict[SiteName, Amount]
    delta: Amount
    sample_clip_norm: Amount
    noise_multiplier: Amount
    statistics_noise: Amount
    accountant: Line
    mechanism: Line
    of: Line


class Privacy(RunObject):
    """``privacy.json``: the data that left each site, and the guarantees on them."""

    method: Line
    trust: Trust
    leaves_each_site: list[Line] = Field(alias="leaves each site")
    bytes_up: Whole = Field(alias="bytes up")
    guarantee: Guarantee | Literal["no differential-privacy guarantee"]  # summary.NO_PRIVACY
    epsilon: Amount | Literal["none"]
    perturbation: Line = ""


class UnlikeColumn(RunObject):
    """A column of a table whose mean at one site is far from the means at the other sites."""

    column: Line
    title: Line
    site: SiteName
    relation: Line
    question: Line


class Summary(RunObject):
    """``summary.json``: the results and costs of a run; docs/run-directory.md has each key."""

    method: Label
    title: Label
    dataset: Label
    task: TaskName = CLASSIFICATION
    seed: Whole
    rounds: Whole
    aggregation: Label = ""
    sites: dict[SiteName, Metrics]
    mean: Metrics
    distributions: dict[Label, Metrics]
    validation: Means
    # Written by version 0.1; today the papers' numbers are looked up when a run is read
    published: dict[Line, Metrics] | None = None
    published_unlike: Line | None = None
    stopped: Line | None
    best: Best | None = None
    marks: dict[Round, Label]
    plugs: dict[Line, Line] | None = None
    failures: list[Failure]
    seconds: Seconds
    processor: Line = ""  # runs of earlier versions do not name it
    peak_memory_bytes: dict[SiteName, Amount]
    unrepeatable_operations: list[Line]
    bytes: Bytes
    privacy: Privacy
    unlike_columns: list[UnlikeColumn] | None = None


class StateFacts(RunObject):
    """The metadata of a checkpoint or a model."""

    round: Whole
    extras: dict[str, Any]
    keepers: dict[SiteName, Whole]
    settings: dict[Line, Setting] | None = None
    hooks: dict[str, Any] | None = None
    standardisation: Standardisation | None = Field(None, alias="figures")


class Finetuned(RunObject):
    """The keys that are read from ``finetune.json``, which ``fedsilo finetune`` writes."""

    task: Line
    network: Line
    dataset: Line
    classes: list[Line] | Whole
    settings: dict[Line, Setting]


FORMS: Mapping[str, Any] = {
    "silos.json": Silos,
    "summary.json": Summary,
    "privacy.json": Privacy,
    "standardisation.json": Standardisation,
    "finetune.json": Finetuned,
}
