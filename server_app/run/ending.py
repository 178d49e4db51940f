"""The end of a run: the model, summary.json, the documents, and the table on the terminal.

What a run is for comes first: the model, privacy.json, and summary.json, which makes it complete.
They need no name that a site has sent. Then come the documents, each by itself: one that cannot be
made is a line, whatever a site's metrics are. Pictures are drawn by whoever started the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.methods import title_of
from fedsilo.models.contract.metric_names import (
    BIN_FAMILIES,
    CERTAINTY,
    CLASS,
    RELIABILITY,
    read_bins,
    read_metric,
)
from fedsilo.models.contract.one_line import listed, reason_of, shortened
from fedsilo.models.contract.plugs import stated_digests
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.server_app.config.settings import read_run_config
from fedsilo.server_app.records import summary as summaries
from fedsilo.server_app.records.best_round import write_model
from fedsilo.server_app.records.published.numbers import published_numbers
from fedsilo.server_app.records.recorder import ALL, Recorder
from fedsilo.server_app.records.run_directory import (
    BEST,
    CONFIG,
    ENDING,
    MODEL,
    SILOS,
    STANDARDISATION,
    SUMMARY,
    RunDirectory,
)
from fedsilo.server_app.run.beginning import Hooks
from fedsilo.server_app.run.terminal import print_table, printer
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.round_loop import RoundLoop


def write_end(
    directory: RunDirectory,
    loop: RoundLoop,
    hooks: Hooks,
    seconds: Mapping[str, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the model, privacy.json and summary.json, then the documents; return the summary.

    Args:
        directory: the run's.
        loop: at its last state.
        hooks: the run's.
        seconds: how long the parts of the run took, by name.
        say: is told of a document that cannot be written.
    """
    state, method, recorder = loop.current(), loop.method, hooks.recorder
    pooled = method.participants.figures()
    if not write_model(directory, MODEL, method, state) and pooled:  # sites' own models need them
        statistics = {part: values.tolist() for part, values in vars(pooled).items()}
        directory.write_json(STANDARDISATION, statistics)
    privacy = _privacy(method, hooks)
    directory.write_json("privacy.json", privacy)
    summary = {
        **_results(directory, loop, recorder),
        **({"best": hooks.best.best} if hooks.best else {}),
        "seconds": {
            **{name: round(value, 3) for name, value in seconds.items()},
            "sites": {site: worked for site, (_, _, worked) in recorder.sites.items()},
        },
        "peak-memory-bytes": recorder.peak_memory,
        "unrepeatable-operations": sorted(recorder.unrepeatable),
        "bytes": recorder.totals(),
        "privacy": privacy,
    }
    ending = directory.path / ENDING
    ending.touch()  # a run that is killed from here on writes its documents once it is resumed
    directory.write_json(SUMMARY, summary)
    _write_documents(directory, loop, recorder, say)
    ending.unlink()
    return summary


def _write_documents(
    directory: RunDirectory, loop: RoundLoop, recorder: Recorder, say: Callable[[str], None]
) -> None:
    """Write evidence.json and the method's own documents, each by itself."""
    state, method = loop.current(), loop.method
    test = recorder.values(state.round, "test")
    documents: Mapping[str, Any] = {}
    with _apart("the method's documents", say):
        documents = method.documents(state, test)
    with _apart("evidence.json", say):
        # Only evidential networks have some
        evidence = evidence_document(test)
        if evidence:
            directory.write_json("evidence.json", evidence)
    for name, document in documents.items():
        with _apart(name, say):
            directory.write_json(name, document)


