"""``fedsilo predict --html``: a page of cases, sorted by what needs a look first.

The page holds patients' data and stays where the predictions were made.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.core.metric_names import CONFIDENCE
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import NOBODY
from fedsilo.inference.predict.answers import Predictions
from fedsilo.inference.predict.case_details import Reasons, ValueTexts, reasons_of
from fedsilo.inference.predict.inputs import table_schema
from fedsilo.models.measures.intervals import wilson
from fedsilo.models.measures.outcome_counts import Bin, bins, merge_bins
from fedsilo.pages.page import render_page
from fedsilo.reports.clinic import TITLE, WARNING, final_metrics
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel

MOST = 200  # largest number of cases on a page
_UNSURE = 0.8  # a case whose answer has a lower probability needs a look
_STATES = {
    "refused": "refused: no prediction",
    "unusual": "unlike the training samples",
    "doubtful": "answered, but something needs a look",
    "unsure": "the model is not sure",
    "usual": "nothing unusual",
}
_LIMITS = (
    "A probability is the model's. The black line on the bar of the answer is the share of right "
    "answers that the run's test samples had at about this probability, with its 95 % interval.",
    "What an input adds says how the model uses it. It does not say that the input causes the "
    "disease, or that changing it helps.",
    "A case is unlike the training samples if its novelty is above 1. The model has not been "
    "tested on such cases, so neither probability nor set can be relied on.",
    "A case with a novelty of 1 or less can still be one that the model gets wrong.",
)


@dataclass(frozen=True)
class _State:
    """The state of a case, a key of ``_STATES``, and the sentence that explains it, or empty."""

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
    reliability: Sequence[Bin]
    texts: ValueTexts | None  # formats the values of a table; None for images


def cases_page(run: Shown, model: TrainedModel, predictions: Predictions) -> str:
    """Build the HTML page of a prediction's cases, those that need a look first.

    It shows at most 200 cases. ``run`` is the run of the model, without what pages must not show.
    """
    kept = {place: index for index, place in enumerate(predictions.inputs.kept())}
    states = _states(predictions, kept)
    order = _order(predictions, states, kept)
    shown = order[:MOST]
    reasons, texts = reasons_of(model, predictions, shown), _texts(model, predictions)
    context = _Context(model, predictions, states, kept, reasons, _reliability(run), texts)
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
            "sentence": _sentence(predictions, model),
            "facts": _facts(model, predictions, document),
            "overview": [case["row"] for case in cases],
            "overview_note": "Refused cases come first, then those unlike the training samples, "
            "then doubtful ones, then those of which the model is least sure.",
            "cases": cases,
            "left_out": left_out,
            "limits": [*_LIMITS, *context.reasons.limits, *_missing(context)],
        },
        subtitle=f"{model.title} on {model.common.dataset}, run {document['run']}",
        foot=f"{TITLE}. {WARNING} This page holds patients' data: keep it where they are.",
    )


def _states(predictions: Predictions, kept: Mapping[int, int]) -> list[_State]:
    """Find the state of each input: the first of ``_STATES`` that applies.

    ``kept`` maps the index of an input to its index among the readable inputs.
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
        elif _is_unsure(predictions, index):
            states.append(_State("unsure"))
        else:
            states.append(_State("usual"))
    return states


def _is_unsure(predictions: Predictions, index: int) -> bool:
    """Tell whether the model is unsure about a case.

    The model is unsure if the probability of its answer is below 0.8. If there are prediction sets,
    it is also unsure if the case's set does not have exactly one class.
    """
    if predictions.sets is not None and int(predictions.sets[index].sum()) != 1:
        return True
    return bool(predictions.probabilities[index].max() < _UNSURE)


