"""Labels and samples of each silo under the partition ``unseen``.

A silo's share of unseen labels is |labels that it alone holds| / |labels that it holds| (FedEFM,
section on unseen data). S of K labels are shared, each by at least two of N silos; the others
are private and spread as evenly as possible. Nothing is random: labels and rows are dealt in order.
"""

import math
from bisect import bisect_left
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
        kinds = zip(self.silos, self.private, self.common, strict=True)
        shares = [own / (own + held) for silos, own, held in kinds if silos]
        return round(max(abs(one - share) for one in shares), 9)


def label_sets(classes: int, silos: int, share: float) -> list[tuple[int, ...]]:
    """Choose each silo's labels, so that ``share`` of them are at no other silo.

    Of all possible divisions the one with the smallest error at the worst silo is taken; then the
    one with the most even private labels; then the one with the fewest shared labels. At share 0
    all silos have all labels.

    Raises:
        SettingError: there is one silo, or the share of some silo would be off by more than 0.05.
    """
    if silos < 2:
        raise SettingError(f"partition 'unseen' cuts at least 2 silos, and there is {silos}")
    plans = list(_plans(classes, silos, share))
    if not plans:
        raise SettingError(_impossible(classes, silos, share))
    best = min(plans, key=lambda plan: (plan.error(share), min(plan.silos) > 0, plan.shared))
    return _deal_labels(best)


def _plans(classes: int, silos: int, share: float) -> Iterator[_Plan]:
    """Yield plans near ``share`` in which no silo is empty and two silos have each shared label."""
    for shared in range(classes + 1):
        fewer, more = divmod(classes - shared, silos)
        private, counts = (fewer + 1, fewer), (more, silos - more)
        # A silo without a label of its own holds all that are shared, as at 0
        choices = [range(shared + 1) if own else (shared,) for own in private]
        near = [
            [held for held in some if own + held and abs(own / (own + held) - share) <= _NEAR]
            for own, some in zip(private, choices, strict=True)
        ]
        for held in product(near[0] if more else (0,), near[1]):
            if sum(n * h for n, h in zip(counts, held, strict=True)) >= 2 * shared:
                yield _Plan(shared, counts, private, held)


def _impossible(classes: int, silos: int, share: float) -> str:
    """Say which shares near ``share`` all silos can have."""
    possible = set(_common_shares(classes, silos))
    below = max((one for one in possible if one < share), default=None)
    above = min((one for one in possible if one > share), default=None)
    nearest = " and ".join(f"{float(near):.3g}" for near in (below, above) if near is not None)
    return (
        f"setting 'split.unseen' is {share:g}, which is impossible with so few labels: the data "
        f"set has {classes}, and there are {silos} silos; the nearest shares that are possible: "
        f"{nearest}"
    )


def _common_shares(classes: int, silos: int) -> Iterator[Fraction]:
    """Yield the shares that all silos can have at the same time, exactly."""
    yield Fraction(0)
    for shared in range(classes):
        fewer, more = divmod(classes - shared, silos)
        for held in range(shared + 1 if fewer else 0):
            # A silo with one more private label has the same share if it has this many more shared
            # labels
            extra = Fraction(held, fewer) if more else Fraction(0)
            fits = extra.denominator == 1 and held + extra <= shared
            if fits and silos * held + more * extra >= 2 * shared:
                yield Fraction(fewer, fewer + held)


def _deal_labels(plan: _Plan) -> list[tuple[int, ...]]:
    """Deal out private labels in order, then shared ones in turn."""
    kinds = zip(plan.silos, plan.private, plan.common, strict=True)
    each = [(own, held) for silos, own, held in kinds for _ in range(silos)]
    first_shared = sum(own for own, _ in each)
    sets, next_own, turn = [], 0, 0
    for own, held in each:
        shared = [first_shared + (turn + i) % plan.shared for i in range(held)]
        sets.append((*range(next_own, next_own + own), *sorted(shared)))
        next_own, turn = next_own + own, turn + held
    return sets


