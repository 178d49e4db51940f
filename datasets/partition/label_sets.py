"""Choose labels and samples of each silo for partition ``unseen``, without randomness.

A silo's share of unseen labels is its number of private labels (at no other silo) divided by its
number of labels (FedEFM, section on unseen data). Of K labels, S are shared, each by at least two
of N silos; the others are private and spread as evenly as possible. Labels and rows are dealt out
in order.
"""

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, SettingError
from fedsilo.datasets.shifted.shifted import VALIDATION_SHARE

Rows = npt.NDArray[np.int64]
Labels = npt.NDArray[Any]

TOLERANCE = 0.05  # largest difference between a silo's share and the wanted share
_NEAR = TOLERANCE + 1e-9  # so that a difference of exactly 0.05 passes in floating point


@dataclass(frozen=True)
class _Plan:
    """A division of K labels among silos of two kinds.

    Silos of the first kind have one more private label than silos of the second kind.

    Attributes:
        shared: S, the number of shared labels.
        silos: number of silos of each kind.
        private: private labels of a silo of each kind.
        common: shared labels that a silo of each kind holds.
    """

    shared: int
    silos: tuple[int, int]
    private: tuple[int, int]
    common: tuple[int, int]

    def error(self, share: float) -> float:
        """Compute the largest difference, over silos, between a silo's share and the wanted share.

        A silo's share is the number of its private labels divided by the number of all its labels.
        ``share`` is the wanted share. The difference is absolute, and rounded to 9 digits, so that
        equally good plans compare as equal.
        """
        largest = 0.0
        for silos, private, common in zip(self.silos, self.private, self.common, strict=True):
            if silos:
                largest = max(largest, abs(private / (private + common) - share))
        return round(largest, 9)

    def slots(self) -> int:
        """Count the shared labels of all silos, where a label at three silos counts three times."""
        (more, fewer), (common_more, common_fewer) = self.silos, self.common
        return more * common_more + fewer * common_fewer


def label_sets(classes: int, silos: int, share: float) -> list[tuple[int, ...]]:
    """Choose the labels of each silo, so that about ``share`` of a silo's labels are private.

    A private label is at no other silo. The silo furthest from ``share`` decides which division is
    best. At share 0 all silos have all ``classes`` labels.

    Raises:
        SettingError: there are fewer than 2 silos, or every division misses ``share`` by over 0.05.
    """
    if silos < 2:
        raise SettingError(
            f"partition 'unseen' needs at least 2 silos, but there is {silos}: raise 'split.silos'"
        )
    plans = list(_list_plans(classes, silos, share))
    if not plans:
        raise SettingError(_describe_impossible(classes, silos, share))
    # Among equal errors: equally many private labels at all silos, then the fewest shared labels
    best = min(plans, key=lambda plan: (plan.error(share), min(plan.silos) > 0, plan.shared))
    return _deal_labels(best)


def _list_plans(classes: int, silos: int, share: float) -> Iterator[_Plan]:
    """Yield the divisions of labels among silos whose shares of private labels are near ``share``.

    A private label is at only one silo. A silo's private labels, divided by all its labels, may
    differ from ``share`` by at most 0.05.
    """
    for shared in range(classes + 1):
        fewer, more = divmod(classes - shared, silos)
        # No silo has one more private label if the private labels divide evenly
        first_kind = _near_counts(fewer + 1, shared, share) if more else [0]
        second_kind = _near_counts(fewer, shared, share)
        # Silos of one kind hold equally many shared labels. A shared label that only one silo held
        # would be a private one, so there must be two slots for each
        for common in product(first_kind, second_kind):
            plan = _Plan(shared, (more, silos - more), (fewer + 1, fewer), common)
            if plan.slots() >= 2 * shared:
                yield plan


def _near_counts(private: int, shared: int, share: float) -> list[int]:
    """List how many shared labels a silo may have so that its private share is near ``share``.

    The private share, private / (private + shared labels), may differ from it by 0.05. A silo
    without private labels must have all ``shared`` labels.
    """
    if not private:
        # A silo without a label of its own holds all shared ones, as at share 0
        return [shared] if shared and share <= _NEAR else []
    near = []
    for common in range(shared + 1):
        if abs(private / (private + common) - share) <= _NEAR:
            near.append(common)
    return near


