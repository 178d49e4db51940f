"""Rules that decide which of a run's results may be shown so that none reveals a few patients.

With the floor f, the run's 'privacy.sums-min-count':

- A count below f is hidden, also a true zero. If the count of one class follows from the
  total, that of another class is hidden as well (``client_app.summary.suppression``).
- For a split with fewer than f samples, everything is hidden.
- Balanced accuracy, AUC and average precision rest on every class. They are shown only if each
  class has f samples.
- Metrics by class are shown only for classes whose count is shown.
- Accuracy is hidden if it reveals that at most one sample of the hidden classes is right, or wrong.
  Then the site's counts by certainty are hidden too, because they add up to the accuracy.

For a run at 'trust: nobody', a page also shows only the metrics that such a hospital would send.

The table at the end of a run, ``fedsilo compare``, reports, cards and trackers all show
``Floors.shown_summary``, so a metric has one value and a mean is over the same sites in all of
them. metrics.csv and summary.json have everything, for the researcher.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsilo.core.metric_names import CLASS, TRAINED_PREFIX, UPDATE, read_metric
from fedsilo.core.settings.common_settings import NOBODY, CommonSettings
from fedsilo.models.tasks.task import task_of
from fedsilo.server_app.records.summary import by_distribution, means

Document = Mapping[str, Any]
Row = dict[str, str]  # column -> cell, a line of metrics.csv or traffic.csv
Metrics = Mapping[str, Mapping[str, float]]  # site -> metric -> value
Counts = Sequence[int | None]  # a number per class; None if it is hidden

_OVER_CLASSES = ("balanced-accuracy", "auc", "average-precision")
_OTHERS_MODELS = re.compile(r"^(trained|own)-|-from-.*$")


def rests_on_classes(metric: str) -> bool:
    """Tell whether the number of times that a site sent a metric may reveal its class counts.

    This is so for balanced accuracy, AUC and average precision, which are computed from all
    classes. A prefix ``trained-`` or ``own-`` or a suffix such as ``-from-north`` names the model,
    and is ignored. The name ``class`` stands for all metrics of single classes together, and gives
    True. A single one of these metrics, such as ``class.0.auc``, gives False.
    """
    return metric == CLASS or _OTHERS_MODELS.sub("", metric) in _OVER_CLASSES


@dataclass(frozen=True)
class Floors:
    """Decides for one run which of its counts and metrics may be shown.

    Attributes:
        common: the run's settings, with the floor and the level of trust.
        silos: site -> its facts in silos.json, nothing hidden.
        rounds: the number of rounds that the run had.
        last: split -> the metrics of the last round, nothing hidden.
    """

    common: CommonSettings
    silos: Mapping[str, Document]
    rounds: int
    last: Mapping[str, Metrics]

    @property
    def always(self) -> tuple[str, ...]:
        """The metrics that the task always has, the only ones that leave with noise."""
        return task_of(self.common).always

    @cached_property
    def counts(self) -> dict[tuple[str, str], Counts | None]:
        """Compute the numbers of samples of each class that may be shown, by (site, split).

        A number below 'privacy.sums-min-count' must stay hidden, and is None. If a reader could
        compute this number from the split's total, ``suppress`` hides the numbers of further
        classes. If the whole split has fewer samples than that setting, its entry is None and not a
        list.
        """
        # The package of the ClientApp brings Flower, which commands that only list do not need
        from fedsilo.client_app.summary.suppression import secret_of, suppress

        floor = self.common.sums_min_count
        found: dict[tuple[str, str], Counts | None] = {}
        for site, facts in self.silos.items():
            # No page shows the fingerprints. A secret from them hides the same classes in runs on
            # equal data; otherwise two runs together would reveal a hidden count
            secret = secret_of(json.dumps(facts["fingerprints"], sort_keys=True).encode())
            for split, counts in facts["label_counts"].items():
                found[site, split] = None
                if sum(counts) >= floor:
                    found[site, split] = suppress(counts, floor, secret, site, split)
        return found

    def hidden_classes(self, site: str, split: str) -> frozenset[int] | None:
        """Return the numbers of the classes whose count in a site's split is hidden.

        The set is empty if nothing is hidden. It is also empty if the site sent no counts, because
        its metrics are then sums over sites. If the split has fewer samples than
        'privacy.sums-min-count', the result is None. No metric of such a split may be shown.
        """
        if (site, split) not in self.counts:
            return frozenset()  # the site sent no counts, so its metrics are sums over sites
        counts = self.counts[site, split]
        if counts is None:
            return None
        return frozenset(label for label, count in enumerate(counts) if count is None)

    @cached_property
    def sites_with_hidden_counts(self) -> set[str]:
        """Find the sites for which the number of samples of at least one class is hidden.

        A number is hidden if it is below 'privacy.sums-min-count', or if it would reveal such a
        number. A split without numbers by class hides nothing, and a split that is empty at every
        site is ignored. No page may show how many metrics of single classes a found site sent. A
        class without samples has no AUC, so the number of AUCs would reveal a hidden 0.
        """
        # Only splits with samples at some site have metrics that could reveal a count
        used = set()
        for facts in self.silos.values():
            for split, number in facts["sizes"].items():
                if number:
                    used.add(split)
        hiding = set()
        for site, facts in self.silos.items():
            for split in used:
                has_counts = bool(facts["label_counts"].get(split))
                if has_counts and self.hidden_classes(site, split) != frozenset():
                    hiding.add(site)
        return hiding

    def shown_silos(self) -> Document:
        """Return the content of silos.json with None in place of each hidden number.

        The floor is the setting 'privacy.sums-min-count'. These numbers become None:

        - counts of classes that are below the floor or would reveal such a count (``counts``),
        - all counts of classes in a split below the floor, and the split's size,
        - the number of left-out samples of a site, if it is below the floor.
        """
        from fedsilo.client_app.summary.suppression import at_least

        floor = self.common.sums_min_count
        shown = {}
        for site, facts in self.silos.items():
            by_class: dict[str, Counts] = {}
            for split, counts in facts["label_counts"].items():
                by_class[split] = self.counts[site, split] or [None] * len(counts)
            sizes = {split: at_least(number, floor) for split, number in facts["sizes"].items()}
            dropped = at_least(facts["dropped"], floor)
            shown[site] = {**facts, "sizes": sizes, "label_counts": by_class, "dropped": dropped}
        return shown

    def shown_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Select the rows of metrics.csv that may be shown, in their order.

        ``shows`` decides. It refuses a row in these cases:

        - The row's split has fewer samples than 'privacy.sums-min-count'.
        - The name of the metric is not valid.
        - The run is at 'trust: nobody', and the metric is not among the task's basic metrics.
        - The value would reveal a hidden count of a class, or how single patients were predicted.

        Args:
            rows: rows of metrics.csv, each as column -> cell.
        """
        shown = []
        for row in rows:
            where = int(row["round"]), row["site"], row["split"]
            if self.shows(*where, row["metric"], float(row["value"])):
                shown.append(row)
        return shown

    def shown_summary(self, summary: Document) -> Document:
        """Return the content of summary.json without the metrics that must not be shown.

        ``shows`` decides about each test metric of a site. If any is hidden, the means are computed
        again from the shown metrics. Otherwise the means could reveal the hidden ones. The
        validation means are treated alike. summary.json has no validation metrics by site, so those
        of the last round are used instead.

        Args:
            summary: the content of summary.json. It is not changed.
        """
        groups = {site: str(facts["distribution"]) for site, facts in self.silos.items()}
        # summary.json has no validation metrics by site, so the last round's rows stand in for them
        whole = {"test": summary["sites"], "val": self.last["val"]}
        recorded = {"test": summary, "val": summary["validation"]}
        shown: dict[str, dict[str, dict[str, float]]] = {"test": {}, "val": {}}
        averaged: dict[str, dict[str, Any]] = {}
        for split, by_site in whole.items():
            for site, metrics in by_site.items():
                shown[split][site] = {}
                for name, value in metrics.items():
                    if self.shows(self.rounds, site, split, name, value):
                        shown[split][site][name] = value
            if shown[split] == by_site:  # nothing is hidden, so the recorded means hold
                of_split = recorded[split]
                averaged[split] = {
                    "mean": of_split["mean"],
                    "distributions": of_split["distributions"],
                }
            else:
                distributions = by_distribution(shown[split], groups)
                averaged[split] = {"mean": means(shown[split]), "distributions": distributions}
        test, validation = averaged["test"], averaged["val"]
        return {**summary, "sites": shown["test"], **test, "validation": validation}

    def sent_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Select the rows of metrics.csv with metrics that hospitals send, shown or hidden.

        The server computes the norm and cosine of updates, so these rows are left out. At 'trust:
        nobody', hospitals send only the task's basic metrics (``always``), such as the loss. Rows
        of other metrics are then left out too.

        Args:
            rows: rows of metrics.csv, each as column -> cell.
        """
        private = self.common.trust == NOBODY
        sent = []
        for row in rows:
            may_be_sent = not private or row["metric"] in self.always
            if row["split"] != UPDATE and may_be_sent:
                sent.append(row)
        return sent

    def shows(self, at: int, site: str, split: str, metric: str, value: float) -> bool:
        """Return whether a metric of round ``at`` may be shown.

        The first rule that fits decides:

        - The norm and cosine of an update are shown.
        - A metric with an invalid name is hidden.
        - At 'trust: nobody', all metrics except the task's basic ones (``always``) are hidden.
        - In a split with fewer samples than 'privacy.sums-min-count', every metric is hidden.
        - In a split in which no class has a hidden count, every metric is shown.
        - A metric of one class is shown if the count of that class is not hidden.
        - An accuracy is hidden if at most one prediction is right, or if at most one is wrong.
        - Balanced accuracy, AUC and average precision are hidden.
        - A metric of a bin, or of another part of the samples, is shown if the last round's
          accuracy is known and may be shown.
        - Any other metric is shown.

        Args:
            at: the round. The last round has metrics by class, so its rule for accuracy is stricter
                (``_gives_away``).
            site: the site's name.
            split: the split, or ``UPDATE`` for the norm and cosine of an update.
            metric: the metric's name in metrics.csv.
            value: the metric's value, which is used only for an accuracy.
        """
        if split == UPDATE:
            return True  # norm and direction of a change of weights
        read = read_metric(metric.removeprefix(TRAINED_PREFIX))
        if read is None:
            return False  # the file was altered, so the number of patients is unknown
        name = _OTHERS_MODELS.sub("", metric)
        if self.common.trust == NOBODY and metric not in self.always:
            return False
        # None hides the whole split, and an empty set hides nothing
        hidden = self.hidden_classes(site, split)
        if not hidden:
            return hidden is not None
        if read.part and read.word == CLASS:
            return int(read.place) not in hidden
        if name == "accuracy":
            return not self._gives_away(at, site, split, metric, value, hidden)
        if name in _OVER_CLASSES:
            return False
        if not read.part:
            return True
        # A count by certainty: the sum of these counts gives the last round's accuracy
        right = self.last[split].get(site, {}).get("accuracy")
        return right is not None and self.shows(self.rounds, site, split, "accuracy", right)

    def _gives_away(
        self, at: int, site: str, split: str, metric: str, value: float, hidden: frozenset[int]
    ) -> bool:
        """Return whether an accuracy reveals how single patients were predicted.

        The accuracy times the number of samples is the number of right predictions. The result is
        True if at most one prediction is right, or if at most one is wrong.

        The metrics of the last round also give the number of right predictions of each class that
        is not hidden. If all these numbers are known, the rest belongs to the hidden classes. The
        same rule is then applied to their samples, for the metric 'accuracy' only.

        Args:
            at: the round of the accuracy.
            site: the site's name. The site must have sent label counts.
            split: the split.
            metric: the metric's name, which may have a prefix such as ``trained-``.
            value: the accuracy, from 0 to 1.
            hidden: the numbers of the classes whose counts are hidden.
        """
        counts = self.silos[site]["label_counts"][split]
        # An accuracy times the samples is a whole number, apart from the rounding in the file
        right = round(value * sum(counts))
        left = [(right, sum(counts))]
        if metric == "accuracy" and at == self.rounds:
            last = self.last[split].get(site, {})
            found = []
            hidden_total = 0
            for label, count in enumerate(counts):
                if label in hidden:
                    hidden_total += count
                else:
                    found.append(last.get(f"{CLASS}.{label}.right"))
            if found and None not in found:
                # The shown classes say how many are right, so the rest belongs to the hidden ones
                hidden_right = right - sum(int(number or 0) for number in found)
                left.append((hidden_right, hidden_total))
        return any(min(count, total - count) <= 1 for count, total in left)
