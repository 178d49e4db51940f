"""``model-card.md``: a model card filled from the run directory, in Hugging Face's format.

Its sections follow Mitchell et al. (Model Cards for Model Reporting, FAT* 2019).

Facts that only a person knows, such as the intended use and the licence, are marked as open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedsilo.core.one_line import (
    Markdown,
    as_markdown,
    markdown_code,
    markdown_text,
)
from fedsilo.core.settings.common_settings import SERVER, CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, SEGMENTATION, SURVIVAL
from fedsilo.datasets.registry import data_set
from fedsilo.models.measures.intervals import Estimate, Interval, of_auc, wilson
from fedsilo.models.tasks.task import task_class, task_named
from fedsilo.pages.page import NONE, at_most, environment, hide_small_count, with_interval
from fedsilo.reports.clinic import class_outcomes, final_metrics
from fedsilo.reports.run_facts import facts as facts_of
from fedsilo.reports.run_facts import limit, result, task_parts
from fedsilo.runs.finished_run import FinishedRun, Shown
from fedsilo.server_app.config.settings import CIRCUMSTANCES

# Usage instructions for each export format
_USAGE = Path(__file__).parent / "templates" / "usage.yaml"
_FEW = 100  # the card warns of wide intervals below this number of test samples
_SPLITS = ("train", "val", "test")
_SHOWN = ("accuracy", "balanced-accuracy", "auc", "average-precision", "calibration-error", "loss")
_PIPELINES = {  # Hugging Face's name of a task, for tables and for images
    CLASSIFICATION: ("tabular-classification", "image-classification"),
    REGRESSION: ("tabular-regression", "image-feature-extraction"),
    MULTI_LABEL: ("tabular-classification", "image-classification"),
    SEGMENTATION: ("image-segmentation", "image-segmentation"),
    SURVIVAL: ("tabular-regression", "image-feature-extraction"),
}


def card_text(
    whole: FinishedRun, site: str | None, form: str = "", facts: Mapping[str, str] = {}
) -> str:
    """Build a run's model card, a Markdown text about the model, its data, results and limits.

    The card leaves out every metric that rests on fewer patients than the run allows. Texts from
    the run directory are escaped.

    Args:
        whole: the finished run.
        site: the site whose metrics the card shows; None for all sites.
        form: the format of an exported program ('pt2' or 'onnx'). The card then explains how to use
            the program. Empty if nothing was exported.
        facts: name -> value of further facts about the exported file, such as the SHA-256 of its
            weights.
    """
    # shown() removes metrics of too few patients, so the card cannot show them
    templates = environment("fedsilo.inference.export", html=False)
    run = whole.shown()
    sites = list(run.silos)
    if site:
        sites = [site]
    metrics = _choose_metrics(run, sites)
    usage = ""
    if form:
        usage = Markdown(yaml.safe_load(_USAGE.read_text())[form])
    data: dict[str, Any] = {
        "front_matter": Markdown(_front_matter(run, sites)),
        "name": run.path.resolve().name,
        "summary": run.summary,
        "silos": run.silos,
        "site": site,
        "terms": _terms_of(run.summary["dataset"]),
        "facts_of": dict(facts_of(run)),
        "result": result(run, site),
        "limit": limit(run, site),
        "floor": run.floor,
        "sizes": _size_rows(run),
        "by_class": _class_rows(run, sites),
        "classes": run.class_names() or ["without names"],
        "predicts": task_named(run.task).describe(run.class_names()),
        "has_classes": not task_class(run.task).report,
        "meaning": _meaning(run, metrics),
        "metrics": metrics,
        "values": [_metric_row(run, name, metrics) for name in sites],
        "epsilon": Markdown(_epsilon(run.summary["privacy"]["guarantee"])),
        "few": _sites_with_few_tests(run, sites),
        "form": form,
        "usage": usage,
        "facts": {name: markdown_code(value) for name, value in facts.items()},
        "settings": _changed_settings(run),
    }
    # The texts come from the run directory, so none of them may act as markup in the card
    return templates.get_template("model-card.md.j2").render(as_markdown(data))


def _meaning(run: Shown, metrics: Sequence[str]) -> str:
    """Explain the metrics on the card, unless the task is classification.

    For classification, the text is empty. For any other task, it says what the metrics mean, and
    that they have no interval. If ``metrics`` is empty, it says only that no metric is shown.
    """
    parts = task_parts(run.task)
    if not parts:
        return ""
    if not metrics:
        return "No metric of a single site is shown."
    return (
        f"{parts.meaning(run)} The metrics have no interval, and would differ with another seed, "
        "another split of the rows or at another hospital."
    )


def _size(known: Mapping[str, Any], split: str) -> int:
    """Return the number of a site's samples in a split; 0 if it is unknown or hidden."""
    return known["sizes"].get(split) or 0


