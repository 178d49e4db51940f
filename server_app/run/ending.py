"""The end of a run: write the model, summary.json and the documents, and print the results.

The model, privacy.json and summary.json are written first, and summary.json makes the run complete.
The documents follow. Each document is written separately: if one fails, for example because of a
metric that a site sent, a line says so and the next one follows. The command that started the run
draws the pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fedsilo.core import metric_names
from fedsilo.core.methods import title_of
from fedsilo.core.one_line import abbreviate, reason_of
from fedsilo.core.plugins import stated_digests
from fedsilo.core.site_facts import SPLITS
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.core.versions import processor
from fedsilo.datasets.registry import shown_of
from fedsilo.server_app.records import run_directory
from fedsilo.server_app.records import summary as summaries
from fedsilo.server_app.records.checkpoints import BestRound, statistics_as_lists, write_model
from fedsilo.server_app.records.partial_means import (
    describe_hidden,
    describe_partial_means,
    find_hidden,
    sites_without,
)
from fedsilo.server_app.records.privacy_account import PrivacyHook
from fedsilo.server_app.records.progress_hook import ProgressHook
from fedsilo.server_app.records.recorder import ALL, Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.records.shown import Floors
from fedsilo.server_app.run.site_comparison import unlike_columns_document
from fedsilo.server_app.run.terminal import print_table, printer
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.round_loop import RoundLoop


@dataclass(frozen=True)
class RunHooks:
    """The hooks whose records are needed at the end of a run.

    ``privacy`` is None without differential privacy, and ``best`` is None without an early-stopping
    metric.
    """

    recorder: Recorder
    privacy: PrivacyHook | None
    progress: ProgressHook
    best: BestRound | None = None


def write_end(
    directory: RunDirectory,
    loop: RoundLoop,
    hooks: RunHooks,
    seconds: Mapping[str, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the final files of a run, and return the content of summary.json.

    The files are written in this order:

    - the model. Without a global model, standardisation.json is written instead, if the run has
      statistics that standardise the data,
    - privacy.json, the data that left the sites,
    - summary.json, the results and costs,
    - the documents: evidence.json and the method's own files.

    If a document cannot be built or written, ``say`` prints a line. Any other error is raised.
    Until the documents are written, a marker file shows that the run has not ended and can be
    resumed.

    Args:
        directory: the run directory.
        loop: the round loop, after its last round.
        hooks: the hooks of the run, which have its records.
        seconds: the duration of each part of the run in seconds, by the part's name.
        say: prints one line.
    """
    state, method, recorder = loop.state, loop.method, hooks.recorder
    pooled = method.participants.standardisation()
    has_model = write_model(directory, run_directory.MODEL, method, state)
    # A model's file has the statistics itself; without one, the sites' own models need them
    if not has_model and pooled:
        directory.write_json(run_directory.STANDARDISATION, statistics_as_lists(pooled))
    privacy = _build_privacy(method, hooks)
    directory.write_json("privacy.json", privacy)
    summary = _build_results(loop, recorder)
    if method.common.task != CLASSIFICATION:
        summary["task"] = method.common.task
    if hooks.best:
        summary["best"] = hooks.best.best
    summary["seconds"] = _build_seconds(seconds, recorder)
    summary["processor"] = processor()
    summary["peak-memory-bytes"] = recorder.peak_memory
    summary["unrepeatable-operations"] = sorted(recorder.unrepeatable)
    summary["bytes"] = recorder.totals()
    summary["privacy"] = privacy
    unlike = unlike_columns_document(method.participants, method.common)
    if unlike:
        summary["unlike-columns"] = unlike
    ending = directory.path / run_directory.ENDING
    # A run that is killed after this line writes its documents when it is resumed
    ending.touch()
    directory.write_json(run_directory.SUMMARY, summary)
    _write_documents(directory, loop, recorder, say)
    ending.unlink()
    return summary


def _build_seconds(parts: Mapping[str, float], recorder: Recorder) -> dict[str, Any]:
    """Build the entry 'seconds' of summary.json: how long the run and the sites have worked.

    Args:
        parts: the seconds of each part of the run, by the part's name, such as "rounds".
        recorder: has the working time of each site.

    Returns:
        Part of the run -> its seconds, rounded to three decimals. The entry "sites" has site -> its
        working seconds, as recorded.
    """
    seconds: dict[str, Any] = {}
    for name, value in parts.items():
        seconds[name] = round(value, 3)
    by_site = {}
    for site, (_, _, worked) in recorder.sites.items():
        by_site[site] = worked
    seconds["sites"] = by_site
    return seconds


