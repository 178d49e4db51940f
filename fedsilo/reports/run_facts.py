"""The parts that all reports share: names of runs, facts, result and limit, and sites."""

import hashlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS
from fedsilo.core.settings_schema import Value
from fedsilo.core.tasks import SURVIVAL
from fedsilo.core.versions import FEDSILO
from fedsilo.datasets.registry import data_set
from fedsilo.models.measures.intervals import wilson
from fedsilo.models.tasks.task import task_class, task_named
from fedsilo.pages.page import hide_small_count, percent
from fedsilo.runs.finished_run import FinishedRun, Shown
from fedsilo.server_app.records.progress import read_progress
from fedsilo.server_app.records.run_directory import CONFIG

_SEEDS = ("seed", "split.fold-seed")
_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
_MANY_CLASSES = 8  # a table of more columns cannot be read


def reported_runs(folders: Sequence[Path]) -> list[Shown]:
    """Open the finished runs in ``folders`` and directly below them, and name them for a page.

    Metrics and counts of too few patients are hidden. A run that is found twice is opened once.
    Several runs get unique names from the last parts of their paths.

    Runs that differ only in their seeds form an experiment. Its name is their folders' name without
    an ending such as ``-seed0``. If runs with this name differ in more, each is an experiment by
    itself.

    Raises:
        RunDirectoryError: a folder does not contain a run, a run has not ended, or another version
            of fedsilo wrote it.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        for path in _run_directories(folder):
            place = path.resolve()
            if place not in runs:  # a run may be in two folders, or named by a link
                runs[place] = FinishedRun.open(path)
    # The name of a single run does not need a path
    if len(runs) == 1:
        return [run.shown() for run in runs.values()]
    # The folder's name without its seed groups the runs of one experiment
    same_name: dict[str, list[FinishedRun]] = {}
    for run in runs.values():
        same_name.setdefault(run.experiment, []).append(run)
    shown = []
    for name, run in zip(_unique_names(list(runs)), runs.values(), strict=True):
        # Runs of one name with other settings are experiments of their own
        experiment = name
        if _differ_by_seed(same_name[run.experiment]):
            experiment = run.experiment
        shown.append(run.shown(name, experiment))
    return shown


def _run_directories(folder: Path) -> list[Path]:
    """Find the run directories: the folder itself, then those directly inside it, sorted.

    A run directory is recognised by its config.toml.

    Raises:
        RunDirectoryError: no run directory was found.
    """
    candidates = [folder]
    if folder.is_dir():
        candidates += sorted(folder.iterdir())
    found = []
    for path in candidates:
        if (path / CONFIG).is_file():
            found.append(path)
    if not found:
        raise RunDirectoryError(
            f"{folder} is not a run directory and does not contain one: name another folder"
        )
    return found


def experiments_of(runs: Sequence[Shown]) -> dict[str, dict[int, Shown]]:
    """Group runs by experiment and seed: experiment -> seed -> run.

    If several runs of an experiment have the same seed, only the last of them is kept.
    """
    experiments: dict[str, dict[int, Shown]] = {}
    for run in runs:
        experiments.setdefault(run.experiment, {})[run.summary["seed"]] = run
    return experiments


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Choose a unique name for each folder, made of the last parts of its path.

    All names have the same number of parts, which is the smallest that makes them unique.
    """
    deepest = max(len(path.parts) for path in paths)
    # One more parent for all names, until no two are equal
    for depth in range(1, deepest):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


def _differ_by_seed(runs: Sequence[FinishedRun]) -> bool:
    """Tell whether all runs have different seeds, but otherwise the same settings."""
    first = _settings_without_seeds(runs[0])
    seeds = set()
    for run in runs:
        if _settings_without_seeds(run) != first:
            return False
        seeds.add(run.summary["seed"])
    return len(seeds) == len(runs)


def _settings_without_seeds(run: FinishedRun) -> dict[str, Any]:
    """Return the settings that decide the result, by key, without the two seeds."""
    settings: dict[str, Any] = dict(run.settings.decisive())
    for key in _SEEDS:
        settings.pop(key, None)
    return settings


