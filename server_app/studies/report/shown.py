"""A finished run as a page may show it: no figure of few patients, nor one that gives it away.

With the floor f, the run's 'privacy.sums-min-count':

- a count below f is not shown, a true zero too; if one class's count follows from the total, that
  of another class is hidden as well (``client_app.summary.suppression``);
- of a split of fewer than f samples nothing is shown;
- balanced accuracy, AUC and average precision rest on every class: they are shown only where each
  class has f samples;
- by class, only figures of classes whose count is shown;
- accuracy is shown where it leaves open how many of the hidden classes' samples are right: if none
  or one of them is right, or wrong, it is hidden, and so are the site's counts by certainty, whose
  sum is the same number.

Beside the floor, a page shows of a run at 'trust: nobody' only what such a hospital would send.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fedsilo.client_app.summary.suppression import at_least, secret_of, suppress
from fedsilo.models.contract.metric_names import CLASS, TRAINED_PREFIX, read_metric
from fedsilo.models.contract.settings import NOBODY
from fedsilo.models.contract.site_facts import SPLITS
from fedsilo.server_app.records.recorder import UPDATE
from fedsilo.server_app.records.summary import by_distribution, means
from fedsilo.server_app.studies.compare.results import Figures, last_figures
from fedsilo.server_app.studies.finished_run import Document, FinishedRun, Rows

_OVER_CLASSES = ("balanced-accuracy", "auc", "average-precision")
_OF_NOBODY = ("accuracy", "loss", "entropy")  # ``records.summary.BY_TRUST``
_OTHERS_MODELS = re.compile(r"^(trained|own)-|-from-.*$")
Counts = Sequence[int | None]


def rests_on_classes(metric: str) -> bool:
    """Return whether a metric, or a family of them, is of each class by itself."""
    return metric == CLASS or _OTHERS_MODELS.sub("", metric) in _OVER_CLASSES


class ShownRun(FinishedRun):
    """A finished run without what its pages must not show."""

    @cached_property
    def whole(self) -> FinishedRun:
        """All that the run directory has."""
        return FinishedRun(self.path)

    @cached_property
    def floor(self) -> int:
        """The fewest patients that a figure may rest on."""
        return self.settings.common.sums_min_count

    @cached_property
    def silos(self) -> Document:
        """``silos.json``; a hidden count is None."""
        return {
            site: {
                **facts,
                "sizes": {split: at_least(n, self.floor) for split, n in facts["sizes"].items()},
                "label_counts": {
                    split: self._counts(site, split) or [] for split in facts["label_counts"]
                },
                "dropped": at_least(facts["dropped"], self.floor),
            }
            for site, facts in self.whole.silos.items()
        }

    @cached_property
    def metrics(self) -> Rows:
        """The rows of ``metrics.csv`` that may be shown."""
        return [
            row
            for row in self.whole.metrics
            if self._shows(
                int(row["round"]), row["site"], row["split"], row["metric"], float(row["value"])
            )
        ]

    @property
    def sent(self) -> Rows:
        """The rows of ``metrics.csv`` that the sites sent, whatever is shown of their values.

        Norm and direction of an update are not: the server computes them.
        """
        private = self.settings.common.trust == NOBODY
        return [
            row
            for row in self.whole.metrics
            if row["split"] != UPDATE and (not private or row["metric"] in _OF_NOBODY)
        ]

    @cached_property
    def summary(self) -> Document:
        """``summary.json``; means are over the sites whose figure may be shown."""
        whole = self.whole.summary
        last = self._ends["val"]
        test, validation = self._of_summary(whole["sites"], "test"), self._of_summary(last, "val")
        return {
            **whole,
            "sites": test,
            **self._means(whole, whole["sites"], test),
            "validation": self._means(whole["validation"], last, validation),
        }

    @cached_property
    def withheld(self) -> list[str]:
        """Sites of whose test samples some figure is not shown because of the floor."""
        return [site for site in self.silos if self._find_hidden(site, "test") != frozenset()]

    def _of_summary(self, values: Figures, split: str) -> dict[str, dict[str, float]]:
        last = int(self.whole.summary["rounds"])
        return {
            site: {m: v for m, v in row.items() if self._shows(last, site, split, m, v)}
            for site, row in values.items()
        }

    def _means(self, recorded: Document, all_: Figures, shown: Figures) -> dict[str, Any]:
        """Return mean and distributions; those over sites that are all shown as recorded."""
        if shown == all_:
            return {key: recorded[key] for key in ("mean", "distributions")}
        groups = {site: str(facts["distribution"]) for site, facts in self.whole.silos.items()}
        return {"mean": means(shown), "distributions": by_distribution(shown, groups)}

    @cached_property
    def _by_split(self) -> dict[tuple[str, str], Counts | None]:
        """Site and split -> counts by class, hidden ones as None; None if there are too few."""
        found: dict[tuple[str, str], Counts | None] = {}
        for site, facts in self.whole.silos.items():
            # The same data hide the same classes in every run, by what no page shows
            secret = secret_of(json.dumps(facts["fingerprints"], sort_keys=True).encode())
            for split, counts in facts["label_counts"].items():
                enough = sum(counts) >= self.floor
                shown = suppress(counts, self.floor, secret, site, split) if enough else None
                found[site, split] = shown
        return found

    def _counts(self, site: str, split: str) -> Counts | None:
        """Return the shown counts; of too few samples all are hidden."""
        counts = self._by_split[site, split]
        return counts or [None] * len(self.whole.silos[site]["label_counts"][split])

    def _find_hidden(self, site: str, split: str) -> frozenset[int] | None:
        """Return the classes whose count is hidden, None if no figure of the split is shown."""
        if (site, split) not in self._by_split:
            return frozenset()  # no count came: what did is of several sites together
        counts = self._by_split[site, split]
        if counts is None:
            return None
        return frozenset(c for c, count in enumerate(counts) if count is None)

    def _shows(self, at: int, site: str, split: str, metric: str, value: float) -> bool:
        """Return whether a figure may be shown."""
        if split == UPDATE:
            return True  # norm and direction of a change of weights
        read = read_metric(metric.removeprefix(TRAINED_PREFIX))
        if read is None:
            return False  # an altered file: nobody knows on how many patients it rests
        name = _OTHERS_MODELS.sub("", metric)
        if self.settings.common.trust == NOBODY and metric not in _OF_NOBODY:
            return False
        hidden = self._find_hidden(site, split)
        if not hidden:
            return hidden is not None
        if read.is_of_family and read.word == CLASS:
            return int(read.place) not in hidden
        if name == "accuracy":
            return not self._gives_away(at, site, split, metric, value, hidden)
        if name in _OVER_CLASSES:
            return False
        if not read.is_of_family:
            return True
        # Counts by certainty, whose sum is the last round's accuracy
        last, right = self.whole.summary["rounds"], self._ends[split].get(site, {}).get("accuracy")
        return right is not None and self._shows(last, site, split, "accuracy", right)

    @cached_property
    def _ends(self) -> dict[str, dict[str, dict[str, float]]]:
        """Split -> site -> metric -> value of the last round, hidden ones too."""
        return {split: last_figures(self.whole, split) for split in SPLITS}

    def _gives_away(
        self, at: int, site: str, split: str, metric: str, value: float, hidden: frozenset[int]
    ) -> bool:
        """Return whether an accuracy says that all or none of the hidden classes are right."""
        counts = self.whole.silos[site]["label_counts"][split]
        right = round(value * sum(counts))
        left = [(right, sum(counts))]
        if metric == "accuracy" and at == self.whole.summary["rounds"]:
            shown = [c for c in range(len(counts)) if c not in hidden]
            ends = self._ends[split].get(site, {})
            found = [ends.get(f"{CLASS}.{c}.right") for c in shown]
            if shown and None not in found:
                of_hidden = right - sum(int(n or 0) for n in found)
                left.append((of_hidden, sum(counts[c] for c in hidden)))
        return any(min(r, n - r) <= 1 for r, n in left)
