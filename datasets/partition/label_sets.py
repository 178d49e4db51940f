"""Labels and samples of each silo under the partition ``unseen``.

A silo's share of unseen labels is |labels that it alone holds| / |labels that it holds| (FedEFM,
section on unseen data). S of K labels are shared, each by at least two of N silos; the others
are private and spread as evenly as possible. Nothing is random: labels and rows are dealt in order.
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
    """A division of labels among two kinds of silos: with one more private label, and without.

    Attributes:
        shared: S, the number of shared labels.
        silos: number of silos of each kind.
        private: private labels of a silo of each kind.
        common: shared labels of a silo of each kind.
    """

    shared: int
    silos: tuple[int, int]
    private: tuple[int, int]
    common: tuple[int, int]

    def error(self, share: float) -> float:
        """Return the largest difference between a silo's share of private labels and ``share``."""
        largest = 0.0
        for silos, private, common in zip(self.silos, self.private, self.common, strict=True):
            if silos:
                largest = max(largest, abs(private / (private + common) - share))
        # Rounded, so that plans with equal errors compare as equal
        return round(largest, 9)

    def slots(self) -> int:
        """Count the shared labels that all silos hold, each once per silo."""
        (more, fewer), (common_more, common_fewer) = self.silos, self.common
        return more * common_more + fewer * common_fewer


def label_sets(classes: int, silos: int, share: float) -> list[tuple[int, ...]]:
    """Choose each silo's labels, so that ``share`` of them are at no other silo.

    Of all possible divisions, the one with the smallest error at the worst silo is taken. Among
    equals, one in which all silos have the same number of private labels goes first, then the one
    with the fewest shared labels. At share 0 all silos have all labels.

    Raises:
        SettingError: there is one silo, or the share of some silo would be off by more than 0.05.
    """
    if silos < 2:
        raise SettingError(
            f"partition 'unseen' needs at least 2 silos, but there is {silos}: raise 'split.silos'"
        )
    plans = list(_plans(classes, silos, share))
    if not plans:
        raise SettingError(_impossible(classes, silos, share))
    best = min(plans, key=lambda plan: (plan.error(share), min(plan.silos) > 0, plan.shared))
    return _deal_labels(best)


def _plans(classes: int, silos: int, share: float) -> Iterator[_Plan]:
    """Yield plans near ``share`` in which no silo is empty and two silos have each shared label."""
    for shared in range(classes + 1):
        fewer, more = divmod(classes - shared, silos)
        # No silo has one more private label if the private labels divide evenly
        first_kind = _near_counts(fewer + 1, shared, share) if more else [0]
        second_kind = _near_counts(fewer, shared, share)
        # Silos of one kind hold equally many shared labels. A shared label that only one silo held
        # would be a private one, so that there must be two slots for each
        for common in product(first_kind, second_kind):
            plan = _Plan(shared, (more, silos - more), (fewer + 1, fewer), common)
            if plan.slots() >= 2 * shared:
                yield plan


def _near_counts(private: int, shared: int, share: float) -> list[int]:
    """List how many shared labels a silo may hold so that its share is within the tolerance."""
    if not private:
        # A silo without a label of its own holds all shared ones, as at share 0
        return [shared] if shared and share <= _NEAR else []
    near = []
    for common in range(shared + 1):
        if abs(private / (private + common) - share) <= _NEAR:
            near.append(common)
    return near


def _impossible(classes: int, silos: int, share: float) -> str:
    """Say which shares near ``share`` all silos can have."""
    possible = sorted(set(_common_shares(classes, silos)))
    above = bisect_right(possible, share)
    nearest = []
    # A possible share equals ``share`` only if it is taken, so these are its two neighbours
    for near in possible[max(above - 1, 0) : above + 1]:
        nearest.append(f"{float(near):.3g}")
    return (
        f"'split.unseen' is {share:g}, but {classes} labels cannot give {silos} silos this share: "
        f"set it to a possible one; the nearest are {' and '.join(nearest)}"
    )


def _common_shares(classes: int, silos: int) -> Iterator[Fraction]:
    """Yield the shares that all silos can have at the same time, exactly."""
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
    """Deal out private labels in order, then shared labels in turn."""
    sets = []
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