@contextmanager
def _apart(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say in a line why the block failed, if it did: the run has ended well without it."""
    try:
        yield
    except Exception as error:  # a method's own code, a full disk
        say(f"{what} cannot be written ({reason_of(error)}): the run is complete without")


def _privacy(method: Method, hooks: Hooks) -> dict[str, Any]:
    return summaries.privacy_document(
        method.common.method,
        method.common.trust,
        method.leaves(),
        hooks.recorder.totals(),
        hooks.privacy.guarantee(method.participants) if hooks.privacy else summaries.NO_PRIVACY,
        method.disclosures().noise,
    )


def _results(directory: RunDirectory, loop: RoundLoop, recorder: Recorder) -> dict[str, Any]:
    """Return a run's test and validation results, and what happened on the way."""
    state, method, common = loop.current(), loop.method, loop.method.common
    settings = read_run_config(directory.path / CONFIG).settings
    paper = published_numbers(settings, directory.read_json(SILOS))
    distribution_of = _distribution_of(method)
    test = without_bins(recorder.values(state.round, "test"))
    val = recorder.values(state.round, "val")
    return {
        "method": common.method,
        "title": title_of(common.method),
        "dataset": common.dataset,
        "seed": common.seed,
        "rounds": state.round,
        "aggregation": common.aggregation,
        "sites": {site: row for site, row in test.items() if site != ALL},
        "mean": summaries.means(test),
        "distributions": summaries.by_distribution(test, distribution_of),
        "validation": {
            "mean": summaries.means(val),
            "distributions": summaries.by_distribution(val, distribution_of),
        },
        "published": paper.numbers or None,
        "published-unlike": paper.unlike or None,
        # It may quote the errors of all sites, and readers take a line
        "stopped": shortened(loop.stopped or method.why_finished(state) or "", 1000) or None,
        "marks": method.marks(state),
        "failures": recorder.failures,
        **({"plugs": stated_digests(common.plugin_digests)} if common.plugin_digests else {}),
    }


def _distribution_of(method: Method) -> dict[str, str]:
    return {site: facts.distribution for site, facts in method.participants.facts.items()}


def show_end(
    directory: RunDirectory, method: Method, summary: Mapping[str, Any], console: Console
) -> None:
    """Print why the run stopped early, its table, the paper's numbers, and where it is."""
    say = printer(console)
    published, dataset = summary["published"], summary["dataset"]
    if summary["stopped"]:
        say(summary["stopped"])
    if values := summary["sites"]:
        title = f"{summary['title']} on {dataset}, round {summary['rounds']}"
        title += f", seed {summary['seed']}"
        shown, groups = data_set(dataset).headline, _distribution_of(method)
        table = summaries.result_table(values, groups, title, published, shown)
        print_table(console, table)
        floor = method.common.sums_min_count
        if "auc" in shown and (few := few_of_a_class(method.participants.facts, floor)):
            say(
                f"fewer than {floor} test samples of a class at {listed(few)}: balanced accuracy "
                "and AUC say little there, and reports do not show them"
            )
    elif mean := summary["mean"]:
        said = ", ".join(f"{metric} {value:.3f}" for metric, value in sorted(mean.items()))
        say(f"mean over the test samples of all sites: {said}")
    if published:
        say("published: the paper's own numbers, measured in its own setting")
    elif unlike := summary["published-unlike"]:
        say(f"no published numbers: the paper measured another setting; {unlike}")
    if summary.get("best") == {}:
        say(f"no site has reported validation {method.common.early_stopping_metric}: no best round")
    elif best := summary.get("best"):
        what = f"validation {best['metric']} {best['value']:.4f}"
        say(f"best round: {best['round']}, {what}{f', kept in {BEST}' if best['model'] else ''}")
    say(f"run directory: {directory.path}")


def few_of_a_class(facts: Mapping[str, SiteFacts], floor: int) -> list[str]:
    """Return the sites that have fewer than ``floor`` test samples of a class."""
    return [
        site for site, own in facts.items() if min(own.label_counts.get("test") or [floor]) < floor
    ]


def without_bins(values: summaries.Values) -> dict[str, dict[str, float]]:
    """Return the measurements of each site without those per bin and class."""
    kept: dict[str, dict[str, float]] = {}
    for site, row in values.items():
        kept[site] = {}
        for name, value in row.items():
            read = read_metric(name)
            if read and not (read.is_of_family and read.word in (CLASS, *BIN_FAMILIES)):
                kept[site][name] = value
    return kept


def evidence_document(values: summaries.Values) -> dict[str, Any]:
    """Return evidence.json: family -> site -> bin -> count, right, mean; empty if none was sent."""
    document: dict[str, Any] = {}
    for family in (RELIABILITY, CERTAINTY):
        for site, row in values.items():
            # A site without bins has no entry
            bins = read_bins(row, family)
            if bins:
                by_bin = {str(number): vars(counts) for number, counts in bins.items()}
                document.setdefault(family, {})[site] = by_bin
    return document
