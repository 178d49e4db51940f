"""Metrics by group of patients, where each group has enough patients in each class."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.models.measures.intervals import of_share
from fedsilo.pages.page import Picture, Table, edge_names, with_interval
from fedsilo.pages.page_pictures import estimates
from fedsilo.reports.clinic import Examination


@dataclass(frozen=True)
class Examined:
    """Test samples of all sites whose metrics may be shown, together."""

    sites: Sequence[str]  # their names
    classes: Sequence[str]
    floor: int
    probabilities: Tensor  # (n, classes) of the sites' models
    labels: Tensor  # (n,) int64
    # (n, features) as they were read, NaN where a value is missing; None for images
    rows: Tensor | None


@dataclass(frozen=True)
class GroupColumn:
    """A column by which patients are grouped."""

    name: str  # name of the column
    places: Sequence[int]  # indices of its features: one, or one per level except the first
    levels: Sequence[str]  # levels of a categorical column, otherwise empty
    edges: Sequence[float]  # edges between the groups of a numeric column, otherwise empty

    def groups(self, rows: Tensor) -> tuple[Tensor, list[str]]:
        """Return the group number of each row (n,), and the names of the groups.

        Rows with a missing value are a group of their own, the last one.
        """
        values = rows[:, list(self.places)]
        if self.levels:
            names = list(self.levels)
            # The first level has no feature: all features of its rows are 0
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
    """Patients of a group: counts and right answers by class."""

    name: str
    counts: tuple[int, ...]
    right: tuple[int, ...]

    def is_enough(self, floor: int) -> bool:
        """Tell whether the group's metrics may be shown without revealing a smaller count."""
        if len(self.counts) == 2:
            return min(self.counts) >= floor
        # An accuracy with at most one right, or wrong, answer would reveal single patients
        samples, right = sum(self.counts), sum(self.right)
        return samples >= floor and 2 <= right <= samples - 2

    def with_(self, other: Group) -> Group:
        """Merge this group with its neighbour ``other``."""
        counts = _add(self.counts, other.counts)
        return Group(_join_names(self.name, other.name), counts, _add(self.right, other.right))


def _add(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.add, one, other))


def _join_names(one: str, other: str) -> str:
    """Name two neighbours together: ``30 to 40`` and ``40 to 50`` are ``30 to 50``."""
    start, _, end = one.rpartition(" ")
    if other == f"from {end}":
        return f"from {start.removesuffix(' to')}"
    if other.startswith(f"{end} to "):
        return f"{start} {other.removeprefix(f'{end} to ')}"
    return f"{one} or {other}"


def group_patients(found: Examined, column: GroupColumn) -> list[Group]:
    """Group patients by a column; a group that is too small or empty is merged with the next."""
    assert found.rows is not None, "a column is of a table"
    place_of, names = column.groups(found.rows)
    hits = found.probabilities.argmax(dim=1) == found.labels
    groups = []
    for place, name in enumerate(names):
        labels = found.labels[place_of == place]
        right_labels = found.labels[(place_of == place) & hits]
        counts = torch.bincount(labels, minlength=len(found.classes)).tolist()
        right = torch.bincount(right_labels, minlength=len(found.classes)).tolist()
        groups.append(Group(name, tuple(counts), tuple(right)))
    return merge_small_groups(groups, found.floor)


def merge_small_groups(groups: Sequence[Group], floor: int) -> list[Group]:
    """Merge each group that is too small with the next one, and the last with the one before.

    Returns:
        Groups that are all large enough; none if even all patients together are too few.
    """
    kept: list[Group] = []
    for group in groups:
        if kept and not kept[-1].is_enough(floor):
            kept.append(kept.pop().with_(group))
        else:
            kept.append(group)
    # The last group has no next one. Merged with the one before, it may still be too small.
    while len(kept) > 1 and not kept[-1].is_enough(floor):
        last = kept.pop()
        kept.append(kept.pop().with_(last))
    if not kept or not kept[-1].is_enough(floor):
        return []
    return kept


def examine_groups(found: Examined, column: GroupColumn) -> Examination:
    """Compute the metrics by group of a column."""
    groups, title = group_patients(found, column), f"By {column.name}"
    if len(groups) < 2:
        why = f"There are no two groups with {found.floor} patients of each class."
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
    return Examination(title, picture=picture, tables=[_table(found, column, groups)])


def _table(found: Examined, column: GroupColumn, groups: Sequence[Group]) -> Table:
    binary = len(found.classes) == 2
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
        f"Test patients of {', '.join(found.sites)}; in brackets 95 % intervals (Wilson). A group "
        f"with fewer than {found.floor} patients in a class is merged with its neighbour. Many "
        "groups are compared, so a single difference may be due to chance."
    )
    if binary:
        note += f" Sensitivity is for class '{found.classes[1]}'."
    return Table(f"By {column.name}", (column.name, "patients", "accuracy", *names), rows, note)


def _cell(right: int, samples: int) -> str:
    return with_interval(of_share(right, samples))
