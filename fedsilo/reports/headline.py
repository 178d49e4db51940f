"""The head of a report: what the run is, its result in one sentence, and its main limit."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedsilo.core.one_line import counted
from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS
from fedsilo.core.versions import FEDSILO
from fedsilo.datasets.registry import data_set
from fedsilo.models.measures.intervals import wilson
from fedsilo.pages.number_texts import percent
from fedsilo.runs.finished_run import Shown
from fedsilo.server_app.records.progress import read_progress

_UNTOLD: Mapping[str, str] = {
    SUMS: (
        "At 'trust: sums' the server learns sums over the sites alone: the page has no metric of a "
        "single site, and no AUC, sensitivity, specificity, calibration, sample count or "
        "fingerprint."
    ),
    NOBODY: (
        "At 'trust: nobody' a hospital sends accuracy, loss and entropy with noise, and nothing "
        "else about its patients: the page has no AUC, sensitivity, specificity, calibration or "
        "fingerprint."
    ),
}


def head_of(run: Shown) -> dict[str, Any]:
    """Build the template variables of ``head.html`` for a run."""
    return {"name": run.name, "facts": facts(run), "result": result(run), "limit": limit(run)}


def facts(run: Shown) -> list[tuple[str, str]]:
    """Return the facts of a run, such as its method and rounds, as pairs (name, value)."""
    summary = run.summary
    done, asked = summary["rounds"], run.settings.common.rounds
    rounds = counted(done, "round") + (f" of at most {asked}" if done != asked else "")
    progress = read_progress(run.path)
    environment = run.config.environment
    revision = str(environment.get("fedsilo-revision", "unknown"))[:12]
    written = f"{progress.updated:%Y-%m-%d %H:%M} UTC" if progress else "not recorded"
    # A site is known again by the first digits of a SHA-256 over the digests of its splits
    fingerprints = []
    for site, known in run.silos.items():
        if found := known["fingerprints"]:
            joined = "".join(f"{split}{found[split]}" for split in sorted(found))
            digest = hashlib.sha256(joined.encode()).hexdigest()
            fingerprints.append(f"{site} {digest[:12]}")
    return [
        ("predicts", f"which of: {', '.join(run.class_names()) or 'classes without names'}"),
        ("for whom", f"{run.noun(2)} like those of {', '.join(run.silos)}"),
        ("data", _data(str(summary["dataset"]))),
        ("hospitals", f"{len(run.silos)}{', simulated in one place' if run.is_simulated else ''}"),
        ("method", f"{summary['title']} ({summary['method']}), {rounds}"),
        ("trained", f"{written}, seed {summary['seed']}"),
        ("version", f"fedsilo {FEDSILO}, git revision of the run {revision}"),
        ("data fingerprints", ", ".join(fingerprints) or f"none at 'trust: {run.trust}'"),
    ]


def _data(name: str) -> str:
    data = data_set(name)
    if data.licence:
        terms = f", {data.licence.terms}" if data.licence.terms else ""
        return f"{name} (public, {data.licence.licence}{terms})"
    whose = "made up by fedsilo" if data.origin == "made-up" else "the hospitals' own"
    return f"{name} ({whose})"


def result(run: Shown, site: str | None = None) -> str:
    """Return the result in one sentence, with its interval where there is one.

    It is of the own model of ``site``; without one of all sites' test samples.
    """
    if tested := _count_tested(run, site):
        samples = sum(n for n, _ in tested.values())
        found = sum(round(accuracy * n) for n, accuracy in tested.values())
        right = min(max(found, 0), samples)
        around = wilson(right, samples)
        return (
            f"Predictions are right for {right:,} of {samples:,} test {run.noun(samples)} of "
            f"{counted(len(tested), 'hospital')}: {percent(right / samples)} (95 % interval "
            f"{percent(around.low)} to {percent(around.high)})"
            f"{_beside_guessing(run, list(tested))}.{_noise(run)}"
        )
    if site is None and (accuracy := run.summary["mean"].get("accuracy")) is not None:
        return (
            f"Predictions are right for {percent(accuracy)} of the test {run.noun(2)}; how many "
            "they are did not leave the hospitals, so there is no interval."
        )
    return f"No accuracy on test data may be shown for {f'site {site}' if site else 'this run'}."


def _noise(run: Shown) -> str:
    if run.trust != NOBODY:
        return ""
    if run.is_simulated:
        return " The sites were simulated: hospitals would add noise to it."
    return " It includes the hospitals' noise; the interval does not."


def _count_tested(run: Shown, only: str | None) -> dict[str, tuple[int, float]]:
    """Return the number of test samples and the accuracy of each site that shows both."""
    return {
        site: (samples, metrics["accuracy"])
        for site, known in run.silos.items()
        if only in (None, site)
        and (samples := known["sizes"].get("test"))
        and "accuracy" in (metrics := run.summary["sites"].get(site, {}))
    }


def _beside_guessing(run: Shown, sites: Sequence[str]) -> str:
    """Return the accuracy of always predicting one class at these sites, if it may be shown."""
    counts = [run.silos[site]["label_counts"].get("test", []) for site in sites]
    if run.trust == NOBODY or not all(counts) or any(None in row for row in counts):
        return ""
    totals = [sum(column) for column in zip(*counts, strict=True)]
    most = max(totals)
    name = run.class_names()[totals.index(most)]
    return f"; '{name}' for everybody would be right for {percent(most / sum(totals))}"


def limit(run: Shown, site: str | None = None) -> str:
    """Return the main limit of what ``result`` says in one sentence."""
    if data_set(str(run.summary["dataset"])).origin == "made-up":
        return "The data are made up: the result says nothing about patients."
    if run.trust != SERVER:
        return _UNTOLD[run.trust]
    if not (run.whole or run).summary["sites"]:
        return f"No hospital measured it on test {run.noun(2)}."
    tested = _count_tested(run, site)
    start = "It was measured only at the hospitals that trained it"
    if not tested:
        return f"{start}, on too few {run.noun(2)} to show a metric of one hospital."
    smallest = min(tested, key=lambda name: tested[name][0])
    n, accuracy = tested[smallest]
    around = wilson(round(accuracy * n), n)
    return (
        f"{start}, and {smallest} has {n} test {run.noun(n)}, for whom the true share may be "
        f"anywhere from {percent(around.low)} to {percent(around.high)}."
    )