def _write_documents(
    directory: RunDirectory, loop: RoundLoop, recorder: Recorder, say: Callable[[str], None]
) -> None:
    """Write evidence.json and the method's own documents at the end of a run.

    evidence.json shows how certain the test predictions of evidential networks are. It is written
    only if a site has reported such numbers. If one document cannot be written, ``say`` prints a
    line, and the remaining documents are still written. If ``method.documents`` fails, a line is
    printed, and none of the method's documents is written.
    """
    state, method = loop.state, loop.method
    test = recorder.values(state.round, "test")
    documents: Mapping[str, Any] = {}
    with _report_failure_of("the method's documents", say):
        documents = method.documents(state, test)
    with _report_failure_of("evidence.json", say):
        # Only evidential networks report evidence
        evidence = evidence_document(test)
        if evidence:
            directory.write_json("evidence.json", evidence)
    for name, document in documents.items():
        with _report_failure_of(name, say):
            directory.write_json(name, document)


@contextmanager
def _report_failure_of(document: str, say: Callable[[str], None]) -> Iterator[None]:
    """Run the ``with`` block that writes a document. If it fails, print the reason, and go on.

    Every Exception counts as a failure.

    Args:
        document: the name of the document, for the printed line.
        say: prints the line.
    """
    try:
        yield
    except Exception as error:  # a method's own code, a full disk
        say(f"cannot write {document} ({reason_of(error)}); the run is complete without it")


def _build_privacy(method: Method, hooks: RunHooks) -> dict[str, Any]:
    """Build the content of privacy.json: the data that left the sites, and how private the run is.

    The content has the sentences on the data, the bytes, the guarantee and the epsilon. Without
    differential privacy, the guarantee is a sentence that there is none. If the method adds noise
    without a guarantee, a description of the noise is added.
    """
    guarantee: str | dict[str, Any] = summaries.NO_PRIVACY
    if hooks.privacy:
        guarantee = hooks.privacy.guarantee(method.participants)
    return summaries.privacy_document(
        method.common.method,
        method.common.trust,
        method.task,
        method.leaves(),
        hooks.recorder.totals(),
        guarantee,
        method.disclosures().noise,
    )


def _build_results(loop: RoundLoop, recorder: Recorder) -> dict[str, Any]:
    """Build the part of summary.json that holds the results, including values that no page shows.

    The part has these entries:

    - the method, data set, seed, number of rounds and aggregation,
    - the final test metrics by site, without those for a single class, finding (one of several
      labels of a sample), outcome or bin,
    - the means of the final test and validation metrics, over all sites and by distribution (group
      of sites),
    - the reason why training ended early, or None,
    - the method's remarks by round, and the failures,
    - the digests of plugins, if the run used any.
    """
    state, method, common = loop.state, loop.method, loop.method.common
    distribution_of = _distributions_of(method)
    test = without_bins(recorder.values(state.round, "test"))
    val = recorder.values(state.round, "val")
    by_site = dict(test)
    by_site.pop(ALL, None)
    results = {
        "method": common.method,
        "title": title_of(common.method),
        "dataset": common.dataset,
        "seed": common.seed,
        "rounds": state.round,
        "aggregation": common.aggregation,
        "sites": by_site,
        "mean": summaries.means(test),
        "distributions": summaries.by_distribution(test, distribution_of),
        "validation": {
            "mean": summaries.means(val),
            "distributions": summaries.by_distribution(val, distribution_of),
        },
        # The text may quote the errors of all sites, so it is cut to a readable length
        "stopped": abbreviate(loop.stopped or method.why_finished(state) or "", 1000) or None,
        "marks": method.marks(state),
        "failures": recorder.failures.in_summary(),
    }
    if common.plugin_digests:
        results["plugs"] = stated_digests(common.plugin_digests)
    return results


def _distributions_of(method: Method) -> dict[str, str]:
    return {site: facts.distribution for site, facts in method.participants.facts.items()}


