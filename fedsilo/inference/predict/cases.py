"""``fedsilo predict --html``: a page of cases, sorted by what needs a look first.

The page holds patients' data and stays where the predictions were made.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import NOBODY
from fedsilo.inference.predict.answers import Predictions
from fedsilo.inference.predict.case_answers import CaseAnswers
from fedsilo.inference.predict.case_details import Reasons, ValueTexts, reasons_of
from fedsilo.inference.predict.inputs import Inputs, table_schema
from fedsilo.inference.predict.task_case_answers import case_answers
from fedsilo.pages.page import render_page
from fedsilo.reports.clinic import TITLE, WARNING
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel

MOST = 200  # largest number of cases on a page
STATES = {
    "refused": "refused: no prediction",
    "unusual": "unlike the training samples",
    "doubtful": "answered, but something needs a look",
    "unsure": "the model is not sure",
    "usual": "nothing unusual",
}
_LIMITS = (
    "A case is unlike the training samples if its novelty is above 1. The model has not been "
    "tested on such cases, so nothing that it says of them can be relied on.",
    "A case with a novelty of 1 or less can still be one that the model gets wrong.",
)


@dataclass(frozen=True)
class _State:
    """The state of a case, a key of ``STATES``, and the sentence that explains it, or empty."""

    key: str
    why: str = ""


@dataclass(frozen=True)
class _Context:
    """The data that all cases of a page share."""

    model: TrainedModel
    predictions: Predictions
    states: Sequence[_State]  # the state of each input
    kept: Mapping[int, int]  # place of an input -> its index among the readable inputs
    reasons: Reasons
    answers: CaseAnswers  # formats the answers of the task
    texts: ValueTexts | None  # formats the values of a table; None for images


def cases_page(run: Shown, model: TrainedModel, predictions: Predictions) -> str:
    """Build the HTML page of predicted cases, with the cases that a person should check first.

    The page shows at most 200 cases. Further cases are only counted. The order is refused, unusual,
    doubtful, then uncertain and other cases.

    Args:
        run: a view of the run without the metrics and counts that pages must not show.
        model: the model.
        predictions: the predictions of the model.
    """
    kept = {place: index for index, place in enumerate(predictions.inputs.kept())}
    answers = case_answers(run, model, predictions)
    states = _states(predictions, answers, kept)
    order = _order(answers, states, kept)
    shown = order[:MOST]
    reasons, texts = reasons_of(model, predictions, shown), _texts(model, predictions)
    context = _Context(model, predictions, states, kept, reasons, answers, texts)
    cases = [_case(context, place) for place in shown]
    left_out = ""
    if len(order) > len(shown):
        left_out = f"{len(order) - len(shown)} more cases are only in the CSV file."
    document = predictions.document
    return render_page(
        "cases.html",
        "Cases and predictions",
        {
            "warning": WARNING,
            "sentence": _sentence(answers),
            "facts": page_facts(model, predictions.inputs, document, _sets(answers, document)),
            "columns": ["case", "look", *answers.columns, "novelty"],
            "overview": [case["row"] for case in cases],
            "overview_note": "Refused cases come first, then those unlike the training samples, "
            f"then doubtful ones, then {answers.last}.",
            "cases": cases,
            "left_out": left_out,
            "limits": [*answers.limits(), *context.reasons.limits, *_LIMITS, *_missing(context)],
        },
        subtitle=f"{model.title} on {model.common.dataset}, run {document['run']}",
        foot=f"{TITLE}. {WARNING} This page holds patients' data: keep it where they are.",
    )


def _states(
    predictions: Predictions, answers: CaseAnswers, kept: Mapping[int, int]
) -> list[_State]:
    """Find the state of each input, which says whether a person should look at the case.

    The first state that applies is chosen:

    - refused: the input could not be read.
    - unusual: it is unlike the training samples.
    - doubtful: a value may be a code such as 0 for "not measured", or novelty is uncertain or
      unknown.
    - unsure: the task finds its answer uncertain (``is_unsure``).
    - usual: any other input.

    The first three states have a sentence with the reason.

    Args:
        predictions: the predictions.
        answers: the answers, which decide which inputs are unsure.
        kept: index of an input -> its index among the readable inputs.
    """
    count = len(predictions.own)
    unusual, reasons = [False] * count, [""] * count
    if isinstance(predictions.novelty, str):
        # A case that could not be compared never has "nothing unusual"
        doubts = [f"It was not compared with training samples: {predictions.novelty}."] * count
    else:
        unusual = predictions.novelty.unusual().tolist()
        reasons = predictions.novelty.reasons(predictions.features)
        doubts = predictions.novelty.doubts(predictions.features)
    states = []
    for place in range(len(predictions.inputs.names)):
        if place not in kept:
            states.append(_State("refused", predictions.inputs.faults[place]))
            continue
        index = kept[place]
        if unusual[index]:
            states.append(_State("unusual", reasons[index]))
        elif doubts[index]:
            states.append(_State("doubtful", doubts[index]))
        elif answers.is_unsure(index):
            states.append(_State("unsure"))
        else:
            states.append(_State("usual"))
    return states


def _order(answers: CaseAnswers, states: Sequence[_State], kept: Mapping[int, int]) -> list[int]:
    """Sort the indices of all inputs so that cases that a person should check come first.

    The order of the states is refused, unusual, doubtful, unsure, usual. Among unusual cases, the
    most novel one comes first. Within any other state, ``answers.rank`` gives the order. For
    classes, the least probable answer comes first. Inputs that are equal by these rules keep their
    order.
    """
    predictions = answers.predictions
    novelty = np.zeros(len(predictions.own))
    if not isinstance(predictions.novelty, str):
        novelty = predictions.novelty.scores()
    keys = list(STATES)

    def sort_key(place: int) -> tuple[int, float, int]:
        state, first = states[place].key, 0.0
        if state == "unusual":
            first = -float(novelty[kept[place]])
        elif place in kept:
            first = answers.rank(kept[place])
        return keys.index(state), first, place

    return sorted(range(len(states)), key=sort_key)


def _name(predictions: Predictions, place: int) -> str:
    """Format a case's name: "P12 (line 3)", or "line 3" without an id."""
    name = f"{predictions.inputs.key} {predictions.inputs.names[place]}"
    if predictions.inputs.ids and predictions.inputs.ids[place]:
        return f"{predictions.inputs.ids[place]} ({name})"
    return name


