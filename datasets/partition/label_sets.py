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
    """Choose the labels of each silo so that about ``share`` of a silo's labels are private.

    A private label is at no other silo. The division with the smallest error is chosen, where the
    silo furthest from ``share`` decides. Among equal divisions, one with equally many private
    labels at all silos is preferred, then the fewest shared labels. At share 0 all silos have all
    labels.

    Args:
        classes: K. Labels are 0 to K - 1.
        silos: the number of silos, at least 2.
        share: the wanted share of private labels, 0..1.

    Returns:
        A tuple of labels per silo, ascending.

    Raises:
        SettingError: there are fewer than 2 silos, or every division has a silo whose share differs
            from ``share`` by more than 0.05.
    """
    if silos < 2:
        raise SettingError(
            f"partition 'unseen' needs at least 2 silos, but there is {silos}: raise 'split.silos'"
        )
    plans = list(_list_plans(classes, silos, share))
    if not plans:
        raise SettingError(_describe_impossible(classes, silos, share))
    best = min(plans, key=lambda plan: (plan.error(share), min(plan.silos) > 0, plan.shared))
    return _deal_labels(best)


def _list_plans(classes: int, silos: int, share: float) -> Iterator[_Plan]:
    """Yield the divisions of labels among silos whose shares of private labels are near ``share``.

    A private label is at only one silo, and a shared label at two or more. A silo's share is its
    private labels divided by all its labels. It may differ from ``share`` by at most 0.05. Private
    labels are divided as evenly as possible. A silo without private labels gets all shared labels.
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

    The private share is a silo's number of private labels divided by the number of all its labels.
    It may differ from ``share`` by at most 0.05.

    Args:
        private: the silo's number of private labels.
        shared: the number of all shared labels, the most that a silo can have.
        share: the wanted private share.

    Returns:
        The possible numbers, ascending. A silo without private labels must have all shared labels.
        The list is then [shared], or empty if ``shared`` is 0 or ``share`` is above 0.05.
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

    A silo's share is its private labels divided by all its labels. Share 0 comes first, and a share
    may be yielded several times. Each number of shared labels is tried. The private labels are
    divided as evenly as possible, so a silo has p or p + 1 of them.

    For each number h of shared labels at a silo with p of them, the share p / (p + h) is yielded if
    p is at least 1 and these conditions hold:

    - A silo with p + 1 private labels, if there is one, gets the same share with h (p + 1) / p
      shared labels, which is a whole number.
    - No silo needs more shared labels than there are.
    - The silos have enough places for each shared label to be at two of them.
    """
    yield Fraction(0)
    for shared in range(classes):
        fewer, more = divmod(classes - shared, silos)
        for held in range(shared + 1 if fewer else 0):
            extra = Fraction(0)
            if more:
                # So many more shared labels give a silo with one more private label the same share
                extra = Fraction(held, fewer)
            is_possible = extra.denominator == 1 and held + extra <= shared
            if is_possible and silos * held + more * extra >= 2 * shared:
                yield Fraction(fewer, fewer + held)


def _deal_labels(plan: _Plan) -> list[tuple[int, ...]]:
    """Assign labels to silos by a plan, which states how many labels of each kind a silo gets.

    Private labels have the lower numbers, and are assigned in order. Shared labels go round in a
    circle, and each silo begins where the silo before it ended.

    Returns:
        A tuple of labels per silo, ascending.
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
    over (9, 9) gives [2, 3].

    Returns:
        One integer for each limit, at most that limit. The integers add up to ``need``, or to the
        sum of all limits if ``need`` is larger.
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

        If the pool has a validation part, 'val' rows are taken from it, equally many per label.
        Otherwise they are taken from the pool's training part, from the end of each label's rows.

        Args:
            train_size: training samples per silo. 0 means the largest size at which the counts of a
                silo's labels differ by at most one. If the pool has no validation part, a tenth of
                these samples becomes the 'val' rows.
            test_size: test samples per silo. 0 means as many as possible with equally many per
                label.

        Returns:
            A dictionary per silo: 'train', 'val' and 'test' -> rows of the pool, ascending.

        Raises:
            DataError: the pool has too few samples of some label, or a size is too small.
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

        No row is given twice. Whether enough rows are left is not checked here.

        Args:
            rows: for each label, its rows in the pool.
            counts: for each silo, the number of rows of each of the silo's labels. The labels are
                in the order of the attribute ``sets``, which lists the labels of each silo.

        Returns:
            Rows per silo, ascending.
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
        """Give every silo the same number of rows of each label.

        The first silo gets a label's first ``counts[label]`` rows, the second silo the next ones,
        and so on. Rows that remain are not used.

        Args:
            rows: for each label, its rows in the pool. There must be enough rows for all silos,
                which is not checked here.
            counts: for each label, the number of rows per silo.

        Returns:
            The rows of each silo, ascending.
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

        A silo has ``size`` samples. If the pool has no validation part, a tenth of them, rounded
        down, is for validation, divided evenly among all K labels. At most half of a label's
        samples are for validation.

        The rest of a label is divided among the silos that have the label. A silo with fewer labels
        may take more of each. What a rare label lacks, a silo takes of its other labels. If they
        lack samples too, the numbers add up to less than ``size``.

        Returns:
            A silo's validation samples for each of the K labels, and for each silo the training
            samples of each of its own labels.
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

        ``_runs_short`` decides this for a single size. The size includes samples held out for
        validation. The binary search assumes that all sizes below a possible size are possible. The
        result is 0 if even silos of one sample are impossible.
        """
        sizes = range(1, len(self.labels["train"]) // len(self.sets) + 2)
        # Sizes run short from some size on, so the first such size can be bisected
        return bisect_left(sizes, True, key=self._runs_short)

    def _runs_short(self, size: int) -> bool:
        """Tell whether the labels have too few samples for silos of ``size`` samples each.

        They have too few in two cases:

        - At some silo, the numbers of training samples (or of validation samples) of two labels
          differ by more than one.
        - A silo gets fewer training samples than ``_training_size``, or fewer validation samples
          than the rest of ``size``.
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

        Args:
            size: training samples per silo, including those held out for validation.
            given: whether the user set ``size``. Only then may an error advise a larger size.

        Returns:
            Validation samples per silo for each of the K labels, and for each silo the training
            samples of each of its own labels.

        Raises:
            DataError: the pool has too few samples of some label. The error is also raised if a
                pool without a validation part leaves less than one validation sample, a tenth of
                ``size``, per silo.
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

        The message advises a larger size if the user set a size with fewer training samples than
        the silo has labels.

        Args:
            name: the name of the silo.
            labels: the silo's labels.
            parts: the number of training samples with each of these labels, at least one of them 0.
            size: the number of training samples per silo.
            given: whether the user set the size.

        Raises:
            DataError: always.
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

        All silos get the same number of samples of a label. Samples that remain are not used.

        Args:
            part: 'val' or 'test'.
            size: samples per silo. 0 means that every label gives a silo equally many samples, as
                many as the rarest label has per silo.

        Returns:
            Rows per silo, ascending. They are empty if ``size`` is 0 and the pool does not have the
            part.

        Raises:
            DataError: a label has fewer samples than silos, or ``size`` is below the number of
                labels or above the number that the labels allow.
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