def level(need: int, limits: Sequence[int]) -> list[int]:
    """Divide ``need`` as evenly as ``limits`` allow; low limits make the sum smaller."""
    # The smallest limit goes first: what it cannot take is divided among the others
    parts = [0] * len(limits)
    for rank, place in enumerate(sorted(range(len(limits)), key=limits.__getitem__)):
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
        classes: K, labels in all.
        where: names the pool in errors.
    """

    labels: Mapping[str, Labels]
    sets: Sequence[tuple[int, ...]]
    names: Sequence[str]
    classes: int
    where: str

    def rows(self, train_size: int, test_size: int) -> list[dict[str, Rows]]:
        """Return each silo's rows of the pool's parts, ascending: train, val and test.

        Rows of part 'val' are the pool's validation samples where it has some, else training ones.

        Args:
            train_size: training samples of a silo, their last tenth for validation if the pool has
                no validation part, or 0 for as many as each label can give an equal part of.
            test_size: test samples of a silo; 0 likewise.

        Raises:
            DataError: the pool has too few samples of some label.
        """
        validation, trained = self._check_sizes(train_size or self._most(), train_size > 0)
        rows = self._by_label("train")
        # Validation rows come from the end of each label, because training takes rows from the
        # start
        last = [r[len(r) - len(self.sets) * v :] for r, v in zip(rows, validation, strict=True)]
        parts = {
            "train": self._in_turn(rows, trained),
            "val": self._own_part("val", 0)
            if self._has("val")
            else self._slice_rows(last, validation),
            "test": self._own_part("test", test_size),
        }
        return [{part: own[i] for part, own in parts.items()} for i in range(len(self.sets))]

    def _in_turn(self, rows: Sequence[Rows], counts: Sequence[Sequence[int]]) -> list[Rows]:
        """Deal rows of each silo's own labels in order, ``counts[silo][label]`` of each."""
        taken = [0] * self.classes
        dealt = []
        for held, parts in zip(self.sets, counts, strict=True):
            own = []
            for label, count in zip(held, parts, strict=True):
                own.append(rows[label][taken[label] : taken[label] + count])
                taken[label] += count
            dealt.append(_join_rows(own))
        return dealt

    def _slice_rows(self, rows: Sequence[Rows], counts: Sequence[int]) -> list[Rows]:
        """Deal each silo the next rows of all labels; ``counts`` has the number per label."""
        each = list(zip(rows, counts, strict=True))
        places = range(len(self.sets))
        return [_join_rows([own[i * n : (i + 1) * n] for own, n in each]) for i in places]

    def _has(self, part: str) -> bool:
        return len(self.labels[part]) > 0

    def _by_label(self, part: str) -> list[Rows]:
        return [np.flatnonzero(self.labels[part] == label) for label in range(self.classes)]

    def _counts(self, part: str) -> list[int]:
        counts: list[int] = np.bincount(self.labels[part], minlength=self.classes).tolist()
        return counts

    def _sizes(self, size: int) -> tuple[list[int], list[list[int]]]:
        """Return validation samples by label, and each silo's training samples by its own labels.

        Validation takes at most half of a label. The rest is parted in the ratio that silos of one
        size, each balanced over its labels, need.
        """
        silos, have = len(self.sets), self._counts("train")
        share = 0 if self._has("val") else size // VALIDATION_SHARE
        validation = level(share, [count // (2 * silos) for count in have])
        left = [count - silos * v for count, v in zip(have, validation, strict=True)]
        # The least common multiple makes all demands whole numbers, so that nothing is rounded here
        common = math.lcm(*(len(held) for held in self.sets))
        demand = [0] * self.classes
        for held in self.sets:
            for label in held:
                demand[label] += common // len(held)
        limits = [
            [left[label] * (common // len(held)) // demand[label] for label in held]
            for held in self.sets
        ]
        return validation, [level(size - share, own) for own in limits]

    def _most(self) -> int:
        """Return the largest size of a silo at which no label runs short."""
        # bisect_left needs sizes that are possible up to some point and impossible beyond

        def short(size: int) -> bool:
            validation, trained = self._sizes(size)
            uneven = any(max(parts) - min(parts) > 1 for parts in (validation, *trained))
            return uneven or not self._fits(size, validation, trained)

        sizes = range(1, len(self.labels["train"]) // len(self.sets) + 2)
        return bisect_left(sizes, True, key=short)

    def _training_size(self, size: int) -> int:
        """Return the number of training samples among ``size``; the others validate."""
        return size if self._has("val") else size - size // VALIDATION_SHARE

    def _fits(self, size: int, validation: list[int], trained: list[list[int]]) -> bool:
        complete = self._has("val") or sum(validation) == size // VALIDATION_SHARE
        return complete and all(sum(parts) == self._training_size(size) for parts in trained)

    def _check_sizes(self, size: int, given: bool) -> tuple[list[int], list[list[int]]]:
        """Compute ``_sizes``, and check that each silo gets all of its labels.

        If the size is not ``given``, it is the largest, so that errors do not advise to raise it.

        Raises:
            DataError: the pool has too few samples of some label.
        """
        fewer = "lower 'split.silos', or choose another 'split.partition'"
        if not self._has("val") and size < VALIDATION_SHARE:
            raise DataError(
                f"{self.where}: a silo of {size} training images has no validation part, a tenth: "
                + (
                    f"raise 'split.silo-train-size' to at least {VALIDATION_SHARE}"
                    if given
                    else fewer
                )
            )
        validation, trained = self._sizes(size)
        for name, held, parts in zip(self.names, self.sets, trained, strict=True):
            if not min(parts):
                none, least = held[parts.index(0)], size
                while self._training_size(least) < len(held):
                    least += 1
                raise DataError(
                    f"{self.where}: no training image is left of label {none} for {name}, of "
                    f"{self._counts('train')[none]}: "
                    + (
                        f"raise 'split.silo-train-size' to at least {least}"
                        if given and least > size
                        else fewer
                    )
                )
        if not self._fits(size, validation, trained):
            fewest = min(sum(validation) + sum(parts) for parts in trained)
            raise DataError(
                f"{self.where}: {len(self.sets)} silos of {size} training images are more than "
                f"their labels have: some silo gets {fewest} (the pool's labels have "
                f"{self._counts('train')}); lower 'split.silo-train-size' or 'split.silos'"
            )
        return validation, trained

    def _own_part(self, part: str, size: int) -> list[Rows]:
        """Cut each silo's val or test samples over all labels; empty if the pool has none."""
        silos, have = len(self.sets), self._counts(part)
        if not sum(have) and not size:
            return [np.empty(0, np.int64)] * silos
        limits = [count // silos for count in have]
        if not min(limits) or 0 < size < self.classes or size > sum(limits):
            raise DataError(
                f"{self.where}: {silos} silos of {size or self.classes} {part} images, which are "
                f"of all {self.classes} labels, cannot be: the pool's labels have {have}; change "
                "'split.silos', 'split.silo-test-size' or the data set's own split"
            )
        parts = level(size or self.classes * min(limits), limits)
        return self._slice_rows(self._by_label(part), parts)


def _join_rows(rows: Sequence[Rows]) -> Rows:
    return np.sort(np.concatenate(rows))