def value_text(value: Value) -> str:
    """Return a setting's value as pages show it: ``true``, ``0.5``, ``(empty)``."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "(empty)"


def taking_part(run: Shown) -> dict[str, Any]:
    """Build the template variables of ``sites.html``: the sites, their data and their failures.

    ``sizes`` has a row per site with its number of samples in each split and, at trust level
    ``server``, the number that it left out. ``by_class`` has a row per site with its number of test
    samples in each class. It is empty if there are more than eight classes. Numbers below ``floor``
    are too small to be shown, and are hidden. ``failed`` lists the messages that sites failed to
    answer, with the reasons.
    """
    splits, columns = [], []
    for split in _SPLIT_NAMES:
        if any(facts["sizes"].get(split) for facts in run.silos.values()):
            splits.append(split)
            columns.append(_SPLIT_NAMES[split])
    # Sites report how many samples they left out only at this level of trust
    reports_dropped = run.trust == SERVER
    if reports_dropped:
        columns.append("left out")
    sizes, by_class = [], []
    for site, facts in run.silos.items():
        # A site without the split has None, too, so the page does not reveal its absence
        numbers = [facts["sizes"].get(split) for split in splits]
        if reports_dropped:
            numbers.append(facts["dropped"])
        if splits:
            sizes.append([site, *_hide_small(numbers, run.floor)])
        counts = facts["label_counts"].get("test")
        names = run.stratum_names()
        if counts and names and "test" in splits and len(names) <= _MANY_CLASSES:
            by_class.append([site, *_hide_small(counts, run.floor)])
    failed = []
    for failure in run.summary["failures"]:
        round_ = str(failure["round"])
        failed.append([round_, failure["phase"], failure["site"], failure["reason"]])
    return {
        "name": run.name,
        "site_count": format_count(len(run.silos), "site"),
        "simulated": run.is_simulated,
        "noun": run.noun(2),
        "floor": run.floor,
        "splits": columns,
        "sizes": sizes,
        "class_names": run.stratum_names(),
        "groups_by": "outcome" if run.task == SURVIVAL else "class",
        "by_class": by_class,
        "stopped": run.summary["stopped"],
        "failed": failed,
        "unlike": _unlike_columns(run),
    }


def _unlike_columns(run: Shown) -> list[str]:
    """Describe the columns whose mean at one site is unlike the mean at the other sites.

    The run's summary decides which columns these are. For each column and site, a text says how the
    means differ, and asks a question, such as one about the unit. The list is empty unless the
    trust level is ``server``, because otherwise the server does not know the means.
    """
    entries = run.summary.get("unlike-columns") or []
    if not entries or run.trust != SERVER:
        return []
    sentences = []
    for entry in entries:
        question = f"{entry['question'][:1].upper()}{entry['question'][1:]}"
        sentences.append(
            f"{entry['title']}: the mean at {entry['site']} is {entry['relation']} that of the "
            f"other sites. {question}"
        )
    return sentences


def _hide_small(counts: Sequence[int | None], floor: int) -> list[str]:
    """Format a site's counts. A hidden count (None) becomes ``< 10`` if ``floor`` is 10."""
    return [hide_small_count(count, floor) for count in counts]


