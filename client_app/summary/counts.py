"""A site's answer to a survey, made of its silo: counts, means and percentiles above its floors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.summary.suppression import at_least, suppressed
from fedsilo.datasets.io.locations import find_places
from fedsilo.datasets.partition.cuts import is_cut
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.measures import LeftOutRows, Measure, Values
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.contract.survey import About, Count, LeftOut, Measured, Spread, Survey

_FEW_VALUES = 10  # of as many a mean is a count in other words
_TAIL = 0.05  # samples beyond each percentile


@dataclass(frozen=True)
class Answering:
    """What an answer is made of: the ``site``, and the ``secret`` seed of its own."""

    site: SiteSession
    secret: int

    def answer(self) -> Survey:
        """Return all that may leave.

        Raises:
            DataError: a file cannot be read again.
        """
        silo, settings = self.site.silo, self.site.settings
        chosen = data_set(settings.dataset)
        places = find_places(settings.data_dir, settings.cache_dir)
        measures = chosen.measures(silo, settings, places)
        own = not is_cut(settings)  # else a silo is of many sites' files
        files = chosen.file_measures(silo.name, settings, places) if own else []
        sizes = {name: len(split) for name, split in silo.splits().items() if len(split)}
        return Survey(
            about=self._about(measures, files),
            samples={split: at_least(size, self.floor) for split, size in sizes.items()},
            labels={
                split: self._cells(silo.label_counts()[split], "labels", split) for split in sizes
            },
            left_out=self._left_out(chosen.left_out(silo, settings, places)),
            histograms={
                split: {
                    one.name: self._histogram(one, split, "histograms")
                    for one in measures
                    if one.has_histogram
                }
                for split in sizes
            },
            means={split: dict(self._means(measures, split)) for split in sizes},
            percentiles={split: self._percentiles(measures, split) for split in sizes},
            files={
                one.name: self._histogram(one, place, "files")
                for one in files
                for place in one.values
            },
            file_percentiles={
                name: ends
                for place in {place for one in files for place in one.values}
                for name, ends in self._percentiles(files, place, few_too=True).items()
            },
        )

    @property
    def floor(self) -> int:
        """Samples behind a count, at least: of a hospital by its own word alone."""
        bounds = self.site.settings if self.site.simulated else self.site.limits
        return bounds.sums_min_count

    def _about(self, measures: list[Measure], files: list[Measure]) -> About:
        return About(
            site=self.site.silo.name,
            simulated=self.site.simulated,
            dataset=self.site.settings.dataset,
            on=datetime.now(UTC).date().isoformat(),
            floor=self.floor,
            classes=list(self.site.silo.class_names()),
            features=[_declared(one) for one in measures],
            file_features=[_declared(one) for one in files],
        )

    def _cells(self, counts: list[int], *table: str) -> list[Count]:
        return suppressed(counts, self.floor, self.secret, self.site.silo.name, *table)

    def _histogram(self, measure: Measure, split: str, part: str) -> list[Count]:
        table, in_a_row = (self.site.silo.name, part, split, measure.name), not measure.levels
        counts = measure.counts(split)
        return suppressed(counts, self.floor, self.secret, *table, in_a_row=in_a_row)

    def _left_out(self, rows: LeftOutRows) -> LeftOut:
        """Return the samples of no split; of a column those with a value are the other cell."""
        pairs = {name: [count, rows.count - count] for name, count in rows.missing.items()}
        missing = {n: self._cells(pair, "left-out", n)[0] for n, pair in pairs.items()}
        return LeftOut(count=at_least(rows.count, self.floor), missing=missing)

    def _means(self, measures: list[Measure], split: str) -> Iterator[tuple[str, Spread]]:
        """Yield mean and standard deviation of what has declared edges, beyond which none counts.

        So one patient far out moves them by no more than another.
        """
        for one in (one for one in measures if one.edges):
            ends = (-np.inf, np.inf) if self.site.simulated else (one.edges[0], one.edges[-1])
            values = self._told(replace(one, values={split: one.values[split].clip(*ends)}), split)
            if values is None or len(values) < self.floor:
                continue
            mean, sd = float(values.mean()), float(values.std())
            yield one.name, Spread(mean=mean, sd=sd)

    def _percentiles(
        self, measures: list[Measure], split: str, few_too: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Return the 5th and 95th percentile of what has enough samples beyond each.

        ``few_too``: also of numbers with few values, as the size of files is.
        """
        found = {}
        for one in measures:
            values = self._told(one, split, few_too)
            if values is not None and _TAIL * len(values) >= self.floor:
                low, high = np.quantile(values, [_TAIL, 1 - _TAIL])
                found[one.name] = float(low), float(high)
        return found

    def _told(self, measure: Measure, split: str, few_too: bool = False) -> Values | None:
        """Return the known values of a number; None of a level, or of one of few values."""
        values = measure.values[split]
        known = values[~np.isnan(values)]
        if measure.levels or len(known) == 0:
            return None
        many = self.site.simulated or few_too or len(np.unique(known)) > _FEW_VALUES
        return known if many else None


def _declared(measure: Measure) -> Measured:
    return Measured(
        name=measure.name,
        edges=list(measure.edges),
        levels=list(measure.levels),
        lacking=measure.may_lack,
    )


def fingerprint(silo: Silo) -> Mapping[str, str]:
    """Return by what a silo's data are known again."""
    return {"schema": silo.schema, **silo.fingerprints}