def _samples(known: Mapping[str, Any], split: str, floor: int) -> str:
    """Format a site's number of samples in a split.

    If the site does not report the split, the text is "n/a". If the number is hidden because it is
    below ``floor``, the text is "< 10" for a floor of 10.

    Args:
        known: the site's entry in silos.json. The key 'sizes' maps a split to a number, or to None
            if the number is hidden.
        split: the name of the split.
        floor: the smallest number that may be shown.
    """
    if split not in known["sizes"]:
        return NONE
    return hide_small_count(known["sizes"][split], floor)


def _size_rows(run: Shown) -> list[list[str]]:
    """Build the rows of the table of sites, with a row for each site.

    A row has the site's name, its distribution (a name for the kind of its data), its numbers of
    samples in train, val and test, and the number of samples that it dropped. The last number is
    "n/a" unless the run's setting ``trust`` is ``server``. A hidden small number is, for example,
    "< 10". The site with the most training samples comes first.
    """
    rows = []
    # Sites of equal size stay in the order of the run
    by_size = sorted(run.silos.items(), key=lambda entry: -_size(entry[1], "train"))
    for name, known in by_size:
        row = [name, known["distribution"]]
        row += [_samples(known, split, run.floor) for split in _SPLITS]
        if run.trust == SERVER:
            row.append(hide_small_count(known["dropped"], run.floor))
        else:
            row.append(NONE)
        rows.append(row)
    return rows


def _metric_row(run: Shown, site: str, metrics: Sequence[str]) -> list[str]:
    """Build the row of a site: name, number of test samples, and the test metrics in order."""
    cells = [_cell(run, site, metric) for metric in metrics]
    return [site, _samples(run.silos[site], "test", run.floor), *cells]


def _sites_with_few_tests(run: Shown, sites: Sequence[str]) -> list[str]:
    """Find the sites with fewer than 100 test samples, whose metrics have wide intervals.

    Only ``sites`` are checked, and the result has their order. A hidden number counts as fewer than
    100. A site that does not report its number of test samples is left out.
    """
    few = []
    for site in sites:
        known = run.silos[site]
        if "test" in known["sizes"] and _size(known, "test") < _FEW:
            few.append(site)
    return few


def _class_rows(run: Shown, sites: Sequence[str]) -> list[list[str]]:
    """Build the rows of the table of classes: a row for each site and class.

    A row has the site, the class, the number of test samples of this class, and the estimates for
    it, such as the sensitivity, with their intervals. A class without any estimate that may be
    shown is left out. A site that does not report its test samples by class is left out too.
    """
    rows = []
    for site in sites:
        counts = run.silos[site]["label_counts"].get("test", [])
        metrics = final_metrics(run).get(site, {})
        # At 'trust: sums', counts of single sites are not known
        names: list[str] = []
        if counts:
            names = run.stratum_names(site)
        if not names:
            continue
        for outcome in class_outcomes(metrics, names, counts, _size(run.silos[site], "test")):
            row = [site, outcome.name, *outcome.cells()]
            if any(cell != NONE for cell in row[3:]):
                rows.append(row)
    return rows


def _plain(name: str) -> str:
    """Remove characters from a name that would be markup if the front matter is shown as text."""
    return "".join(c for c in name if c.isalnum() or c in "-_.: ")