_UNTOLD: Mapping[str, str] = {
    SUMS: (
        "At 'trust: sums' the server learns only sums over the sites: the page has no metric of a "
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
    """List facts about a run for the head of a page, as pairs (name, text).

    The first facts are the predicted outcome, the patients or images that the model is for, the
    data set, and the number of hospitals. The method with its rounds follows. The next fact gives
    the end of training and the seed. The last facts are fedsilo's version and a fingerprint of each
    site's data.
    """
    summary = run.summary
    hospitals = str(len(run.silos))
    if run.is_simulated:
        hospitals += ", simulated in one place"
    rounds = format_count(summary["rounds"], "round")
    if summary["rounds"] != run.settings.common.rounds:
        rounds += f" of at most {run.settings.common.rounds}"
    written = "not recorded"
    progress = read_progress(run.path)
    if progress:
        written = f"{progress.updated:%Y-%m-%d %H:%M} UTC"
    revision = str(run.config.environment.get("fedsilo-revision", "unknown"))[:12]
    return [
        ("predicts", task_named(run.task).describe(run.class_names())),
        ("for whom", f"{run.noun(2)} like those of {', '.join(run.silos)}"),
        ("data", _data(str(summary["dataset"]))),
        ("hospitals", hospitals),
        ("method", f"{summary['title']} ({summary['method']}), {rounds}"),
        ("trained", f"{written}, seed {summary['seed']}"),
        ("version", f"fedsilo {FEDSILO}, git revision of the run {revision}"),
        ("data fingerprints", _fingerprints(run) or f"none at 'trust: {run.trust}'"),
    ]


def _fingerprints(run: Shown) -> str:
    """Format a short digest of each site's data, so that a reader can recognise equal data.

    The text lists the sites, each with the first 12 hexadecimal digits of a SHA-256. The SHA-256
    covers the names and the fingerprints of the site's splits. Sites without fingerprints are left
    out, so the text may be empty.
    """
    texts = []
    for site, known in run.silos.items():
        of_splits = known["fingerprints"]
        if of_splits:
            joined = ""
            # Sorted, because the order in the file does not depend on the data
            for split in sorted(of_splits):
                joined += f"{split}{of_splits[split]}"
            digest = hashlib.sha256(joined.encode()).hexdigest()
            texts.append(f"{site} {digest[:12]}")
    return ", ".join(texts)


def _data(name: str) -> str:
    """Describe a data set in a few words: its name, and where its data come from.

    The text for public data gives the licence. Other data are "made up by fedsilo" or "the
    hospitals' own".
    """
    data = data_set(name)
    if data.licence:
        terms = ""
        if data.licence.terms:
            terms = f", {data.licence.terms}"
        return f"{name} (public, {data.licence.licence}{terms})"
    if data.origin == "made-up":
        return f"{name} (made up by fedsilo)"
    return f"{name} (the hospitals' own)"


class TaskParts(Protocol):
    """The parts of a report that a task other than classification writes itself.

    A module of ``fedsilo/reports/tasks`` has these functions.
    """

    def result(self, run: Shown, site: str | None) -> str:
        """Summarise the result on test samples in one sentence."""

    def limit(self, run: Shown, site: str | None) -> str:
        """Describe the result's main limit in one sentence."""

    def meaning(self, run: Shown) -> str:
        """Explain the task's metrics to a reader who does not know them."""

    def sections(self, run: Shown) -> Sequence[Any]:
        """Return the task's sections of the clinic's report, each an ``Examination``."""


def task_parts(task: str) -> TaskParts | None:
    """Import the module that writes the task's parts of a report.

    The module writes the sentences on the main result and its limitation, an explanation of the
    metrics, and the sections for the clinic. The result is None if the task has no such module,
    which is the case for classification.
    """
    place = task_class(task).report
    if not place:
        return None
    return cast(TaskParts, import_module(place))


def result(run: Shown, site: str | None = None) -> str:
    """Describe the main result of a run in a sentence.

    If the task has a module for its parts of reports, the module writes the sentence. For any other
    task, the sentence is about the accuracy on test samples:

    1. If sample counts may be shown, it gives the accuracy with a 95 % interval.
    2. Otherwise, for all sites, it gives the mean of the sites' accuracies without an interval.
    3. If neither is possible, it says that no accuracy may be shown.

    ``site`` is the only site that counts; None for all sites.
    """
    parts = task_parts(run.task)
    if parts:
        return parts.result(run, site)
    tested = _count_tested(run, site)
    if tested:
        return _result_of_counts(run, tested, site)
    accuracy = run.summary["mean"].get("accuracy")
    if site is None and accuracy is not None:
        return (
            f"Predictions are right for {percent(accuracy)} of the test {run.noun(2)}; how many "
            "they are did not leave the hospitals, so there is no interval."
        )
    if site:
        return f"No accuracy on test data may be shown for site {site}."
    return "No accuracy on test data may be shown for this run."


def _result_of_counts(run: Shown, tested: Mapping[str, tuple[int, float]], only: str | None) -> str:
    """Describe the accuracy over all test samples of the given sites.

    The sentence gives the number of right predictions, and the accuracy with its 95 % Wilson
    interval. The number is computed from each site's accuracy. The accuracy of always guessing the
    most frequent class follows if it is known. At trust level ``nobody``, a second sentence is
    about the noise that hospitals add to the accuracy.

    Args:
        run: the run.
        tested: site -> its number of test samples and its accuracy.
        only: the name of the site if the text is about a single one; None for all sites. A text
            about all sites says how many of them it covers if some are missing.
    """
    samples = right = 0
    for n, accuracy in tested.values():
        samples += n
        right += round(accuracy * n)
    hospitals = format_count(len(tested), "hospital")
    # A reader of all sites' result must know that some are missing
    if only is None and len(tested) < len(run.silos):
        hospitals = f"{len(tested)} of {format_count(len(run.silos), 'hospital')}"
    right = min(max(right, 0), samples)  # the hospitals' noise may move it out of the range
    interval = wilson(right, samples)
    noise = ""
    if run.trust == NOBODY:
        noise = " It includes the hospitals' noise; the interval does not."
        if run.is_simulated:
            noise = " The sites were simulated: hospitals would add noise to it."
    return (
        f"Predictions are right for {right:,} of {samples:,} test {run.noun(samples)} of "
        f"{hospitals}: {percent(right / samples)} (95 % interval "
        f"{percent(interval.low)} to {percent(interval.high)})"
        f"{_beside_guessing(run, list(tested))}.{noise}"
    )


def _count_tested(run: Shown, only: str | None) -> dict[str, tuple[int, float]]:
    """Collect the sites whose accuracy and number of test samples are both known and shown.

    A site without test samples is left out.

    Args:
        run: the run, in which numbers that must not be shown are None or missing.
        only: the name of the one site to look at; None for all sites.

    Returns:
        Site -> (number of test samples, accuracy).
    """
    tested = {}
    for site, known in run.silos.items():
        samples = known["sizes"].get("test")
        accuracy = run.summary["sites"].get(site, {}).get("accuracy")
        # A hidden number of samples is None, and a site without test samples has 0
        if only in (None, site) and samples and accuracy is not None:
            tested[site] = (samples, accuracy)
    return tested


def _beside_guessing(run: Shown, sites: Sequence[str]) -> str:
    """Describe the accuracy of always predicting the most frequent class, for comparison.

    The most frequent class is the one with the most test samples over all ``sites``, the first in a
    tie. The phrase begins with a semicolon, because it continues a sentence. It is empty if a count
    of any site is hidden or not reported. It is also empty at trust level ``nobody``, because all
    counts have noise there.
    """
    if run.trust == NOBODY:  # label counts have noise
        return ""
    counts = []
    for site in sites:
        of_site = run.silos[site]["label_counts"].get("test", [])
        if not of_site or None in of_site:  # not reported, or a hidden count
            return ""
        counts.append(of_site)
    # The most frequent class over all these sites
    totals = list(map(sum, zip(*counts, strict=True)))
    most = max(totals)
    name = run.class_names()[totals.index(most)]
    return f"; '{name}' for everybody would be right for {percent(most / sum(totals))}"


def limit(run: Shown, site: str | None = None) -> str:
    """Describe the main limitation of a run's result in one sentence.

    The first case that applies decides the sentence:

    1. The data are made up: the result says nothing about patients.
    2. The trust level is ``server``, but no site has test metrics: no hospital measured the model.
    3. The task has a module for its parts of reports: the module writes the sentence.
    4. The trust level is not ``server``: the page lacks metrics of single sites.
    5. No site has enough test samples: no metric of a single site is shown.
    6. Any other run: the accuracy at the site with the fewest test samples has a wide interval.

    Args:
        run: the run.
        site: the site that the result is about; None for all sites. Only case 3 may depend on it.
    """
    if data_set(str(run.summary["dataset"])).origin == "made-up":
        return "The data are made up: the result says nothing about patients."
    parts = task_parts(run.task)
    if run.trust != SERVER:
        return parts.limit(run, site) if parts else _UNTOLD[run.trust]
    # Only the whole run tells a metric that was not measured from one that is hidden
    if not (run.whole or run).summary["sites"]:
        return f"No hospital measured it on test {run.noun(2)}."
    if parts:
        return parts.limit(run, site)
    tested = _count_tested(run, site)
    start = "It was measured only at the hospitals that trained it"
    if not tested:
        return f"{start}, on too few {run.noun(2)} to show a metric of one hospital."
    # Fewest test samples means the widest interval
    smallest = min(tested, key=lambda name: tested[name][0])
    samples, accuracy = tested[smallest]
    interval = wilson(min(max(round(accuracy * samples), 0), samples), samples)
    return (
        f"{start}, and {smallest} has {samples} test {run.noun(samples)}, for whom the true share "
        f"may be anywhere from {percent(interval.low)} to {percent(interval.high)}."
    )
