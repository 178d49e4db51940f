"""Build a site's answer to a survey: counts, means and percentiles above the site's floors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from fedsilo.client_app.opening import OpenedSite
from fedsilo.client_app.summary.suppression import at_least, suppress
from fedsilo.core.files.locations import find_places
from fedsilo.core.survey import (
    About,
    Count,
    LeftOut,
    MeanAndDeviation,
    MeasuredFeature,
    Survey,
)
from fedsilo.datasets.partition.cuts import is_cut
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.measures import LeftOutRows, Measure, Values
from fedsilo.datasets.silo.silos import Silo

_FEW_VALUES = 10  # a mean over so few distinct values reveals counts
_TAIL = 0.05  # the share of samples beyond each percentile


@dataclass
class _SplitParts:
    """The parts of a survey that have a value per split; see ``Survey``."""

    samples: dict[str, Count] = field(default_factory=dict)
    labels: dict[str, list[Count]] = field(default_factory=dict)
    histograms: dict[str, dict[str, list[Count]]] = field(default_factory=dict)
    means: dict[str, dict[str, MeanAndDeviation]] = field(default_factory=dict)
    percentiles: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerBuilder:
    """Builds an answer about the ``site``, with its own ``secret`` seed."""

    site: OpenedSite
    secret: int

    def answer(self) -> Survey:
        """Return everything that may leave.

        Raises:
            DataError: a file cannot be read again.
        """
        silo, settings = self.site.silo, self.site.settings
        chosen = data_set(settings.dataset)
        places = find_places(settings.data_dir, settings.cache_dir)
        measures = chosen.measures(silo, settings, places)
        files: list[Measure] = []
        if not is_cut(settings):  # the silo of a partition has files of many sites
            files = chosen.file_measures(silo.name, settings, places)
        return Survey(
            about=self._about(measures, files),
            left_out=self._left_out(chosen.left_out(silo, settings, places)),
            **self._describe_splits(measures),
            **self._describe_files(files),
        )

    def _describe_splits(self, measures: list[Measure]) -> dict[str, Any]:
        """Return the survey's parts that have a value per split; an empty split is left out."""
        labels = self.site.silo.label_counts()
        described = _SplitParts()
        for name, split in self.site.silo.splits().items():
            if not len(split):
                continue
            described.samples[name] = at_least(len(split), self.floor)
            described.labels[name] = self._cells(labels[name], "labels", name)
            described.means[name] = dict(self._means(measures, name))
            described.percentiles[name] = self._percentiles(measures, name)
            histograms = described.histograms[name] = {}
            for one in measures:
                if one.has_histogram:
                    histograms[one.name] = self._histogram(one, name, "histograms")
        return vars(described)

    def _describe_files(self, files: list[Measure]) -> dict[str, Any]:
        """Return the survey's parts about the site's files, such as their sizes."""
        histograms: dict[str, list[Count]] = {}
        percentiles: dict[str, tuple[float, float]] = {}
        for one in files:
            for place in one.values:
                histograms[one.name] = self._histogram(one, place, "files")
                percentiles.update(self._percentiles([one], place, few_too=True))
        return {"files": histograms, "file_percentiles": percentiles}

    @property
    def floor(self) -> int:
        """The fewest samples behind a count; at a hospital only its own limits decide."""
        if self.site.simulated:
            return self.site.settings.sums_min_count
        return self.site.limits.sums_min_count

    def _about(self, measures: list[Measure], files: list[Measure]) -> About:
        return About(
            site=self.site.silo.name,
            simulated=self.site.simulated,
            dataset=self.site.settings.dataset,
            on=datetime.now(UTC).date().isoformat(),
            floor=self.floor,
            classes=list(self.site.silo.class_names()),
            features=[_declare(one) for one in measures],
            file_features=[_declare(one) for one in files],
        )

    def _cells(self, counts: list[int], *table: str) -> list[Count]:
        return suppress(counts, self.floor, self.secret, self.site.silo.name, *table)

    def _histogram(self, measure: Measure, split: str, part: str) -> list[Count]:
        table, in_a_row = (self.site.silo.name, part, split, measure.name), not measure.levels
        counts = measure.counts(split)
        return suppress(counts, self.floor, self.secret, *table, in_a_row=in_a_row)

    def _left_out(self, rows: LeftOutRows) -> LeftOut:
        """Count the samples in no split, and per column those without a possible value."""
        missing = {}
        for name, count in rows.missing.items():
            # Both cells of the table, because their total may be known
            cells = [count, rows.count - count]
            missing[name] = self._cells(cells, "left-out", name)[0]
        return LeftOut(count=at_least(rows.count, self.floor), missing=missing)

    def _means(self, measures: list[Measure], split: str) -> Iterator[tuple[str, MeanAndDeviation]]:
        """Yield mean and standard deviation of each measure with declared edges.

        Values beyond the outer edges are moved to them first, so an outlier has no larger influence
        than other values.
        """
        for one in measures:
            if not one.edges:
                continue
            clipped = one
            if not self.site.simulated:  # simulated patients need no protection
                within = one.values[split].clip(one.edges[0], one.edges[-1])
                clipped = replace(one, values={split: within})
            values = self._told(clipped, split)
            if values is None or len(values) < self.floor:
                continue
            mean, sd = float(values.mean()), float(values.std())
            yield one.name, MeanAndDeviation(mean=mean, sd=sd)

    def _percentiles(
        self, measures: list[Measure], split: str, few_too: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Return the 5th and 95th percentile of each measure with enough samples beyond both.

        ``few_too`` includes numbers with few distinct values, such as file sizes.
        """
        found = {}
        for one in measures:
            values = self._told(one, split, few_too)
            if values is not None and _TAIL * len(values) >= self.floor:
                low, high = np.quantile(values, [_TAIL, 1 - _TAIL])
                found[one.name] = float(low), float(high)
        return found

    def _told(self, measure: Measure, split: str, few_too: bool = False) -> Values | None:
        """Return the known values of a number; None for levels, or for few distinct values."""
        values = measure.values[split]
        known = values[~np.isnan(values)]
        if measure.levels or len(known) == 0:
            return None
        many = self.site.simulated or few_too or len(np.unique(known)) > _FEW_VALUES
        return known if many else None


def _declare(measure: Measure) -> MeasuredFeature:
    return MeasuredFeature(
        name=measure.name,
        edges=list(measure.edges),
        levels=list(measure.levels),
        lacking=measure.may_lack,
    )


def fingerprint(silo: Silo) -> Mapping[str, str]:
    """Return a fingerprint of the silo's data."""
    return {"schema": silo.schema, **silo.fingerprints}