def _front_matter(run: Shown, sites: Sequence[str]) -> str:
    """Build the model card's metadata for Hugging Face, as YAML without the enclosing lines '---'.

    The metadata are the library, the task, the name of the run directory, and the test metrics of
    each of ``sites``. The tags are "federated-learning", "medical" and the method. There is no
    licence, because a person must choose it.
    """
    from huggingface_hub import EvalResult, ModelCardData

    summary = run.summary
    of_tables, task = _PIPELINES[run.task]
    if data_set(summary["dataset"]).is_table:
        task = of_tables
    results = []
    for site in sites:
        for metric in _choose_metrics(run, [site]):
            result_of_site = EvalResult(
                task_type=task,
                dataset_type=_plain(summary["dataset"]),
                dataset_name=_plain(summary["dataset"]),
                dataset_config=site,
                dataset_split="test",
                metric_type=_plain(metric),
                metric_value=summary["sites"][site][metric],
            )
            results.append(result_of_site)
    # No licence is filled in, because a person must decide how the weights may be used
    return ModelCardData(
        library_name="fedsilo",
        pipeline_tag=task,
        tags=["federated-learning", "medical", _plain(summary["method"])],
        model_name=_plain(run.path.resolve().name),
        eval_results=results or None,
    ).to_yaml()


def _terms_of(name: str) -> str:
    """Describe in a phrase the terms under which the data set ``name`` may be used.

    If the data set has a licence, the phrase names it, with its web address and any further terms.
    If there is no licence and ``origin`` is "made-up", the phrase says that fedsilo made up the
    data. In all other cases, the phrase says that the data belong to the sites.
    """
    data = data_set(name)
    licence = data.licence
    if licence:
        return f"licence {licence.licence} ({licence.url}); {licence.terms or 'no further terms'}"
    if data.origin == "made-up":
        return "made up by fedsilo, without any patient"
    return "data of the sites, under the terms of each site"


def _epsilon(guarantee: str | Mapping[str, Any]) -> str:
    """Describe the privacy guarantee of a run in Markdown: the spent epsilon at its delta.

    If ``guarantee`` is a string, the run has no guarantee, and the text shows the string as the
    reason. Otherwise, ``guarantee`` has the keys "epsilon", "delta" and "of". The value of "of" is
    a text that says what is protected.
    """
    if isinstance(guarantee, str):
        return f"ε: **none** ({guarantee})"
    spent, delta = at_most(guarantee["epsilon"]), guarantee["delta"]
    return f"ε: **{spent}** at δ {delta:g} ({markdown_text(guarantee['of'])})"


def _choose_metrics(run: Shown, sites: Sequence[str]) -> list[str]:
    """Choose the metrics of the card's table, in the order in which the task lists them.

    If the task lists no metrics, as for classification, the list is accuracy, balanced accuracy,
    AUC, average precision, calibration error and loss. A metric of the list is chosen if the run's
    summary has it among the test metrics of at least one of ``sites``.
    """
    measured: set[str] = set()
    for site in sites:
        measured.update(run.summary["sites"].get(site, {}))
    shown = task_class(run.task).shown or _SHOWN
    return [metric for metric in shown if metric in measured]


def _cell(run: Shown, site: str, metric: str) -> str:
    """Format a site's test metric, with a 95 % interval for the accuracy and for a two-class AUC.

    If the site does not have the metric, the cell is "n/a". The interval of the accuracy needs the
    number of test samples. The interval of the AUC needs the number of test samples of each class.
    If such a number is hidden, the interval is left out.
    """
    value = run.summary["sites"].get(site, {}).get(metric)
    if value is None:
        return NONE
    counts = run.silos[site]["label_counts"].get("test", [])
    samples = _size(run.silos[site], "test")
    # For other metrics, the counts alone do not give an interval
    interval: Interval | None = None
    if metric == "accuracy" and samples:
        interval = wilson(min(max(round(value * samples), 0), samples), samples)
    elif metric == "auc" and len(counts) == 2 and None not in counts:
        interval = of_auc(value, counts[1], counts[0])
    return with_interval(Estimate(value, interval))


def _changed_settings(run: Shown) -> list[tuple[Markdown, Markdown]]:
    """Return (key, value) of each setting that differs from its default, sorted by key.

    Key and value are formatted as Markdown code. The method, the data set and the seed are left
    out, because the card shows them elsewhere. Settings without influence on the result, such as
    folders, are left out as well.
    """
    values = as_mapping(run.settings.common) | as_mapping(run.settings.own)
    usual = defaults(CommonSettings) | as_mapping(type(run.settings.own)())
    unshown = {*CIRCUMSTANCES, "method", "dataset", "seed"}
    changed = []
    for key, value in sorted(values.items()):
        if key not in unshown and usual.get(key) != value:
            changed.append((markdown_code(key), markdown_code(value)))
    return changed