def _case(context: _Context, place: int) -> dict[str, Any]:
    """Build the template variables of the case with index ``place`` among all inputs.

    The keys are these:

    - ``name``, ``state``, ``headline`` and ``why``: the case's name, its state such as "unusual",
      the state in words, and the sentence that explains it.
    - ``row``: the cells of the overview table, which are name, headline, answer and novelty.
    - ``bars``, ``notes`` and ``inputs``: the answer, further sentences, and the values of the
      case's table row.
    - ``image`` and ``image_text``: the picture and its description.
    - ``explained`` and ``explained_number``: whether the contributions of a table's columns are
      known, and the name of the number that they add to.

    If no answer is given, ``bars`` is empty. In ``row``, the first cell of the answer is then
    "none", and its other cells are "-". If the model predicted such a case, a note says so. If the
    case could not be read, all keys from ``bars`` on are empty or missing.
    """
    predictions, name = context.predictions, _name(context.predictions, place)
    index, state = context.kept.get(place), context.states[place]
    headline = STATES[state.key]
    case: dict[str, Any] = {"name": name, "state": state.key, "headline": headline}
    case |= {"why": state.why, "bars": [], "notes": [], "inputs": [], "image": ""}
    cells = ["none", *("-" for _ in context.answers.columns[1:])]
    if index is None:
        return case | {"row": [name, headline, *cells, "-"]}
    case |= {"explained": index in context.reasons.adds}
    case |= {"explained_number": context.answers.explained_number(index)}
    case |= context.reasons.picture(index)
    novelty = "-"
    if predictions.answered()[index]:
        cells = context.answers.cells(index)
        case["bars"] = context.answers.bars(index)
        case["notes"] += context.answers.notes(index)
    else:
        case["notes"].append("No answer is given for such a case; --answer-all gives one.")
    case["inputs"] = _values(context, index)
    if not isinstance(predictions.novelty, str):
        novelty = f"{predictions.novelty.scores()[index]:.2f}"
    case["row"] = [name, headline, *cells, novelty]
    return case


