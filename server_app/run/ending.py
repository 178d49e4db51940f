"""The end of a run: the model, the documents, summary.json, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.methods import title_of
from fedsilo.models.contract.one_line import listed
from fedsilo.models.contract.plugs import stated_digests
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.measures.outcome_counts import CLASS, CONFIDENCE, UNCERTAINTY
from fedsilo.server_app.records import summary as summaries
from fedsilo.server_app.records.best_round import write_model
from fedsilo.server_app.records.recorder import ALL, Recorder
from fedsilo.server_app.records.run_directory import (
    BEST,
    MODEL,
    STANDARDISATION,
    SUMMARY,
    Finish,
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
    finish: Finish | None,
) -> dict[str, Any]:
    """Write the model, privacy.json, the method's documents, pictures and, last, summary.json.

    An error of the documents, or of ``finish``, which draws, is raised when summary.json, which
    makes a run complete, is written.
    """
    state, method, recorder = loop.current(), loop.method, hooks.recorder
    pooled = method.participants.figures()
    if not write_model(directory, MODEL, method, state) and pooled:  # sites' own models need them
        statistics = {part: values.tolist() for part, values in vars(pooled).items()}
        directory.write_json(STANDARDISATION, statistics)
    test = recorder.values(state.round, "test")
    if evidence := evidence_document(test):
        directory.write_json("evidence.json", evidence)
    privacy = _privacy(method, hooks)
    directory.write_json("privacy.json", privacy)
    summary = {
        **_results(loop, recorder),
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
    try:
        for name, document in method.documents(state, test).items():
            directory.write_json(name, document)
        if finish:
            finish(directory, summary)
    except Exception:  # a document or picture that cannot be made costs no run
        directory.write_json(SUMMARY, summary)
        raise
    directory.write_json(SUMMARY, summary)
    return summary


def _privacy(method: Method, hooks: Hooks) -> dict[str, Any]:
    return summaries.privacy_document(
        method.common.method,
        method.common.trust,
        method.leaves(),
        hooks.recorder.totals(),
        hooks.privacy.guarantee(method.participants) if hooks.privacy else summaries.NO_PRIVACY,
        method.disclosures().noise,
    )


def _results(loop: RoundLoop, recorder: Recorder) -> dict[str, Any]:
    """Return a run's test and validation results, and what happened on the way."""
    state, method, common = loop.current(), loop.method, loop.method.common
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
        "published": None,  # what finishes a run may know of a paper's numbers
        "published-unlike": None,
        "stopped": loop.stopped or method.why_finished(state) or None,
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


_EVIDENCE = ("reliability.", "certainty.")
_MANY = (*_EVIDENCE, *(f"{family}." for family in (CLASS, CONFIDENCE, UNCERTAINTY)))


def without_bins(values: summaries.Values) -> dict[str, dict[str, float]]:
    """Return the measurements of each site without those per bin and class."""
    return {
        site: {name: value for name, value in row.items() if not name.startswith(_MANY)}
        for site, row in values.items()
    }


def evidence_document(values: summaries.Values) -> dict[str, Any]:
    """Return evidence.json: kind -> site -> bin -> count, right, mean; empty if none was sent."""
    document: dict[str, Any] = {}
    for site, row in values.items():
        for name, value in row.items():
            if name.startswith(_EVIDENCE):
                kind, place, part = name.split(".")
                sites = document.setdefault(kind, {}).setdefault(site, {})
                sites.setdefault(place, {})[part] = value
    return document
