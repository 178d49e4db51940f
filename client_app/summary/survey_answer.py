"""A site's answer to a survey: counts, means and percentiles above the site's floors.

The first answer is stored, and every later survey gets it again, because the difference of two
answers would reveal more than each. With slightly moved bins, or data with one patient more, the
difference is that patient. So a data set's first answer stays until the hospital itself removes
``<state-dir>/.own/<site>/survey.json``.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from fedsilo.client_app.opening import OpenedSite, open_site
from fedsilo.client_app.site.identity import node_cap, own_name, site_settings
from fedsilo.client_app.site.node import is_simulated, own_folder
from fedsilo.client_app.site.own_file import OwnFile, secret_seed
from fedsilo.client_app.site.policy import SiteFile, refuse_few_samples
from fedsilo.client_app.summary.suppression import at_least, suppress
from fedsilo.core.errors import DataError, RefusedError
from fedsilo.core.files.locations import find_places
from fedsilo.core.messages import SURVEYED
from fedsilo.core.settings.common_settings import SERVER, CommonSettings
from fedsilo.core.settings.removed import with_current_keys
from fedsilo.core.settings_schema import Value, keys_in
from fedsilo.core.survey import (
    ABOUT,
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

# These decide which samples there are and what is counted
_DECISIVE = ("dataset", *keys_in(CommonSettings, "split"))
_FILE = "survey.json"
_FEW_VALUES = 10  # a mean over so few distinct values reveals counts
_TAIL = 0.05  # the share of samples beyond each percentile


@dataclass(frozen=True)
class StoredAnswer:
    """The first answer to a survey of one data set, as stored."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    parts: Mapping[str, str]  # the parts of the answer, as sent or ready to be sent
    settings: Mapping[str, Value]  # the settings that decided the samples, by key
    fingerprint: Mapping[str, str]  # the fingerprint of the data


def answer_survey(context: Context, rules: SiteFile | None) -> RecordDict:
    """Answer a survey, a server's request for statistics of a site's data.

    A hospital answers only with parts that its site file ``rules`` allow, and refuses without
    ``rules``. Later surveys get its first answer again, with a note if the data have changed.

    Raises:
        RefusedError: the hospital does not answer surveys.
        FedsiloError: the data or the stored answer are unusable.
    """
    if is_simulated(context):
        return _record(_build_answer(context, 0).parts)
    allowed: set[str] = set()
    if rules is not None:
        allowed = rules.survey_parts(name.replace("_", "-") for name in Survey.model_fields)
    folder = own_folder(context, own_name(context))
    reason = next(_reasons_against(context, folder, rules, allowed), "")
    if reason or folder is None:
        raise RefusedError(reason)
    dataset = site_settings(context).dataset
    kept, new = _first_answer(folder, dataset, lambda: _build_answer(context, secret_seed(folder)))
    parts = kept.parts
    if not new:
        parts = _repeat_answer(context, kept)
    return _record({name: text for name, text in parts.items() if name in allowed})


def _reasons_against(
    context: Context, folder: Path | None, rules: SiteFile | None, allowed: Collection[str]
) -> Iterator[str]:
    """Yield each reason why a hospital does not answer a survey, in a fixed order.

    The hospital needs trust 'server', no cap on epsilon, a 'state-dir' and a site file. The
    ``allowed`` parts must include 'about', which every survey has.
    """
    trust = str(context.node_config.get("trust", ""))
    if trust != SERVER:
        yield (
            f"the site file says 'trust: {trust}', but a survey's counts are this site's own, "
            "without noise: leave the site out"
        )
    if node_cap(context).max_epsilon:
        yield (
            "the site has a cap on epsilon, but a survey's counts have no noise: leave the site "
            "out, or have the hospital answer without a cap"
        )
    if folder is None:
        yield (
            "the node config names no 'state-dir', which stores the first answer to a survey: "
            "start the SuperNode with one"
        )
    if rules is None:
        yield (
            "the hospital has no site file, but a survey needs one whose 'records' list what may "
            f"leave: '{SURVEYED}/*', or part by part"
        )
    if ABOUT not in allowed:
        yield (
            f"the site file's 'records' do not list '{SURVEYED}/{ABOUT}', but no survey leaves "
            f"without it: '{SURVEYED}/*' is everything of a survey"
        )