def _order(
    predictions: Predictions, states: Sequence[_State], kept: Mapping[int, int]
) -> list[int]:
    """Sort the indices of all inputs by state, in the order of ``_STATES``.

    Within the state "unusual", the case with the highest novelty comes first. Within any other
    state, the case with the least probable answer comes first.
    """
    novelty = np.zeros(len(predictions.own))
    if not isinstance(predictions.novelty, str):
        novelty = predictions.novelty.scores()
    keys = list(_STATES)

    def sort_key(place: int) -> tuple[int, float, int]:
        state, first = states[place].key, 0.0
        if state == "unusual":
            first = -float(novelty[kept[place]])
        elif place in kept:
            first = float(predictions.probabilities[kept[place]].max())
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

    ``row`` has the case's cells for the overview table: name, headline, answer, probability and
    novelty. If the case has no answer, its answer cell is "none", its probability cell is "-", and
    ``probabilities`` is empty. A case without a prediction has only its name, its state and the
    reason.
    """
    predictions, name = context.predictions, _name(context.predictions, place)
    index, state = context.kept.get(place), context.states[place]
    headline = _STATES[state.key]
    case: dict[str, Any] = {"name": name, "state": state.key, "headline": headline}
    case |= {"why": state.why, "probabilities": [], "notes": [], "inputs": [], "image": ""}
    if index is None:
        return case | {"row": [name, headline, "none", "-", "-"]}
    answer = predictions.predicted()[index]
    answered = predictions.answered()[index]
    case |= {"answer": answer, "explained": index in context.reasons.adds}
    case |= context.reasons.picture(index)
    shown_answer, share, novelty = "none", "-", "-"
    if answered:
        shown_answer = answer
        share = f"{float(predictions.probabilities[index].max()):.2f}"
        case["probabilities"] = _probabilities(context, index)
        case["notes"] += _notes(context, index)
    else:
        case["notes"].append("No answer is given for such a case; --answer-all gives one.")
    case["inputs"] = _values(context, index)
    if not isinstance(predictions.novelty, str):
        novelty = f"{predictions.novelty.scores()[index]:.2f}"
    case["row"] = [name, headline, shown_answer, share, novelty]
    return case


def _probabilities(context: _Context, index: int) -> list[tuple[Any, ...]]:
    """Return (class, probability, text, low, high) for each class, the most probable first.

    ``low`` and ``high`` are the 95 % interval of the share of right answers among the run's test
    samples with about the same confidence. Only the first class has them, and only if there are
    such test samples. Otherwise they are None.
    """
    shares = context.predictions.probabilities[index].tolist()
    limits: tuple[float | None, float | None] = (None, None)
    similar = _bin(context, index)
    if similar:
        interval = wilson(similar.right, similar.count)
        limits = (interval.low, interval.high)
    rows: list[tuple[Any, ...]] = []
    for place in np.argsort(shares)[::-1]:
        rows.append(
            (context.predictions.classes[place], shares[place], f"{shares[place]:.2f}", *limits)
        )
        limits = (None, None)
    return rows


def _bin(context: _Context, index: int) -> Bin | None:
    """Find the bin of the run's test samples whose mean confidence is nearest to the case's.

    The difference must be below 0.1, otherwise the result is None. If two bins are equally near,
    the first is returned.
    """
    # Bins count the model's own confidence, without a calibration's temperature
    sure = float(context.predictions.own[index].max())
    nearest = None
    distance = 0.1
    for candidate in context.reliability:
        if abs(candidate.mean - sure) < distance:
            nearest = candidate
            distance = abs(candidate.mean - sure)
    return nearest


def _notes(context: _Context, index: int) -> list[str]:
    """Return sentences about an answered case.

    The sentences are about similar test samples of the run, the prediction set, and the router's
    weights. Each is left out if its numbers are not available.
    """
    predictions, notes = context.predictions, []
    similar = _bin(context, index)
    if similar:
        interval = wilson(similar.right, similar.count)
        before = " before calibration"
        if predictions.probabilities is predictions.own:
            before = ""
        notes.append(
            f"Of {similar.count} test samples of the run with a probability of about "
            f"{similar.mean:.2f}{before}, {similar.right / similar.count:.0%} were right (95 % "
            f"interval {interval.low:.0%} to {interval.high:.0%})."
        )
    if predictions.sets is not None:
        names = list(compress(predictions.classes, predictions.sets[index]))
        notes.append(f"Prediction set: {', '.join(names) or 'empty: no class fits'}.")
    weights = []
    for name, values in predictions.statistics.items():
        if name.startswith("weight."):
            weights.append((name.removeprefix("weight."), float(values[index])))
    if weights:
        weights.sort(key=lambda pair: -pair[1])
        said = ", ".join(f"{site} {share:.0%}" for site, share in weights)
        notes.append(f"The router's share of each site's expert: {said}.")
    return notes


def _values(context: _Context, index: int) -> list[Any]:
    """List a table row's values as the page shows them; empty for images.

    A value is marked if it is unusual in its column, and has its contribution to the prediction if
    that was computed.
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
    """Build the object that formats a table's values; None for images.

    The object gets training rows, which describe usual values, only if novelty is known and the
    trust level is not ``nobody``.
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


def _reliability(run: Shown) -> list[Bin]:
    """Return the bins of the test samples by confidence, the same as in the clinic report.

    Other bins over the same samples would reveal counts, by the difference between the pages.
    """
    return merge_bins(bins(final_metrics(run).values(), CONFIDENCE), run.floor)


def _sentence(predictions: Predictions, model: TrainedModel) -> str:
    cases, unread = len(predictions.inputs.names), len(predictions.inputs.faults)
    held = predictions.answered().count(False)
    sites = format_count(len(model.sites), "site")
    return (
        f"The model says which of {', '.join(predictions.classes)} applies to each of "
        f"{format_count(cases, 'case')}. {model.title} trained it at {sites}. "
        f"Not used: {format_count(unread, 'case')}. Unlike the training samples, no answer: {held}."
    )


def _facts(
    model: TrainedModel, predictions: Predictions, document: Mapping[str, Any]
) -> list[tuple[str, str]]:
    software = document["software"]
    calibration = document["calibration"] or {}
    coverage = calibration.get("coverage")
    sets = "none: --coverage asks for them"
    if coverage:
        sets = f"coverage {coverage:g}"
    return [
        ("data set", model.common.dataset),
        ("method", str(model.title)),
        ("run", str(document["run"])),
        ("model", f"{document['model']}, SHA-256 {document['weights'][:16]}"),
        ("site", model.site),
        ("cases from", ", ".join(Path(value).name for value in predictions.inputs.source.values())),
        ("sets", sets),
        ("made on", datetime.date.today().isoformat()),
        ("version", ", ".join(f"{name} {version}" for name, version in software.items())),
    ]


def _missing(context: _Context) -> list[str]:
    """Return sentences about the basis of novelty and about missing parts of the page.

    The page may lack the usual values of training, and the intervals of the share of right answers.
    """
    novelty, said = context.predictions.novelty, []
    if isinstance(novelty, str):
        said.append(f"It is not known whether a case is like the training samples: {novelty}.")
    else:
        for line in novelty.reference.lines():
            said.append(f"{line[0].upper()}{line[1:]}.")
    if context.texts and context.model.common.trust == NOBODY:
        said.append("What is usual in training is not shown: the run was made for trust nobody.")
    if not context.reliability:
        said.append(
            f"The run, made for trust {context.model.common.trust}, has recorded no counts of "
            "right answers by probability: the bars have no interval."
        )
    return said