def _values(context: _Context, index: int) -> list[Any]:
    """List the values in the table row of a case, as the page shows them.

    The result is a list of ``Value``, which is empty for images. A value that is unlike all
    training values is marked as unusual. If the contribution of a value to the prediction was
    computed, it is included. ``index`` is the case's index among the readable inputs.
    """
    read = context.predictions.inputs.read
    if context.texts is None or read is None:
        return []
    # Without known novelty, no value is marked
    novelty, unusual = context.predictions.novelty, tuple[str, ...]()
    if not isinstance(novelty, str):
        unusual = novelty.columns(context.predictions.features)[index]
    adds = context.reasons.adds.get(index, {})
    return list(context.texts.of(read[index].double().numpy(), unusual, adds))


def _texts(model: TrainedModel, predictions: Predictions) -> ValueTexts | None:
    """Build the object that formats a table's values. For images, return None.

    The object describes the usual values of a column from training rows. It gets these rows only if
    novelty is known, and if the run's setting 'trust' is not ``nobody``.
    """
    if not model.silo.features:
        return None
    assert model.silo.standardisation is not None
    schema, floor = table_schema(model), model.common.sums_min_count
    # Without training rows, the page shows no usual values
    rows, novelty = np.zeros((0, len(model.silo.features))), predictions.novelty
    if not isinstance(novelty, str) and model.common.trust != NOBODY:
        rows = novelty.reference.rows
    return ValueTexts(schema, rows, model.silo.standardisation, floor)


def _sentence(answers: CaseAnswers) -> str:
    predictions, model = answers.predictions, answers.model
    cases, unread = len(predictions.inputs.names), len(predictions.inputs.faults)
    held = predictions.answered().count(False)
    sites = format_count(len(model.sites), "site")
    return (
        f"The model says {answers.question()} each of {format_count(cases, 'case')}. "
        f"{model.title} trained it at {sites}. "
        f"Not used: {format_count(unread, 'case')}. "
        f"Without an answer, because they are unlike the training samples: {held}."
    )


def _sets(answers: CaseAnswers, document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Describe the prediction sets for the list of facts on the page, as a list of (name, text).

    The list has one pair, or none if the task has no prediction sets. If sets were made, the text
    states their coverage. Otherwise it names the option ``--coverage``, which asks for sets.

    Args:
        answers: the answers, which tell whether the task has prediction sets.
        document: the content of the JSON next to the predictions. Its 'calibration' is None if no
            calibration was applied, and the 'coverage' in it is None if no sets were made.
    """
    if not answers.has_sets:
        return []
    coverage = (document["calibration"] or {}).get("coverage")
    if coverage:
        return [("sets", f"coverage {coverage:g}")]
    return [("sets", "none: --coverage asks for them")]


def page_facts(
    model: TrainedModel,
    inputs: Inputs,
    document: Mapping[str, Any],
    further: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """Build the facts at the beginning of a page of predictions, as pairs (name, text).

    The facts are the data set, the method, the run, the model, the site, and the name of the file
    or folder with the cases. Then come ``further``, today's date, and the versions of the software.

    Args:
        model: the model.
        inputs: the cases.
        document: the content of the JSON next to the predictions, with the keys run, model, weights
            and software.
        further: more pairs, such as the coverage of prediction sets.
    """
    software = document["software"]
    return [
        ("data set", model.common.dataset),
        ("method", str(model.title)),
        ("run", str(document["run"])),
        ("model", f"{document['model']}, SHA-256 {document['weights'][:16]}"),
        ("site", model.site),
        ("cases from", ", ".join(Path(value).name for value in inputs.source.values())),
        *further,
        ("made on", datetime.date.today().isoformat()),
        ("version", ", ".join(f"{name} {version}" for name, version in software.items())),
    ]


def _missing(context: _Context) -> list[str]:
    """List sentences on the basis of novelty, and on usual values that the page does not show.

    The first sentences state the training samples with which cases were compared. If novelty is
    unknown, one sentence has the reason instead. If the page shows values of a table and the run's
    setting 'trust' is ``nobody``, the last sentence says that usual values are not shown.
    """
    novelty, said = context.predictions.novelty, []
    if isinstance(novelty, str):
        said.append(f"It is not known whether a case is like the training samples: {novelty}.")
    else:
        for line in novelty.reference.lines():
            said.append(f"{line[0].upper()}{line[1:]}.")
    if context.texts and context.model.common.trust == NOBODY:
        said.append("What is usual in training is not shown: the run was made for trust nobody.")
    return said