def level(need: int, limits: Sequence[int]) -> list[int]:
    """Divide ``need`` as evenly as ``limits`` allow.

    Returns:
        A part per limit, none above its limit. Their sum is ``need``, or less if the limits do not
        add up to it.
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
    """Cuts a pool into silos with given labels.

    Attributes:
        labels: part -> (n,) label of each sample of the pool; val and test may be empty.
        sets: each silo's labels.
        names: the silos, for errors.
        classes: K, the number of labels.
        where: what errors call the pool.
    """

    labels: Mapping[str, Labels]
    sets: Sequence[tuple[int, ...]]
    names: Sequence[str]
    classes: int
    where: str

    def rows(self, train_size: int, test_size: int) -> list[dict[str, Rows]]:
        """Return each silo's rows of the pool's parts, ascending: train, val and test.

        Rows of part 'val' are rows of the pool's validation part, or of its training part if the
        pool has no validation part.

        Args:
            train_size: number of training samples of a silo; 0 takes as many as possible with an
                equal number per label. If the pool has no validation part, a tenth of them
                validates.
            test_size: number of test samples of a silo; 0 takes as many as possible.

        Raises:
            DataError: the pool has too few samples of some label.
        """
        validation, trained = self._check_sizes(train_size or self._most(), train_size > 0)
        rows = self._by_label("train")
        train = self._in_turn(rows, trained)
        test = self._own_part("test", test_size)
        if self._has("val"):
            val = self._own_part("val", 0)
        else:
            # These come from the end of each label, because training takes rows from the start
            last = []
            for of_label, count in zip(rows, validation, strict=True):
                last.append(of_label[len(of_label) - len(self.sets) * count :])
            val = self._slice_rows(last, validation)
        silos = []
        for place in range(len(self.sets)):
            silos.append({"train": train[place], "val": val[place], "test": test[place]})
        return silos

    def _in_turn(self, rows: Sequence[Rows], counts: Sequence[Sequence[int]]) -> list[Rows]:
        """Deal rows of each silo's own labels in order, ``counts[silo][label]`` of each."""
        taken = [0] * self.classes
        silos = []
        for labels, parts in zip(self.sets, counts, strict=True):
            pieces = []
            for label, count in zip(labels, parts, strict=True):
                pieces.append(rows[label][taken[label] : taken[label] + count])
                taken[label] += count
            silos.append(_join_rows(pieces))
        return silos

    def _slice_rows(self, rows: Sequence[Rows], counts: Sequence[int]) -> list[Rows]:
        """Deal each silo the next rows of all labels; ``counts`` has the number per label."""
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

    def _sizes(self, size: int) -> tuple[list[int], list[list[int]]]:
        """Return validation samples by label, and each silo's training samples by its own labels.

        Validation takes at most half of a label. The rest of a label is divided in proportion to
        what its silos need, if all silos are of one ``size`` and each is balanced over its labels.
        """
        silos = len(self.sets)
        held_out = size - self._training_size(size)
        left = self._counts("train")
        validation = level(held_out, [count // (2 * silos) for count in left])
        for label, count in enumerate(validation):
            left[label] -= silos * count
        # The least common multiple makes all demands whole numbers, so that nothing is rounded here
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
            trained.append(level(size - held_out, limits))
        return validation, trained

    def _most(self) -> int:
        """Return the largest number of samples per silo at which no label runs short."""
        sizes = range(1, len(self.labels["train"]) // len(self.sets) + 2)
        # Sizes run short from some size on, so that the first such size can be bisected
        return bisect_left(sizes, True, key=self._runs_short)

    def _runs_short(self, size: int) -> bool:
        """Tell whether silos of this size are not balanced over their labels, or are too small."""
        validation, trained = self._sizes(size)
        for parts in (validation, *trained):
            if max(parts) - min(parts) > 1:
                return True
        return not self._fits(size, validation, trained)

    def _training_size(self, size: int) -> int:
        """Return the number of training samples among ``size``; the others validate."""
        if self._has("val"):
            return size
        return size - size // VALIDATION_SHARE

    def _fits(self, size: int, validation: list[int], trained: list[list[int]]) -> bool:
        training = self._training_size(size)
        if sum(validation) != size - training:
            return False
        return all(sum(parts) == training for parts in trained)

    def _check_sizes(self, size: int, given: bool) -> tuple[list[int], list[list[int]]]:
        """Compute ``_sizes``, and check that each silo gets all of its labels.

        If the size is not ``given``, it is the largest, so that errors do not advise to raise it.

        Raises:
            DataError: the pool has too few samples of some label.
        """
        if not self._has("val") and size < VALIDATION_SHARE:
            least = VALIDATION_SHARE if given else 0
            raise DataError(
                f"{self.where}: a silo of {size} training images has no validation part, because "
                f"a tenth of it is no image: {_size_advice(least)}"
            )
        validation, trained = self._sizes(size)
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
        """Raise the error for a silo that gets no training image of one of its labels."""
        lost = labels[parts.index(0)]
        least = size
        while self._training_size(least) < len(labels):
            least += 1
        # A larger silo helps only if this one has fewer images than labels
        advice = _size_advice(least if given and least > size else 0)
        raise DataError(
            f"{self.where}: no training image is left of label {lost} for {name}; the pool has "
            f"{self._counts('train')[lost]}: {advice}"
        )

    def _own_part(self, part: str, size: int) -> list[Rows]:
        """Cut each silo's val or test samples over all labels; empty if the pool has none."""
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
        parts = level(size or self.classes * min(limits), limits)
        return self._slice_rows(self._by_label(part), parts)


def _join_rows(rows: Sequence[Rows]) -> Rows:
    return np.sort(np.concatenate(rows))


def _size_advice(least: int) -> str:
    """Advise a training size of at least ``least``; 0 if a larger size would not help."""
    if least:
        return f"raise 'split.silo-train-size' to at least {least}"
    return "lower 'split.silos', or choose another 'split.partition'"
