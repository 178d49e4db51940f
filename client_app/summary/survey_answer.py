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

    A hospital answers with only those parts that its site file allows. Its first answer about a
    data set is stored. Later surveys get this answer again, with a note if the data have changed. A
    simulated site makes a new answer each time, with all parts.

    Args:
        context: the node and the survey's settings.
        rules: the hospital's site file, read for this message. Without one (None), a hospital
            refuses. A simulated site needs none.

    Raises:
        RefusedError: the hospital does not answer surveys.
        FedsiloError: the data are unusable, or the stored answer is damaged.
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
    """Yield each reason why a hospital does not answer a survey; the server gets the first.

    To answer, the hospital must meet these conditions, in this order:

    - Its trust is 'server'.
    - It has no cap on epsilon.
    - It has a 'state-dir'.
    - It has a site file.
    - ``allowed`` contains 'about', the part of every survey that says where the answer comes from.

    Args:
        context: the node, with the site file's limits in its node config.
        folder: the hospital's folder for all runs; None without a 'state-dir'.
        rules: the hospital's site file; None without a site file.
        allowed: the parts that the site file lets leave.
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

    The result has the answer's parts by name. It also has the settings that decided which data were
    read, and the data's digests.

    Args:
        context: the node and the survey's settings.
        secret: the seed for the order in which counts are suppressed to protect smaller ones; 0 at
            a simulated site.

    Raises:
        FedsiloError: the data are unusable, or there are fewer samples than the site's minimum.
    """
    site, run = _open_site(context)
    answer = AnswerBuilder(site, secret).answer()
    return StoredAnswer(answer.to_config(), run, dict(fingerprint(site.silo)))


def _first_answer(
    folder: Path, dataset: str, make: Callable[[], StoredAnswer]
) -> tuple[StoredAnswer, bool]:
    """Return the stored answer about a data set; if none is stored, make and store one.

    Concurrent surveys wait for each other. An error of ``make`` passes unchanged, and nothing is
    stored.

    Args:
        folder: the hospital's folder for all runs.
        dataset: the data set's name, the key of the stored answers.
        make: builds the answer; called only if none is stored.

    Returns:
        The answer, and True if it was made just now.

    Raises:
        CheckpointError: the file of answers is damaged, or cannot be written.
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

    The data are read again, with the settings of the first answer. The part ``about`` is JSON, and
    its key ``changed`` tells whether the data's digests differ from those of the first answer. The
    stored file does not change.

    Raises:
        FedsiloError: the data are unusable, or there are fewer samples than the site's minimum.
    """
    # The settings of the first answer, because other settings would count other samples
    before = with_current_keys(kept.settings, quietly=True)
    now = _open_site(replace(context, run_config={**context.run_config, **before}))[0].silo
    about = json.loads(kept.parts[ABOUT])
    about["changed"] = dict(fingerprint(now)) != dict(kept.fingerprint)
    return {**kept.parts, ABOUT: json.dumps(about)}


def _open_site(context: Context) -> tuple[OpenedSite, dict[str, Value]]:
    """Open the site with its data, and return it with the settings that decide which data are read.

    Among these settings, only those that the survey gives are returned, by key. If the data cannot
    be read, the site is opened again with 'data.broken-images' at "skip". Broken images are then
    left out. This needs a data set that has this setting.

    Raises:
        RefusedError: the site has fewer training samples, in total or of a label, than its
            minimums. The error also means that its rules forbid the survey's settings.
        DataError: the data cannot be read, even without broken images.
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

        A count below the hospital's 'sums-min-count' is None in the answer. At a simulated site the
        run's 'privacy.sums-min-count' decides. The answer describes each split, and counts the
        samples that are in no split, because they are incomplete or unreadable. Files, such as
        images, are described too, unless fedsilo has cut the silo from a shared data set. Those
        files belong to many sites.

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
            left_out=self._count_left_out(chosen.left_out(silo, settings, places)),
            **self._describe_splits(measures),
            **self._describe_files(files),
        )

    def _describe_splits(self, measures: list[Measure]) -> dict[str, Any]:
        """Return the statistics of each split, by the name of the survey's part.

        - "samples" and "labels" map a split's name to the number of samples, and of each label.
        - "means", "percentiles" and "histograms" map a split's name to a mapping from feature to
          value.

        Only features with bin edges or categories have a histogram. Empty splits are left out.
        Counts that must not leave the site are None.

        Args:
            measures: each holds the values of one feature for all samples.
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
        """Return two parts of the survey's answer that describe the site's files, such as images.

        "files" maps each feature, such as the image width, to its histogram. Counts that must not
        leave the site are None in it. "file_percentiles" maps each feature to its percentiles. It
        lacks categories, and features with fewer than 20 * ``floor`` known values. Features with
        few distinct values are included. If a feature has values under several splits, only those
        of the last split are described.

        Args:
            files: each holds the values of one feature for all files. If there are none, both parts
                are empty.
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
        """The smallest number of samples or files that may leave the site as a count.

        It is the hospital's own limit 'sums-min-count', and the run cannot change it. For a
        simulated site, it is the run's 'privacy.sums-min-count'.
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
        """Count the samples that are in no split and, per column, those without a valid value.

        Samples in no split are incomplete or unreadable. A count below ``floor``, the smallest
        count that may leave the site, is None. A column's count is also None if fewer than
        ``floor`` of these samples have a valid value in the column. That number would follow from
        the total. A floor of 1 or less hides nothing.
        """
        missing = {}
        for name, count in rows.missing.items():
            # Both cells of the table, because their total may be known
            cells = [count, rows.count - count]
            missing[name] = self._cells(cells, "left-out", name)[0]
        return LeftOut(count=at_least(rows.count, self.floor), missing=missing)

    def _means(self, measures: list[Measure], split: str) -> Iterator[tuple[str, MeanAndDeviation]]:
        """Yield each measure's name with the mean and standard deviation of its values in a split.

        A measure holds the values of one feature for all samples. It is left out if it has no bin
        edges, or fewer known values than ``floor``, the smallest count that may leave. A real site
        first clips the values to the range of the bin edges, which hides outliers. It then leaves
        out measures with at most 10 distinct values. The standard deviation divides by n.

        Args:
            measures: the measures.
            split: "train", "val" or "test".
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
        """Return the 5th and the 95th percentile of each measure's values, by the measure's name.

        A measure holds the values of one feature for all samples or files. Three kinds of measures
        are left out:

        - Measures of categories.
        - Measures with fewer than 20 * ``floor`` known values, where ``floor`` is the smallest
          count that may leave. Fewer than ``floor`` values would then lie beyond a percentile.
        - At a real site, measures with at most 10 distinct values.

        Args:
            measures: the measures.
            split: the split's name, a key of the measures' ``values``.
            include_few_values: True to include measures with at most 10 distinct values, such as
                image widths.
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

        A measure holds the values of one feature for all samples or files. The result is None if
        the measure has categories, or no known value in the split. A real site also returns None if
        there are at most 10 distinct values, because statistics of few values would reveal counts.
        ``include_few_values`` turns this last rule off.
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
    """Return the digests of a silo, by which a change of its data is noticed later.

    The silo already has them, and nothing is computed here. "schema" maps to a digest of a table's
    schema or, for images, of the classes and the image size. The name of each split maps to a
    digest of that split's data.
    """
    return {"schema": silo.schema, **silo.fingerprints}