def _describe_impossible(classes: int, silos: int, share: float) -> str:
    """Build the error text for an impossible 'split.unseen', with the nearest possible values.

    These values are the largest possible one up to ``share`` and, if there is one, the smallest
    above ``share``.
    """
    possible = sorted(set(_list_possible_shares(classes, silos)))
    above = bisect_right(possible, share)
    nearest = []
    # A possible share equals ``share`` only if it is taken, so these are its two neighbours
    for near in possible[max(above - 1, 0) : above + 1]:
        nearest.append(f"{float(near):.3g}")
    return (
        f"'split.unseen' is {share:g}, but {classes} labels cannot give {silos} silos this share: "
        f"set it to a possible one; the nearest are {' and '.join(nearest)}"
    )


def _list_possible_shares(classes: int, silos: int) -> Iterator[Fraction]:
    """Yield each share of private labels that all silos can have exactly.

    A private label is at only one silo, and a silo's share is its private labels divided by all its
    labels. Share 0 comes first. A share may be yielded several times.
    """
    yield Fraction(0)
    for shared in range(classes):
        fewer, more = divmod(classes - shared, silos)
        for held in range(shared + 1 if fewer else 0):
            extra = Fraction(0)
            if more:
                # So many more shared labels give a silo with one more private label the same share
                extra = Fraction(held, fewer)
            # No silo needs more shared labels than there are, and each of them is at two silos
            is_possible = extra.denominator == 1 and held + extra <= shared
            if is_possible and silos * held + more * extra >= 2 * shared:
                yield Fraction(fewer, fewer + held)


def _deal_labels(plan: _Plan) -> list[tuple[int, ...]]:
    """Assign labels to silos by a plan, which states how many labels of each kind a silo gets.

    Private labels have the lower numbers. Shared labels go round in a circle, and each silo begins
    where the silo before it ended.
    """
    sets = []
    # turn counts the shared labels dealt so far; shared labels go round like cards
    next_private = turn = 0
    # Labels are numbered: first the private ones, silo by silo, then the shared ones
    first_shared = sum(map(operator.mul, plan.silos, plan.private))
    for silos, private, common in zip(plan.silos, plan.private, plan.common, strict=True):
        for _ in range(silos):
            own = range(next_private, next_private + private)
            shared = [first_shared + (turn + i) % plan.shared for i in range(common)]
            sets.append((*own, *sorted(shared)))
            next_private += private
            turn += common
    return sets


