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
    """Return whether a metric rests on the samples of every class, such as balanced accuracy.

    Such a metric could reveal the hidden count of a class. The name ``class`` stands for all
    metrics by class, and gives True. A single one of these, such as ``class.0.auc``, gives False.
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

        A number below 'privacy.sums-min-count' is None. Further classes are hidden if their numbers
        would reveal it. If the whole split has fewer samples, its entry is None.
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

        The set is empty if nothing is hidden, or if the site sent no counts. The result is None if
        no metric of the split may be shown, because it has fewer samples than
        'privacy.sums-min-count'.
        """
        if (site, split) not in self.counts:
            return frozenset()  # the site sent no counts, so its metrics are sums over sites
        counts = self.counts[site, split]
        if counts is None:
            return None
        return frozenset(label for label, count in enumerate(counts) if count is None)

    @cached_property
    def sites_with_hidden_counts(self) -> set[str]:
        """Find the sites for which the count of at least one class is hidden.

        A split that is empty at every site is ignored. No page may show how many metrics of single
        classes such a site sent. A class without samples has no AUC, so the number of AUCs would
        reveal that a hidden count is 0.
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

        Numbers of samples below 'privacy.sums-min-count' are hidden. Counts of classes that would
        reveal such a number are hidden too.
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

        ``shows`` decides. It hides values that could reveal a small number of patients.

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

        ``shows`` decides about each metric of a site. If any is hidden, the means are computed
        again from the shown metrics, because the old means could reveal the hidden ones.
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

        The norm and cosine of updates are left out, because the server computes them. At 'trust:
        nobody', only the task's basic metrics are kept, such as the loss.
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

        In a split with fewer samples than 'privacy.sums-min-count', every metric is hidden.
        Elsewhere, a metric is hidden if it could reveal such a small count or the predictions for
        single patients. At 'trust: nobody', only the task's basic metrics are shown. Norm and
        cosine of updates are always shown.
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

        It does so if at most one prediction is right, or at most one is wrong. In the last round,
        the samples of the hidden classes are examined alike.
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
