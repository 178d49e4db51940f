"""Sections of the clinic report: metrics by group of patients, and the decision curve.

Both kinds of section predict the test samples again, so they need the sites' data. A group is shown
only if it has enough patients in each class, a threshold only if enough patients are between it and
the next one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.inference.predict.inputs import CaseSource, open_inputs, table_schema
from fedsilo.inference.predict.prediction import predict_inputs
from fedsilo.models.measures.decision_curve import net_benefit
from fedsilo.models.measures.intervals import of_share
from fedsilo.pages.page import Picture, Table, edge_names, with_interval
from fedsilo.pages.page_pictures import curves, estimates
from fedsilo.reports.clinic import Examination
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel

_TITLE = "Groups of patients, and decisions"
_BENEFIT = "Benefit of acting on the model"
_THRESHOLDS = [percent / 100 for percent in range(5, 100, 5)]
_EVEN = 0.5  # the second class is the prediction if its probability is at least this
_LOWEST = -0.15  # the curve for acting on all falls without limit, so it is cut off here


@dataclass(frozen=True)
class Examined:
    """The pooled test samples of all sites whose metrics may be shown, with their predictions."""

    sites: Sequence[str]  # their names
    classes: Sequence[str]
    floor: int
    probabilities: Tensor  # (n, classes) of the sites' models
    labels: Tensor  # (n,) int64
    # (n, features) as they were read, NaN where a value is missing; None for images
    rows: Tensor | None


@dataclass(frozen=True)
class GroupColumn:
    """A column that patients are grouped by."""

    name: str  # name of the column
    places: Sequence[int]  # indices of its features: one, or one per level except the first
    levels: Sequence[str]  # levels of a categorical column, otherwise empty
    edges: Sequence[float]  # edges between the groups of a numeric column, otherwise empty

    def groups(self, rows: Tensor) -> tuple[Tensor, list[str]]:
        """Assign each of the ``rows`` (n, features) to a group of this column.

        For a categorical column, each level is a group. For a numeric column, the edges separate
        the groups, and a value on an edge belongs to the group above it. Without edges, all numbers
        are in one group, "all". Rows with a missing value form the last group, "not known".

        Returns:
            The number of the group of each row (n,), and the names of the groups in the order of
            their numbers. "not known" is listed only if a row has a missing value.
        """
        values = rows[:, list(self.places)]
        if self.levels:
            names = list(self.levels)
            # The first level has its own rows, but not a feature: all their features are 0
            found = torch.where(values.max(dim=1).values > 0.5, values.argmax(dim=1) + 1, 0)
        else:
            names = ["all"]
            if self.edges:
                names = edge_names(self.edges)
            edges = torch.tensor(self.edges, dtype=values.dtype)
            found = torch.bucketize(values[:, 0].contiguous(), edges, right=True)
        unknown = values[:, 0].isnan()
        found = found.masked_fill(unknown, len(names))
        if unknown.any():
            names = [*names, "not known"]
        return found, names


@dataclass(frozen=True)
class Group:
    """A group of patients: the number of patients and of right predictions, by class."""

    name: str
    counts: tuple[int, ...]
    right: tuple[int, ...]

    def is_enough(self, floor: int) -> bool:
        """Tell whether the group has enough patients for its metrics to be shown.

        With two classes, each class needs at least ``floor`` patients. With more classes, ``floor``
        patients in all are enough. Then at least two predictions must also be right, and at least
        two wrong.
        """
        if len(self.counts) == 2:
            return min(self.counts) >= floor
        # An accuracy with at most one right, or wrong, answer would reveal single patients
        samples, right = sum(self.counts), sum(self.right)
        return samples >= floor and 2 <= right <= samples - 2

    def merge_with(self, other: Group) -> Group:
        """Return a group with the patients of this group and of ``other``, the next one."""
        counts = _add(self.counts, other.counts)
        return Group(_join_names(self.name, other.name), counts, _add(self.right, other.right))


def _add(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.add, first, second))


def _join_names(first: str, second: str) -> str:
    """Join the names of two neighbouring groups of patients, to name their union.

    ``first`` must be the lower range. ``30 to 40`` and ``40 to 50`` give ``30 to 50``. ``below 30``
    and ``30 to 40`` give ``below 40``. ``40 to 50`` and ``from 50`` give ``from 40``. ``below 40``
    and ``from 40`` give ``any value``. Names that are not neighbouring ranges are joined by "or".
    """
    start, _, end = first.rpartition(" ")
    if second == f"from {end}":
        if start == "below":
            return "any value"
        return f"from {start.removesuffix(' to')}"
    if second.startswith(f"{end} to "):
        return f"{start} {second.removeprefix(f'{end} to ')}"
    return f"{first} or {second}"


def group_patients(pooled: Examined, column: GroupColumn) -> list[Group]:
    """Group the test patients by a column, and merge groups that are too small to be shown.

    For each group, two numbers are counted for each true class: the patients, and the patients
    whose prediction is right. A prediction is right if the most probable class is the true one.
    ``Group.is_enough`` decides which groups are too small. If all patients together are too few,
    the list is empty.

    Args:
        pooled: the test patients of all sites with their predictions. They must be rows of a table.
        column: the column to group by.
    """
    assert pooled.rows is not None, "a column is of a table"
    place_of, names = column.groups(pooled.rows)
    hits = pooled.probabilities.argmax(dim=1) == pooled.labels
    groups = []
    for place, name in enumerate(names):
        labels = pooled.labels[place_of == place]
        right_labels = pooled.labels[(place_of == place) & hits]
        # minlength, because the last class may be missing in a group
        counts = torch.bincount(labels, minlength=len(pooled.classes)).tolist()
        right = torch.bincount(right_labels, minlength=len(pooled.classes)).tolist()
        groups.append(Group(name, tuple(counts), tuple(right)))
    return merge_small_groups(groups, pooled.floor)


def merge_small_groups(groups: Sequence[Group], floor: int) -> list[Group]:
    """Merge neighbouring groups until each is large enough to be shown.

    ``Group.is_enough`` decides whether a group is large enough. A group that is too small takes in
    the groups after it, one by one, until it is large enough. If the last group is still too small,
    it takes in the groups before it in the same way.

    Args:
        groups: the groups in order.
        floor: the smallest number of patients that ``Group.is_enough`` requires.

    Returns:
        Groups that are all large enough, in order. The list is empty if all patients together are
        too few.
    """
    kept: list[Group] = []
    for group in groups:
        if kept and not kept[-1].is_enough(floor):
            kept.append(kept.pop().merge_with(group))
        else:
            kept.append(group)
    # The last group can only merge with the one before, and may still be too small
    while len(kept) > 1 and not kept[-1].is_enough(floor):
        last = kept.pop()
        kept.append(kept.pop().merge_with(last))
    if not kept or not kept[-1].is_enough(floor):
        return []
    return kept


def examine_groups(pooled: Examined, column: GroupColumn) -> Examination:
    """Build the report's section on groups of patients by a column of the table, such as age.

    The section has a picture and a table. The picture shows the accuracy in each group with a 95 %
    interval. Groups with too few patients to be shown (``Group.is_enough``) are merged with their
    neighbours. If fewer than two groups remain, the section has only a sentence that says so.
    """
    groups, title = group_patients(pooled, column), f"By {column.name}"
    if len(groups) < 2:
        why = (
            f"Fewer than two groups have enough patients to be shown: at least {pooled.floor}, or "
            f"{pooled.floor} of each class if there are two classes."
        )
        return Examination(title, [why])
    drawn = {}
    texts = []
    for group in groups:
        accuracy = of_share(sum(group.right), sum(group.counts))
        drawn[group.name] = accuracy
        texts.append(f"{group.name}: {with_interval(accuracy)}")
    said = "; ".join(texts)
    label = "share of test patients predicted correctly"
    svg = estimates(f"by-{column.name}", {"accuracy": drawn}, label)
    picture = Picture(svg, f"Accuracy by {column.name}. {said}.", f"Accuracy by {column.name}.")
    return Examination(title, picture=picture, tables=[_group_table(pooled, column, groups)])


def _group_table(pooled: Examined, column: GroupColumn, groups: Sequence[Group]) -> Table:
    binary = len(pooled.classes) == 2
    names = []
    if binary:
        names = ["specificity", "sensitivity"]
    rows = []
    for group in groups:
        samples, right = sum(group.counts), sum(group.right)
        cells = [_cell(right, samples)]
        if binary:
            # Specificity and sensitivity are the shares of right answers in the two classes
            cells += map(_cell, group.right, group.counts)
        rows.append([group.name, str(samples), *cells])
    note = (
        f"Test patients of {', '.join(pooled.sites)}; in brackets 95 % intervals (Wilson). A group "
        f"with fewer than {pooled.floor} patients in a class is merged with its neighbour. Many "
        "groups are compared, so a single difference may be due to chance."
    )
    if binary:
        note += f" Sensitivity is for class '{pooled.classes[1]}'."
    return Table(f"By {column.name}", (column.name, "patients", "accuracy", *names), rows, note)


def _cell(right: int, samples: int) -> str:
    return with_interval(of_share(right, samples))


def thresholds(scores: Tensor, floor: int) -> Iterator[float]:
    """Yield the thresholds of a decision curve that may be shown, in ascending order.

    The curve must not reveal the predictions for fewer than ``floor`` patients. The multiples of
    0.05 from 0.05 to 0.95 are tried in turn. A threshold t is yielded if at least ``floor`` of the
    ``scores`` (n,) are in each of two ranges. A range includes its start but not its end. With p
    for the threshold yielded before t, at first 0, the ranges are these:

    - If t is below 0.5: from p to t, and from t to 0.5.
    - If t is 0.5: from p to t, and from t upwards.
    - If t is above 0.5: from the larger of p and 0.5 to t, and from t upwards.
    """
    before = 0.0
    for threshold in _THRESHOLDS:
        # Patients between the threshold and its neighbours; 0.5 always counts as a neighbour
        start, end = before, math.inf
        if threshold > _EVEN:
            start = max(before, _EVEN)
        if threshold < _EVEN:
            end = _EVEN
        below = (scores >= start) & (scores < threshold)
        above = (scores >= threshold) & (scores < end)
        if min(int(below.sum()), int(above.sum())) >= floor:
            yield threshold
            before = threshold


def examine_decisions(pooled: Examined) -> Examination:
    """Build the report's section on the decision curve: does acting on the model's answers help?

    A threshold is the probability from which somebody acts. The curve shows the net benefit per
    patient for each threshold (Vickers and Elkin 2006). The section has an explanation, a picture
    and a table. The picture and the table compare the model with acting on everybody. The picture
    also shows acting on nobody.

    If the run does not have two classes, or if there are too few patients for any threshold, the
    section has only a sentence that says so.
    """
    if len(pooled.classes) != 2:
        return Examination(_BENEFIT, ["A decision curve needs two classes, but this run has more."])
    benefits = _net_benefits(pooled)
    if not benefits:
        return Examination(_BENEFIT, ["There are too few test patients for a decision curve."])
    explained = (
        f"A threshold is the probability of '{pooled.classes[1]}' from which somebody acts. It "
        "states how bad a miss is compared with a false alarm: 9 times as bad at 0.1, equally bad "
        "at 0.5. Net benefit is the number of true positives per patient, minus the false alarms "
        "weighted by the threshold's odds. The model is useful at a threshold if its net benefit "
        "is above that of acting on everybody and above 0, that of acting on nobody."
    )
    picture = _draw_benefits(benefits, pooled.classes[1])
    return Examination(_BENEFIT, [explained], picture, [_benefit_table(pooled, benefits)])


@dataclass(frozen=True)
class _Benefit:
    """The net benefits per patient at one threshold."""

    threshold: float
    of_model: float  # acting on the patients whose score reaches the threshold
    of_all: float  # acting on everybody


def _net_benefits(pooled: Examined) -> list[_Benefit]:
    scores, ill = pooled.probabilities[:, 1], pooled.labels == 1
    patients, benefits = len(scores), list[_Benefit]()
    for threshold in thresholds(scores, pooled.floor):
        acted = scores >= threshold
        hits, false_alarms = int((acted & ill).sum()), int((acted & ~ill).sum())
        of_model = net_benefit(hits, false_alarms, patients, threshold)
        of_all = net_benefit(int(ill.sum()), int((~ill).sum()), patients, threshold)
        benefits.append(_Benefit(threshold, of_model, of_all))
    return benefits


def _draw_benefits(benefits: Sequence[_Benefit], ill: str) -> Picture:
    """Draw the net benefit of acting on the model, on all patients and on nobody, by threshold.

    The curve for acting on all patients is cut below -0.15, to keep it inside the picture. The
    caption lists the thresholds at which the model has more net benefit than both alternatives.
    ``ill`` is the name of the second class, for the legend.
    """
    model, everybody, nobody = dict[int, float](), dict[int, float](), dict[int, float]()
    best = []
    for one in benefits:
        percent = round(100 * one.threshold)
        model[percent], nobody[percent] = one.of_model, 0.0
        # The curve is drawn only inside the picture
        if one.of_all > _LOWEST:
            everybody[percent] = one.of_all
        if one.of_model > max(0.0, one.of_all):
            best.append(f"{one.threshold:g}")
    lines = {"the model": model, f"all are '{ill}'": everybody, "nobody": nobody}
    said = f"Thresholds at which the model is above both: {', '.join(best) or 'none'}."
    svg = curves("decision", lines, line_styles(list(lines)), "net benefit", "threshold in percent")
    return Picture(svg, f"Net benefit by threshold. {said}", said)


def _benefit_table(pooled: Examined, benefits: Sequence[_Benefit]) -> Table:
    rows = []
    for benefit in benefits:
        cells = [f"{benefit.of_model:.3f}", f"{benefit.of_all:.3f}"]
        rows.append([f"{benefit.threshold:g}", *cells])
    note = (
        f"Vickers and Elkin 2006; {len(pooled.labels)} test patients of {', '.join(pooled.sites)}. "
        f"At least {pooled.floor} patients lie between two thresholds."
    )
    return Table("Net benefit", ("threshold", "the model", "acting on all"), rows, note)


def examine(
    run: Shown, by: Sequence[str], decisions: bool, data_dir: Path | None
) -> list[Examination]:
    """Build the clinic report's sections that need the sites' data.

    The sections are about the test samples of all sites together. A site is left out if one of its
    test counts is hidden because of too few patients. If no site is left, the only section says
    that there are too few patients. If the run's setting 'trust' is not ``server``, the only
    section says that no metrics of groups may be shown.

    Args:
        run: a view of the run without the metrics and counts that must not be shown.
        by: columns of the run's table. For each, a section shows the metrics by group of patients.
        decisions: whether to add a section on the decision curve.
        data_dir: the data directory. None means the run's own.

    Raises:
        SettingError: the run does not predict class probabilities, or its table lacks a column of
            ``by``.
        FedsiloError: the data or a model cannot be opened.
    """
    run.require_classes("report' with --by or '--decisions")
    # The level is checked before any data are opened
    level = run.settings.common.trust
    if level != SERVER:
        why = f"At 'trust: {level}' no metrics of patient groups leave a site, so none are shown."
        return [Examination(_TITLE, [why])]
    # A site with hidden counts is left out, because the pooled counts would reveal them
    sites = [site for site in run.silos if site not in run.withheld]
    if not sites:
        why = f"Every site has a class with fewer than {run.floor} test patients."
        return [Examination(_TITLE, [why])]
    models = [run.model(site, data_dir=data_dir) for site in sites]
    columns = [_column(models[0], name) for name in by]
    pooled = _pool_predictions(run, models)
    sections = [examine_groups(pooled, column) for column in columns]
    if decisions:
        sections.append(examine_decisions(pooled))
    return sections


def _pool_predictions(run: Shown, models: Sequence[TrainedModel]) -> Examined:
    """Predict the test samples of several sites, and join the results of all sites.

    The result has the probabilities and the labels. For a table, it also has the rows before
    standardisation. The class names are those of the first model.

    Args:
        run: the run, which gives the smallest number of patients that may be shown.
        models: the run's model, opened at each site to examine.
    """
    probabilities, labels, rows = [], [], []
    for model in models:
        inputs = open_inputs(model, CaseSource("split", "test"))
        probabilities.append(predict_inputs(model, inputs).own)
        labels.append(model.samples("test").labels)
        if inputs.read is not None:
            rows.append(inputs.read)
    all_rows = None
    if rows:
        all_rows = torch.cat(rows)
    return Examined(
        sites=[model.site for model in models],
        classes=models[0].classes,
        floor=run.floor,
        probabilities=torch.cat(probabilities),
        labels=torch.cat(labels),
        rows=all_rows,
    )


def _column(model: TrainedModel, name: str) -> GroupColumn:
    """Find a column of the run's table by its name, to group patients by it.

    The result has the indices of the column's features. For a categorical column, it has the names
    of the levels. For a numeric column, it has the edges between the groups, which the table's
    schema declares. Without declared edges, seven edges are used: the declared mean, and the mean
    plus and minus 1, 2 and 3 declared standard deviations. Without a declared mean or deviation,
    there are no edges.

    Raises:
        SettingError: the run's data are images, or the column is not in the table.
    """
    if not model.silo.features:
        raise SettingError(
            f"--by '{name}' names a column of a table, but the run's data are images: remove --by"
        )
    features, schema = model.silo.features, table_schema(model)
    columns = {column.name: column for column in schema.columns if column.kind != "ignored"}
    if name not in columns:
        raise SettingError(
            f"--by must be a column of the table ({', '.join(columns)}), but is '{name}'"
        )
    # A categorical column has a feature 'column=level' for each of its levels
    places = []
    for place, feature in enumerate(features):
        if feature == name or feature.startswith(f"{name}="):
            places.append(place)
    levels = tuple(columns[name].levels)
    edges: Sequence[float] = ()
    if not levels:
        edges = columns[name].survey_edges()
    return GroupColumn(name, places, levels, edges)