def divide_evenly(need: int, limits: Sequence[int]) -> list[int]:
    """Divide ``need`` into whole parts that are as equal as the upper ``limits`` allow.

    A remainder goes to the larger limits, and among equal limits to the later ones. For example, 5
    over (9, 9) gives [2, 3]. If ``need`` is above the sum of the limits, the parts are the limits.
    """
    parts = [0] * len(limits)
    smallest_first = sorted(range(len(limits)), key=limits.__getitem__)
    # What a small limit cannot take is divided among the larger ones that follow
    for rank, place in enumerate(smallest_first):
        parts[place] = min(limits[place], need // (len(limits) - rank))
        need -= parts[place]
    return parts


@dataclass(frozen=True)
class LabelCut:
    """Cuts a pool into silos with given labels, taking rows in order.

    Attributes:
        labels: part -> label of each sample of the pool, (n,); val and test may be empty.
        sets: each silo's labels.
        names: the silos' names, for errors.
        classes: K, the number of labels.
        where: the pool's name in errors.
    """

    labels: Mapping[str, Labels]
    sets: Sequence[tuple[int, ...]]
    names: Sequence[str]
    classes: int
    where: str

    def rows(self, train_size: int, test_size: int) -> list[dict[str, Rows]]:
        """Choose every silo's training rows from its own labels, and its other rows from all.

        If the pool has no validation part, a tenth of the training rows become 'val'. Size 0 means
        the largest size that divides evenly among labels.

        Returns:
            For each silo: 'train', 'val' and 'test' -> rows.

        Raises:
            DataError: a label has too few samples.
        """
        validation, trained = self._check_sizes(
            train_size or self._find_largest_size(), train_size > 0
        )
        # The same label always gives its rows in ascending order, so nothing here is random
        rows = self._by_label("train")
        train = self._deal_own_labels(rows, trained)
        test = self._cut_part("test", test_size)
        if self._has("val"):
            val = self._cut_part("val", 0)
        else:
            # These come from the end of each label, because training takes rows from the start
            last = []
            for of_label, count in zip(rows, validation, strict=True):
                last.append(of_label[len(of_label) - len(self.sets) * count :])
            val = self._deal_all_labels(last, validation)
        silos = []
        for place in range(len(self.sets)):
            silos.append({"train": train[place], "val": val[place], "test": test[place]})
        return silos

    def _deal_own_labels(self, rows: Sequence[Rows], counts: Sequence[Sequence[int]]) -> list[Rows]:
        """Give each silo the first rows of its labels that no earlier silo has taken.

        ``rows`` has the rows of each label. ``counts`` has, for each silo, the number of rows of
        each of its labels. Whether enough rows are left is not checked.
        """
        # For each label, how many of its rows earlier silos have taken: no row is dealt twice
        taken = [0] * self.classes
        silos = []
        for labels, parts in zip(self.sets, counts, strict=True):
            pieces = []
            for label, count in zip(labels, parts, strict=True):
                pieces.append(rows[label][taken[label] : taken[label] + count])
                taken[label] += count
            silos.append(_join_rows(pieces))
        return silos

    def _deal_all_labels(self, rows: Sequence[Rows], counts: Sequence[int]) -> list[Rows]:
        """Give every silo the same number of rows of each label, ``counts[label]``.

        The first silo gets a label's first rows, the second silo the next ones, and so on. Whether
        there are enough rows is not checked.
        """
        silos = []
        for place in range(len(self.sets)):
            pieces = []
            for of_label, count in zip(rows, counts, strict=True):
                pieces.append(of_label[place * count : (place + 1) * count])
            silos.append(_join_rows(pieces))
        return silos

    def _has(self, part: str) -> bool:
        return len(self.labels[part]) > 0

    def _by_label(self, part: str) -> list[Rows]:
        return [np.flatnonzero(self.labels[part] == label) for label in range(self.classes)]

    def _counts(self, part: str) -> list[int]:
        counts: list[int] = np.bincount(self.labels[part], minlength=self.classes).tolist()
        return counts

    def _compute_sizes(self, size: int) -> tuple[list[int], list[list[int]]]:
        """Compute how many samples of each label a silo gets for validation and for training.

        Without a validation part in the pool, a tenth of ``size`` is for validation. Other labels
        replace a rare label's missing samples. The sums may still be too small.
        """
        silos = len(self.sets)
        held_out = size - self._training_size(size)
        left = self._counts("train")
        # All silos validate alike and on all labels, so each label loses ``silos`` times this
        validation = divide_evenly(held_out, [count // (2 * silos) for count in left])
        for label, count in enumerate(validation):
            left[label] -= silos * count
        # The least common multiple makes all demands whole numbers, so nothing is rounded here
        common = math.lcm(*map(len, self.sets))
        demand = [0] * self.classes
        for labels in self.sets:
            for label in labels:
                demand[label] += common // len(labels)
        # A label that many silos hold has less for each of them. What a silo cannot take of a rare
        # label, it takes of its other labels
        trained = []
        for labels in self.sets:
            need = common // len(labels)
            limits = [left[label] * need // demand[label] for label in labels]
            trained.append(divide_evenly(size - held_out, limits))
        return validation, trained

    def _find_largest_size(self) -> int:
        """Find the largest size at which every silo gets all its samples, evenly from its labels.

        The size includes samples held out for validation. The result is 0 if even silos of one
        sample are impossible.
        """
        sizes = range(1, len(self.labels["train"]) // len(self.sets) + 2)
        # Sizes run short from some size on, so the first such size can be bisected
        return bisect_left(sizes, True, key=self._runs_short)

    def _runs_short(self, size: int) -> bool:
        """Tell whether the labels have too few samples for silos of ``size`` samples each.

        This holds if a silo gets fewer samples than it needs. It also holds if the numbers of its
        samples of two labels differ by more than one.
        """
        validation, trained = self._compute_sizes(size)
        for parts in (validation, *trained):
            if max(parts) - min(parts) > 1:
                return True
        return not self._fits(size, validation, trained)

    def _training_size(self, size: int) -> int:
        """Return the number of training samples in a silo of ``size`` samples.

        If the pool (all samples of the data set) has a validation part, all ``size`` samples are
        for training. Otherwise a tenth of them, rounded down, is for validation.
        """
        if self._has("val"):
            return size
        return size - size // VALIDATION_SHARE

    def _fits(self, size: int, validation: list[int], trained: list[list[int]]) -> bool:
        training = self._training_size(size)
        if sum(validation) != size - training:
            return False
        return all(sum(parts) == training for parts in trained)

    def _check_sizes(self, size: int, given: bool) -> tuple[list[int], list[list[int]]]:
        """Compute each silo's samples per label, and check that each silo gets some of each.

        The result has numbers for validation, then for training. ``size`` includes both. A
        ``DataError`` may advise a larger size only if the user has ``given`` it.
        """
        if not self._has("val") and size < VALIDATION_SHARE:
            least = VALIDATION_SHARE if given else 0
            raise DataError(
                f"{self.where}: a silo of {size} training images has no validation part, because "
                f"a tenth of it is less than one image: {_size_advice(least)}"
            )
        validation, trained = self._compute_sizes(size)
        for name, labels, parts in zip(self.names, self.sets, trained, strict=True):
            if min(parts) == 0:
                self._refuse_lost_label(name, labels, parts, size, given)
        if not self._fits(size, validation, trained):
            fewest = sum(validation) + min(map(sum, trained))
            raise DataError(
                f"{self.where}: {len(self.sets)} silos of {size} training images need more than "
                f"their labels have, because some silo would get only {fewest} (the pool's labels "
                f"have {self._counts('train')}): lower 'split.silo-train-size' or 'split.silos'"
            )
        return validation, trained

    def _refuse_lost_label(
        self, name: str, labels: Sequence[int], parts: Sequence[int], size: int, given: bool
    ) -> None:
        """Raise the ``DataError`` for a silo that gets no training sample of one of its labels.

        ``parts`` counts the silo's samples of each label. If the user has ``given`` a size with
        fewer training samples than labels, the error advises a larger one.
        """
        lost = labels[parts.index(0)]
        # The smallest size that trains on at least one image of each of the silo's labels
        least = size
        while self._training_size(least) < len(labels):
            least += 1
        # A larger silo helps only if this one has fewer images than labels
        advice = _size_advice(least if given and least > size else 0)
        raise DataError(
            f"{self.where}: no training image is left of label {lost} for {name}; the pool has "
            f"{self._counts('train')[lost]}: {advice}"
        )

    def _cut_part(self, part: str, size: int) -> list[Rows]:
        """Choose every silo's rows of part 'val' or 'test', as evenly over all labels as possible.

        Size 0 gives equally many samples of each label, or none if the pool lacks the part. A size
        that the labels do not allow raises ``DataError``.
        """
        silos, have = len(self.sets), self._counts(part)
        if not sum(have) and not size:
            return [np.empty(0, np.int64)] * silos
        limits = [count // silos for count in have]
        if min(limits) == 0 or 0 < size < self.classes or size > sum(limits):
            raise DataError(
                f"{self.where}: {silos} silos of {size or self.classes} {part} images over all "
                f"{self.classes} labels cannot be cut, because the pool's labels have {have}: "
                "change 'split.silos', 'split.silo-test-size' or the data set's own split"
            )
        parts = divide_evenly(size or self.classes * min(limits), limits)
        return self._deal_all_labels(self._by_label(part), parts)


def _join_rows(rows: Sequence[Rows]) -> Rows:
    return np.sort(np.concatenate(rows))


def _size_advice(least: int) -> str:
    """Advise a training size of at least ``least``, or other settings if ``least`` is 0."""
    if least:
        return f"raise 'split.silo-train-size' to at least {least}"
    return "lower 'split.silos', or choose another 'split.partition'"