def show_end(
    directory: RunDirectory,
    method: Method,
    recorder: Recorder,
    summary: Mapping[str, Any],
    console: Console,
) -> None:
    """Print why training ended early, the test results, the best round and the run directory.

    If ``summary`` has only means over sites, one line of means replaces the table. If early
    stopping found no best round, a line says so. An entry that is empty or missing in ``summary``
    gets no line.

    Args:
        directory: the run directory, whose path the last line names.
        method: the run's method, for its settings and the sites' facts.
        recorder: has the metrics of the last round, which help to decide what must be hidden.
        summary: the content of summary.json.
        console: prints the lines.
    """
    say = printer(console)
    if summary["stopped"]:
        say(summary["stopped"])
    if summary["sites"]:
        _show_table(method, floors_of(method, recorder, summary["rounds"]), summary, console)
    # A run at trust 'sums' knows only the mean
    elif summary["mean"]:
        say(summaries.mean_line(summary["mean"]))
    best = summary.get("best")
    if best == {}:
        metric = method.common.early_stopping_metric
        say(f"no best round, because no site reported validation {metric}")
    elif best:
        line = f"best round: {best['round']}, validation {best['metric']} {best['value']:.4f}"
        if best["model"]:
            line += f", kept in {run_directory.BEST}"
        say(line)
    say(f"run directory: {directory.path}")


def floors_of(method: Method, recorder: Recorder, rounds: int) -> Floors:
    """Return the rules on what may be shown of a run whose last round is ``rounds``."""
    last = {split: recorder.values(rounds, split) for split in SPLITS}
    silos = run_directory.silos_document(method.participants)
    return Floors(method.common, silos, rounds, last)


def _show_table(
    method: Method, floors: Floors, summary: Mapping[str, Any], console: Console
) -> None:
    """Print the table of test results, with only the metrics that may be shown.

    Lines below the table name the metrics that are hidden at a site, and the sites that a mean
    leaves out. If a metric is hidden, a last line says that metrics.csv has all values.

    Args:
        method: the run's method, for its settings and sites.
        floors: decides which metrics may be shown.
        summary: the content of summary.json, with all values.
        console: prints the table and the lines.
    """
    headline, groups = shown_of(summary), _distributions_of(method)
    sites = floors.shown_summary(summary)["sites"]
    title = summaries.title_of_results(summary)
    hidden = find_hidden(summary["sites"], sites, headline)
    print_table(console, summaries.result_table(sites, groups, title, headline, hidden))
    names = list(method.participants.facts)
    over = {
        "dataset": summary["dataset"],
        "lacking": sites_without(sites, names),
        "site_count": len(names),
    }
    say = printer(console)
    lines = describe_partial_means([over], headline)
    lines += describe_hidden(hidden, method.common)
    for line in lines:
        say(line)
    if hidden:
        say(
            "metrics.csv has all values, for yourself; for data without patients set "
            "'privacy.sums-min-count' to 1"
        )


# Families of metrics by class, finding or bin, of which a mean over sites says nothing
_OF_PARTS = (
    *(metric_names.CLASS, metric_names.FINDING, metric_names.OUTCOME),
    *metric_names.BIN_FAMILIES,
)


def without_bins(values: summaries.Values) -> dict[str, dict[str, float]]:
    """Return each site's metrics without those that describe only a part of its samples.

    Such a part is a class, a finding (one of several labels of a sample), an outcome or a bin. The
    mean of such a metric over sites says little. Metrics of other sites' models are kept, and
    metrics with an invalid name are left out. A site is kept even if none of its metrics remain.

    Args:
        values: site -> metric -> value.
    """
    rest: dict[str, dict[str, float]] = {}
    for site, row in values.items():
        rest[site] = {}
        for name, value in row.items():
            read = metric_names.read_metric(name)
            if read is None:
                continue
            if not (read.part and read.word in _OF_PARTS):
                rest[site][name] = value
    return rest


def evidence_document(values: summaries.Values) -> dict[str, Any]:
    """Build evidence.json, which counts the test predictions of evidential networks in bins.

    A bin has the predictions whose score is in one of ten ranges from 0 to 1. The sites have
    counted them. ``values`` has the counts as metrics such as ``reliability.0.count``. The family
    "reliability" has bins of the largest class probability. The family "certainty" has bins of the
    vacuity, which is high if the network has little evidence. A family has only the sites with bins
    in it. A family without any site is left out, so the document may be empty.

    Args:
        values: site -> metric -> value, on the test samples.

    Returns:
        Family -> site -> number of the bin -> "count" (all predictions in the bin), "right" (how
        many of them are correct) and "mean" (the mean score of all).
    """
    document: dict[str, Any] = {}
    for family in (metric_names.RELIABILITY, metric_names.CERTAINTY):
        for site, row in values.items():
            # A site without bins is left out
            bins = metric_names.read_bins(row, family)
            if not bins:
                continue
            by_bin = {}
            for number, counts in bins.items():
                by_bin[str(number)] = vars(counts)
            document.setdefault(family, {})[site] = by_bin
    return document