def _build_answer(context: Context, secret: int) -> StoredAnswer:
    """Build a new answer to a survey from the site's data.

    The result also has the data's digests, and the settings that decided which data were read.
    ``secret`` is the seed for the order in which counts are suppressed, or 0 at a simulated site.
    """
    site, run = _open_site(context)
    answer = AnswerBuilder(site, secret).answer()
    return StoredAnswer(answer.to_config(), run, dict(fingerprint(site.silo)))


def _first_answer(
    folder: Path, dataset: str, make: Callable[[], StoredAnswer]
) -> tuple[StoredAnswer, bool]:
    """Return the stored answer about a data set, or make and store one if none is stored.

    ``folder`` is the hospital's folder for all runs. The second value is True if the answer was
    made now. If ``make`` fails, nothing is stored.
    """
    file: OwnFile[dict[str, StoredAnswer]] = OwnFile(
        folder / _FILE,
        dict[str, StoredAnswer],
        f"the hospital's own {_FILE}",
        "bring it back; if it is removed the next survey gets a new answer",
        "a survey leaves only once it is stored; make room or repair the disk",
    )
    with file.lock():
        known = file.read({})
        if dataset in known:
            return known[dataset], False
        made = make()
        file.write({**known, dataset: made})
        return made, True


def _repeat_answer(context: Context, kept: StoredAnswer) -> dict[str, str]:
    """Return the parts of a stored answer by name, and note in them whether the data have changed.

    The data are read again with the first answer's settings. The key ``changed`` in the JSON part
    ``about`` tells whether the data's digests differ.
    """
    # The settings of the first answer, because other settings would count other samples
    before = with_current_keys(kept.settings, quietly=True)
    now = _open_site(replace(context, run_config={**context.run_config, **before}))[0].silo
    about = json.loads(kept.parts[ABOUT])
    about["changed"] = dict(fingerprint(now)) != dict(kept.fingerprint)
    return {**kept.parts, ABOUT: json.dumps(about)}


def _open_site(context: Context) -> tuple[OpenedSite, dict[str, Value]]:
    """Open the site with its data, and return it with the settings that decide which data are read.

    If the data cannot be read, broken images are skipped where the data set has
    'data.broken-images'. A site with too few training samples is refused.
    """
    run = dict(context.run_config)
    try:
        site = open_site(context)
    except DataError:
        read = data_set(site_settings(context).dataset).settings
        if "data.broken-images" not in read or run.get("data.broken-images") == "skip":
            raise
        run["data.broken-images"] = "skip"
        site = open_site(replace(context, run_config=run))
    refuse_few_samples(site.silo.name, site.silo.label_counts()["train"], context.node_config)
    decisive = {*_DECISIVE, *data_set(site.settings.dataset).settings}
    return site, {key: value for key, value in run.items() if key in decisive}


