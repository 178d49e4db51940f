"""Rules of a run's results that may be shown: none of few patients, nor one that gives it away.

With the floor f, the run's 'sums-min-count':

- a count below f is not shown, a true zero too; if one class's count follows from the total, that
  of another class is hidden as well (``client_app.summary.suppression``);
- of a split of fewer than f samples nothing is shown;
- balanced accuracy, AUC and average precision rest on every class: they are shown only where each
  class has f samples;
- by class, only metrics of classes whose count is shown;
- accuracy is shown where it leaves open how many of the hidden classes' samples are right: if none
  or one of them is right, or wrong, it is hidden, and so are the site's counts by certainty, whose
  sum is the same number.

Beside the floor, a page shows of a run at 'trust: nobody' only what such a hospital would send.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsilo.client_app.summary.suppression import at_least, secret_of, suppress
from fedsilo.core.metric_names import CLASS, TRAINED_PREFIX, read_metric
from fedsilo.core.settings.common_settings import NOBODY, CommonSettings
from fedsilo.server_app.records.recorder import UPDATE
from fedsilo.server_app.records.summary import by_distribution, means

Document = Mapping[str, Any]
Row = dict[str, str]  # column -> cell, a line of metrics.csv or traffic.csv
Metrics = Mapping[str, Mapping[str, float]]  # site -> metric -> value
Counts = Sequence[int | None]  # a number per class; None if it is hidden

_OVER_CLASSES = ("balanced-accuracy", "auc", "average-precision")
_OF_NOBODY = ("accuracy", "loss", "entropy")  # ``records.summary.BY_TRUST``
_OTHERS_MODELS = re.compile(r"^(trained|own)-|-from-.*$")


def rests_on_classes(metric: str) -> bool:
    """Tell whether a metric, or a family of them, is of each class by itself."""
    return metric == CLASS or _OTHERS_MODELS.sub("", metric) in _OVER_CLASSES


@dataclass(frozen=True)
class Floors:
    """The rules of one run: which of its counts and metrics may be shown.

    Attributes:
        common: the run's settings, which say the floor and the level of trust.
        silos: site -> its facts in silos.json, whole.
        rounds: how many rounds the run had.
        last: split -> the metrics of the last round, whole.
    """

    common: CommonSettings
    silos: Mapping[str, Document]
    rounds: int
    last: Mapping[str, Metrics]

    @cached_property
    def counts(self) -> dict[tuple[str, str], Counts | None]:
        """Site and split -> samples by class; None if the split has too few samples."""
        floor = self.common.sums_min_count
        found: dict[tuple[str, str], Counts | None] = {}
        for site, facts in self.silos.items():
            # The same data hide the same classes in every run, by what no page shows
            secret = secret_of(json.dumps(facts["fingerprints"], sort_keys=True).encode())
            for split, counts in facts["label_counts"].items():
                enough = sum(counts) >= floor
                found[site, split] = (
                    suppress(counts, floor, secret, site, split) if enough else None
                )
        return found

    def hidden_classes(self, site: str, split: str) -> frozenset[int] | None:
        """Return the classes whose count is hidden, None if no metric of the split is shown."""
        if (site, split) not in self.counts:
            return frozenset()  # no count came: what did is of several sites together
        counts = self.counts[site, split]
        if counts is None:
            return None
        return frozenset(label for label, count in enumerate(counts) if count is None)

    @cached_property
    def sites_with_hidden_counts(self) -> set[str]:
        """Sites with a hidden count: a split without samples of a class has no AUC of it.

        How much such a site sent of metrics by class would say that there are none.
        """
        sizes = [facts["sizes"] for facts in self.silos.values()]
        used = {split for one in sizes for split, number in one.items() if number}
        hiding = set()
        for site, facts in self.silos.items():
            counted = [split for split in used if facts["label_counts"].get(split)]
            if any(self.hidden_classes(site, split) != frozenset() for split in counted):
                hiding.add(site)
        return hiding

    def shown_silos(self) -> Document:
        """Return silos.json with None in place of each hidden count."""
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
        """Return the rows of metrics.csv that may be shown."""
        shown = []
        for row in rows:
            where = int(row["round"]), row["site"], row["split"]
            if self.shows(*where, row["metric"], float(row["value"])):
                shown.append(row)
        return shown

    def shown_summary(self, summary: Document) -> Document:
        """Return summary.json, whose means are over the sites whose metric may be shown."""
        groups = {site: str(facts["distribution"]) for site, facts in self.silos.items()}
        whole = {"test": summary["sites"], "val": self.last["val"]}
        recorded = {"test": summary, "val": summary["validation"]}
        shown: dict[str, dict[str, dict[str, float]]] = {"test": {}, "val": {}}
        averaged: dict[str, dict[str, Any]] = {}
        for split, by_site in whole.items():
            for site, metrics in by_site.items():
                shown[split][site] = {
                    name: value
                    for name, value in metrics.items()
                    if self.shows(self.rounds, site, split, name, value)
                }
            if shown[split] == by_site:  # all are shown: the means are those recorded
                of_split = recorded[split]
                averaged[split] = {key: of_split[key] for key in ("mean", "distributions")}
            else:
                distributions = by_distribution(shown[split], groups)
                averaged[split] = {"mean": means(shown[split]), "distributions": distributions}
        test, validation = averaged["test"], averaged["val"]
        return {**summary, "sites": shown["test"], **test, "validation": validation}

    def sent_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of metrics.csv that the sites sent, whatever is shown of their values.

        Norm and direction of an update are not: the server computes them.
        """
        private = self.common.trust == NOBODY
        return [
            row
            for row in rows
            if row["split"] != UPDATE and (not private or row["metric"] in _OF_NOBODY)
        ]

    def shows(self, at: int, site: str, split: str, metric: str, value: float) -> bool:
        """Tell whether a metric of round ``at`` may be shown."""
        if split == UPDATE:
            return True  # norm and direction of a change of weights
        read = read_metric(metric.removeprefix(TRAINED_PREFIX))
        if read is None:
            return False  # an altered file: nobody knows on how many patients it rests
        name = _OTHERS_MODELS.sub("", metric)
        if self.common.trust == NOBODY and metric not in _OF_NOBODY:
            return False
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
        # Counts by certainty, whose sum is the last round's accuracy
        right = self.last[split].get(site, {}).get("accuracy")
        return right is not None and self.shows(self.rounds, site, split, "accuracy", right)

    def _gives_away(
        self, at: int, site: str, split: str, metric: str, value: float, hidden: frozenset[int]
    ) -> bool:
        """Tell whether an accuracy says that all or none of the hidden classes are right."""
        counts = self.silos[site]["label_counts"][split]
        right = round(value * sum(counts))
        left = [(right, sum(counts))]
        if metric == "accuracy" and at == self.rounds:
            shown = [label for label in range(len(counts)) if label not in hidden]
            last = self.last[split].get(site, {})
            found = [last.get(f"{CLASS}.{label}.right") for label in shown]
            if shown and None not in found:
                # The shown classes say how many are right, so the rest belongs to the hidden ones
                of_hidden = right - sum(int(number or 0) for number in found)
                left.append((of_hidden, sum(counts[label] for label in hidden)))
        return any(min(count, total - count) <= 1 for count, total in left)
