"""Find columns of a site's table whose values differ so much that the unit may be different.

A change of unit multiplies the mean and the standard deviation by the same factor: 5.2 mmol/l of
cholesterol are 201 mg/dl. A column differs ("is unlike") between two sites by one of two rules:

- The means differ by a factor of five or more. Also, either the means are further apart than one
  standard deviation of each site, or the standard deviations differ by about the same factor.
  Without the second part every column with a mean near 0 would be reported.
- The means differ by less, but are further apart than three standard deviations of each site, and a
  known change of unit converts one mean and one standard deviation to the other.

Columns of 0 and 1 and the features of categories are not compared, because they have no unit.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedsilo.core.one_line import one_line
from fedsilo.core.site_facts import FeatureStatistics, Sums

_FACTOR = 5.0  # means that differ by this factor may be unlike
_FAR = 3.0  # standard deviations between means that only a change of unit explains
_SAME_FACTOR = 2.0  # factors of mean and standard deviation agree up to this factor
_SAME_MEAN = 1.2  # a conversion fits if it hits the other mean up to this factor


@dataclass(frozen=True)
class Conversion:
    """A change of unit: ``larger = factor * smaller + offset``, with a factor above 1.

    ``words`` names both units.
    """

    factor: float
    words: str
    offset: float = 0.0


CONVERSIONS = (
    Conversion(1.611, "haemoglobin in g/dl against mmol/l"),
    Conversion(1.8, "a temperature in Fahrenheit against Celsius", 32.0),
    Conversion(2.205, "a weight in pounds against kg"),
    Conversion(2.54, "a length in cm against inches"),
    Conversion(2.801, "urea nitrogen in mg/dl against urea in mmol/l"),
    Conversion(4.008, "calcium in mg/dl against mmol/l"),
    Conversion(7.501, "a pressure in mmHg against kPa"),
    Conversion(10.0, "a unit against its tenth"),
    Conversion(10.93, "HbA1c in mmol/mol against %", -23.5),
    Conversion(17.1, "bilirubin in µmol/l against mg/dl"),
    Conversion(18.02, "glucose in mg/dl against mmol/l"),
    Conversion(38.67, "cholesterol in mg/dl against mmol/l"),
    Conversion(59.48, "uric acid in µmol/l against mg/dl"),
    Conversion(88.42, "creatinine in µmol/l against mg/dl, or triglycerides in mg/dl"),
    Conversion(100.0, "a unit against its hundredth, such as m against cm"),
    Conversion(1000.0, "a unit against its thousandth, such as g against mg"),
)


@dataclass(frozen=True)
class Spread:
    """The mean and standard deviation of one column, at one site or over several."""

    mean: float
    std: float


@dataclass(frozen=True)
class UnlikeColumn:
    """A column whose values at one site are unlike those at other sites.

    Attributes:
        column: the column's name.
        site: the site's name; empty if a site compares itself.
        mean: the mean over the site's training rows.
        others: the mean that the site's mean is compared with.
        unit: the change of unit that explains the difference; empty if no known change does.
    """

    column: str
    site: str
    mean: float
    others: float
    unit: str = ""

    def sentence(self, others: str, title: str = "") -> str:
        """Describe the difference in one line that ends by asking whether the unit differs.

        An example for 'b' is "column 'chol': mean 5.2 at site b, 201 at the other sites: is it in
        another unit (cholesterol in mg/dl against mmol/l)?". Means are rounded to three significant
        digits. The words "at site b" are left out if ``site`` is empty.

        Args:
            others: the origin of the other mean, in words such as "at the other sites".
            title: the words for the column. If empty, they are "column" and the name, of which at
                most 80 characters are shown.
        """
        where = ""
        if self.site:
            where = f" at site {self.site}"
        name = title or f"column '{one_line(self.column, 80)}'"
        return f"{name}: mean {self.mean:.3g}{where}, {self.others:.3g} {others}: {self.question()}"

    def question(self) -> str:
        """Ask whether the column has another unit; a known change of unit is named in brackets."""
        if self.unit:
            return f"is it in another unit ({self.unit})?"
        return "is it in another unit, or not measured at one of them?"

    def relation(self) -> str:
        """Describe in words how the site's mean compares with ``others``, without numbers.

        Let r be the absolute value of the site's mean, divided by that of ``others``. The words are
        "less than a fifth of" if r is at most 1/5, and "more than five times" if r is at least 5.
        Otherwise they are "far from". Numbers are left out, because the mean of a column with few
        different values can reveal a count of patients.
        """
        if _ratio(self.mean, self.others) < _FACTOR:
            return "far from"
        if abs(self.mean) < abs(self.others):
            return "less than a fifth of"
        return "more than five times"


def compare_sites(
    features: Sequence[str], sums: Mapping[str, Sums], floor: int
) -> list[UnlikeColumn]:
    """Find the columns whose values at one site are so unusual that their unit may differ.

    Each site is compared with the other site that has the median mean among all other sites. Of two
    sites in the middle, the nearer one is taken. If only two sites have enough values, only the
    first by name is compared. ``_is_unlike`` decides by means, deviations and known changes of
    unit.

    Levels of a category are skipped. Columns of only 0 and 1 are skipped too.

    Args:
        features: names of the table's features.
        sums: site -> sums over its training rows, (features,) each.
        floor: the smallest number of known values in a column for which a site is compared. 0
            counts as 1.

    Returns:
        The unlike columns, in the order of ``features``, then by site.
    """
    found: list[UnlikeColumn] = []
    for place, feature in enumerate(features):
        spreads: dict[str, Spread] = {}
        for site in sorted(sums):
            if sums[site].count[place] >= max(floor, 1):
                spreads[site] = _spread_of(sums[site], place)
        if _is_category(feature) or all(_is_binary(sums[site], place) for site in spreads):
            continue
        found += _compare_spreads(feature, spreads)
    return found


def _compare_spreads(column: str, spreads: Mapping[str, Spread]) -> Iterator[UnlikeColumn]:
    """Yield each site whose values in a column are unlike those of a typical other site.

    The typical site has the median mean among the other sites. ``_is_unlike`` compares the two. Of
    two sites, only the first is compared. A single site is not compared. ``spreads`` is site ->
    mean and deviation.
    """
    compared = list(spreads)
    if len(spreads) == 2:
        compared = compared[:1]
    for site in compared:
        others = [spread for other, spread in spreads.items() if other != site]
        if not others:
            return
        own = spreads[site]
        typical = _median_spread(others, own.mean)
        if _is_unlike(own, typical):
            unit = _explain(own, typical)
            yield UnlikeColumn(column, site, own.mean, typical.mean, unit)


def _median_spread(spreads: Sequence[Spread], mean: float) -> Spread:
    """Return the spread with the median mean; of two middle spreads, the one nearer to ``mean``."""
    ordered = sorted(spreads, key=lambda spread: spread.mean)
    # Not the mean of the two middle ones: between mg/dl and mmol/l no site has such a value
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return min(middle, key=lambda spread: abs(spread.mean - mean))


def compare_with(
    features: Sequence[str], own: Sums, others: FeatureStatistics, floor: int
) -> list[UnlikeColumn]:
    """Find the columns whose values at a site are unlike pooled or declared statistics.

    ``_is_unlike`` decides by means, deviations and known changes of unit. Three kinds of columns
    are skipped:

    - Levels of a category, whose names have '='.
    - Columns with fewer known values than ``floor``, and columns without any.
    - Columns of only 0 and 1 at this site, if the mean to compare with is from 0 to 1.

    Args:
        features: names of the table's features.
        own: sums over the site's training rows, (features,) each.
        others: the means and standard deviations to compare with, (features,) each.
        floor: the smallest number of known values in a column that is compared.

    Returns:
        The unlike columns, in the order of ``features``. Their attribute ``site`` is empty.
    """
    found = []
    for place, feature in enumerate(features):
        known = own.count[place] >= max(floor, 1)
        if not known or _is_category(feature):
            continue
        mean, std = float(others.mean[place]), float(others.std[place])
        # A site with only 0 may have failed to measure a number, so the other mean decides
        if _is_binary(own, place) and 0.0 <= mean <= 1.0:
            continue
        spread, typical = _spread_of(own, place), Spread(mean, std)
        if _is_unlike(spread, typical):
            unit = _explain(spread, typical)
            found.append(UnlikeColumn(feature, "", spread.mean, mean, unit))
    return found


def _is_category(feature: str) -> bool:
    """Tell whether a feature is one level of a category, such as ``column=level``."""
    return "=" in feature


def _is_binary(sums: Sums, place: int) -> bool:
    """Tell whether a column has only 0 and 1: then its sum equals the sum of its squares."""
    return bool(sums.total[place] == sums.squares[place])


def _spread_of(sums: Sums, place: int) -> Spread:
    """Compute the mean and the standard deviation of the column with index ``place``.

    ``sums`` has the number n, the sum and the sum of squares of each column's known values. The
    column must have at least one known value. The variance is divided by n.
    """
    count = float(sums.count[place])
    mean = float(sums.total[place]) / count
    # Rounding may leave a variance slightly below 0
    variance = max(float(sums.squares[place]) / count - mean**2, 0.0)
    return Spread(mean, math.sqrt(variance))


def _ratio(first: float, second: float) -> float:
    """Divide the larger absolute value of two numbers by the smaller, which gives at least 1.

    Two zeros give 1. A single zero gives infinity.
    """
    low, high = sorted((abs(first), abs(second)))
    if high == 0.0:
        return 1.0
    if low == 0.0:
        return math.inf
    return high / low


def _is_unlike(first: Spread, second: Spread) -> bool:
    """Tell whether a column's values at two sites differ so much that the units may differ.

    Let s be the larger standard deviation, and r the ratio of the absolute means, at least 1. The
    result is True in three cases:

    - r is 5 or more, and the means are more than s apart.
    - r is 5 or more, and the larger mean has the larger deviation. The ratio of the deviations
      equals r within a factor of 2.
    - r is below 5, the means are more than 3 s apart, and a known change of unit explains the
      difference (``_explain``).
    """
    means = _ratio(first.mean, second.mean)
    apart = abs(first.mean - second.mean)
    widest = max(first.std, second.std)
    if means < _FACTOR:
        return apart > _FAR * widest and bool(_explain(first, second))
    is_same_way = (abs(first.mean) > abs(second.mean)) == (first.std > second.std)
    is_scaled = is_same_way and _ratio(means, _ratio(first.std, second.std)) <= _SAME_FACTOR
    return apart > widest or is_scaled


def _explain(first: Spread, second: Spread) -> str:
    """Name the known change of unit that best explains the difference between two spreads.

    A spread is a mean and a deviation. Each change in ``CONVERSIONS`` is tried on the spread with
    the smaller mean. The converted mean must match the larger mean within a factor of 1.2. The
    converted deviation must match the other deviation within a factor of 2. The best match of means
    wins. Means of 0 or below never match.

    Returns:
        The ``words`` of the change, which name both units. Empty if no change matches.
    """
    small, large = sorted((first, second), key=lambda spread: spread.mean)
    best, words = _SAME_MEAN, ""
    for conversion in CONVERSIONS:
        converted = conversion.factor * small.mean + conversion.offset
        if small.mean <= 0.0 or converted <= 0.0:
            continue
        miss = _ratio(converted, large.mean)
        spreads = _ratio(conversion.factor * small.std, large.std)
        if miss < best and spreads <= _SAME_FACTOR:
            best, words = miss, conversion.words
    return words