def _record(parts: Mapping[str, str]) -> RecordDict:
    return RecordDict({SURVEYED: ConfigRecord(dict(parts))})


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
    """Builds a survey's answer about ``site``; the ``secret`` seed decides suppressed cells."""

    site: OpenedSite
    secret: int

    def answer(self) -> Survey:
        """Build the answer to a survey: statistics of the site's samples, with small counts hidden.

        A hidden count is None. The answer describes each split, and counts incomplete or unreadable
        samples, which are in no split. Files, such as images, are described too, unless fedsilo has
        cut the silo from a shared data set.

        Raises:
            DataError: a file is unreadable.
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
            left_out=self._count_left_out(chosen.left_out(silo, settings, places)),
            **self._describe_splits(measures),
            **self._describe_files(files),
        )

    def _describe_splits(self, measures: list[Measure]) -> dict[str, Any]:
        """Return the statistics of each split, by the name of the survey's part.

        "samples" and "labels" have counts by split. "means", "percentiles" and "histograms" have
        values by split and feature. Empty splits are left out. Small counts are None.
        """
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
        """Return the histograms and percentiles of features of the site's files.

        "files" maps a feature, such as the image width, to its histogram, with None for small
        counts. "file_percentiles" maps a feature to its percentiles. It lacks features with fewer
        than 20 * ``floor`` values.
        """
        histograms: dict[str, list[Count]] = {}
        percentiles: dict[str, tuple[float, float]] = {}
        for one in files:
            for place in one.values:
                histograms[one.name] = self._histogram(one, place, "files")
                percentiles.update(self._percentiles([one], place, include_few_values=True))
        return {"files": histograms, "file_percentiles": percentiles}

    @property
    def floor(self) -> int:
        """The smallest count that may leave the site.

        A hospital uses its own 'sums-min-count', and a simulated site the run's
        'privacy.sums-min-count'.
        """
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
        """Return the suppressed counts of a measure's bins or levels in a split."""
        table, in_a_row = (self.site.silo.name, part, split, measure.name), not measure.levels
        counts = measure.counts(split)
        return suppress(counts, self.floor, self.secret, *table, in_a_row=in_a_row)

    def _count_left_out(self, rows: LeftOutRows) -> LeftOut:
        """Count the samples in no split and, per column, those without a valid value.

        A count below ``floor`` is None. A column's count is also None if fewer than ``floor`` of
        these samples have a valid value. A floor of 1 or less hides nothing.
        """
        missing = {}
        for name, count in rows.missing.items():
            # Both cells of the table, because their total may be known
            cells = [count, rows.count - count]
            missing[name] = self._cells(cells, "left-out", name)[0]
        return LeftOut(count=at_least(rows.count, self.floor), missing=missing)

    def _means(self, measures: list[Measure], split: str) -> Iterator[tuple[str, MeanAndDeviation]]:
        """Yield each measure's name with the mean and standard deviation of its values in a split.

        Each measure describes a feature. It needs bin edges and ``floor`` known values. A real site
        clips values to the edges, and omits measures with at most 10 distinct values.
        """
        for one in measures:
            if not one.edges:
                continue
            clipped = one
            if not self.site.simulated:  # simulated patients need no protection
                # A single outlier could otherwise be read off the mean
                within = one.values[split].clip(one.edges[0], one.edges[-1])
                clipped = replace(one, values={split: within})
            values = self._known_values(clipped, split)
            if values is None or len(values) < self.floor:
                continue
            mean, sd = float(values.mean()), float(values.std())
            yield one.name, MeanAndDeviation(mean=mean, sd=sd)

    def _percentiles(
        self, measures: list[Measure], split: str, include_few_values: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Return the 5th and the 95th percentile of each feature's values, by the feature's name.

        Features with categories, or with fewer than 20 * ``floor`` known values, are left out. At a
        real site, so are features with at most 10 distinct values, unless ``include_few_values``.
        """
        found = {}
        for one in measures:
            values = self._known_values(one, split, include_few_values)
            if values is not None and _TAIL * len(values) >= self.floor:
                # At least ``floor`` samples lie beyond each, so neither is an outlier
                low, high = np.quantile(values, [_TAIL, 1 - _TAIL])
                found[one.name] = float(low), float(high)
        return found

    def _known_values(
        self, measure: Measure, split: str, include_few_values: bool = False
    ) -> Values | None:
        """Return a measure's values in a split without the missing ones (NaN), or None.

        The result is None for categories and without known values. At a real site it is also None
        for at most 10 distinct values, unless ``include_few_values``.
        """
        values = measure.values[split]
        known = values[~np.isnan(values)]
        if measure.levels or len(known) == 0:
            return None
        many = self.site.simulated or include_few_values or len(np.unique(known)) > _FEW_VALUES
        return known if many else None


def _declare(measure: Measure) -> MeasuredFeature:
    return MeasuredFeature(
        name=measure.name,
        edges=list(measure.edges),
        levels=list(measure.levels),
        lacking=measure.may_lack,
    )


def fingerprint(silo: Silo) -> Mapping[str, str]:
    """Return the digests that a silo stores to identify its data, by name.

    "schema" maps to the digest of a table's schema, or of the classes and size of images. Each
    split's name maps to the digest of its data.
    """
    return {"schema": silo.schema, **silo.fingerprints}
