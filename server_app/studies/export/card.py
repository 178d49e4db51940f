"""``model-card.md``: what a model is, in Hugging Face's form, filled from its run directory.

What nobody but a person can know (what it is for, under which licence) is left open and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, defaults, keys_with
from fedsilo.models.maths.intervals import Interval, of_auc, wilson
from fedsilo.server_app.records.finished_run import FinishedRun, finished_run
from fedsilo.server_app.records.finished_site import sites_of

_OPEN = "**To be written by a person.**"
_SHOWN = ("accuracy", "balanced-accuracy", "auc", "average-precision", "calibration-error", "loss")


def card(run_dir: Path, site: str | None = None, out: Path | None = None) -> str:
    """Write the card of a finished run's model; nothing but the run directory is needed.

    Args:
        run_dir: the run directory.
        site: whose model it is of; None: that of all sites, or every site's.
        out: the file to write, not there yet; None: none is written.

    Raises:
        FedsiloError: the run has not ended, there is no such site, or the file is there already.
    """
    run = finished_run(run_dir)
    sites_of(run_dir, [site] if site else [])
    text = card_text(run, site)
    if out is not None:
        if out.exists():
            raise SettingError(f"{out} is there already: remove it, or give another --out")
        write_atomically(out, text)
    return text


def card_text(
    run: FinishedRun, site: str | None, usage: Sequence[str] = (), facts: Mapping[str, str] = {}
) -> str:
    """Return the card.

    Args:
        run: a finished run.
        site: the one whose model it is of; None: every site's.
        usage: lines of Markdown that say how it is opened.
        facts: what else is known of the file, by name.
    """
    sites = [site] if site else list(run.silos)
    summary = run.summary
    whose = f", the model of site {site}" if site else ""
    title = f"# {run.path.resolve().name}: {summary['title']} on {summary['dataset']}{whose}"
    parts = [
        [
            title,
            "",
            f"Trained by {summary['rounds']} rounds of {summary['title']} (`{summary['method']}`) "
            f"at {len(run.silos)} sites with fedsilo, seed {summary['seed']}. It is the outcome of "
            "research software and **no medical device**.",
        ],
        ["## Intended use", "", f"{_OPEN} Whom it is for, on which patients and machines, who "
         "decides with it, and what it must not be used for. Nothing of that follows from a run."],
        _data(run),
        _figures(run, sites),
        _privacy(run),
        _limits(run),
        ["## How to use it", "", *usage] if usage else [],
        _provenance(run, facts),
    ]  # fmt: skip
    body = "\n\n".join("\n".join(part) for part in parts if part)
    return f"---\n{_front_matter(run, sites)}\n---\n\n{body}\n"


def _front_matter(run: FinishedRun, sites: Sequence[str]) -> str:
    """Return the metadata that Hugging Face reads, as YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    summary, table = run.summary, data_set(run.summary["dataset"]).is_table
    task = "tabular-classification" if table else "image-classification"
    results = [
        EvalResult(
            task_type=task,
            dataset_type=summary["dataset"],
            dataset_name=summary["dataset"],
            dataset_config=site,
            dataset_split="test",
            metric_type=metric,
            metric_value=summary["sites"][site][metric],
        )
        for site in sites
        for metric in _shown(run, [site])
    ]
    # No licence is filled in: what the weights may be used for is a person's decision
    return ModelCardData(
        library_name="fedsilo",
        pipeline_tag=task,
        tags=["federated-learning", "medical", summary["method"]],
        model_name=run.path.resolve().name,
        eval_results=results or None,
    ).to_yaml()


def _data(run: FinishedRun) -> list[str]:
    name = run.summary["dataset"]
    by_size = sorted(run.silos.items(), key=lambda one: -one[1]["sizes"]["train"])
    rows = [
        [site, facts["distribution"], *facts["sizes"].values(), facts["dropped"]]
        for site, facts in by_size
    ]
    return [
        "## Data",
        "",
        f"Data set `{name}`: {_terms_of(name)}. Sites by size:",
        "",
        *_table(["site", "distribution", "train", "val", "test", "left out"], rows),
        "",
        f"Classes: {', '.join(_classes(run))}.",
    ]


def _terms_of(name: str) -> str:
    """Return on what terms a data set may be used, in words."""
    data = data_set(name)
    if known := data.licence:
        return f"licence {known.licence} ({known.source}); {known.terms or 'no further terms'}"
    if data.origin == "made-up":
        return "made up by fedsilo, no patient is in it"
    return "the sites' own, on the terms of each site"


def _classes(run: FinishedRun) -> list[str]:
    facts = next(iter(run.silos.values()))
    return list(facts["classes"]) or [str(n) for n in range(len(facts["label_counts"]["train"]))]


def _shown(run: FinishedRun, sites: Sequence[str]) -> list[str]:
    measured: set[str] = set().union(*(run.summary["sites"].get(site, {}) for site in sites))
    return [metric for metric in _SHOWN if metric in measured]


def _figures(run: FinishedRun, sites: Sequence[str]) -> list[str]:
    shown = _shown(run, sites)
    if not shown:
        return ["## Figures", "", "No test rows were measured."]
    rows = [
        [site, str(run.silos[site]["sizes"]["test"]), *(_cell(run, site, m) for m in shown)]
        for site in sites
    ]
    return [
        "## Figures",
        "",
        "Of each site's test rows, after the last round; in brackets what chance alone leaves open "
        "at 95 % (accuracy: Wilson; AUC of two classes: Hanley and McNeil). Another seed, another "
        "cut of the rows and another hospital are beyond that.",
        "",
        *_table(["site", "test rows", *shown], rows),
    ]


def _cell(run: FinishedRun, site: str, metric: str) -> str:
    """Return a figure, with its interval where there is one."""
    value = run.summary["sites"].get(site, {}).get(metric)
    if value is None:
        return "undefined"
    counts = run.silos[site]["label_counts"]["test"]
    interval: Interval | None = None
    if metric == "accuracy":
        interval = wilson(round(value * sum(counts)), sum(counts))
    elif metric == "auc" and len(counts) == 2:
        interval = of_auc(value, counts[1], counts[0])
    around = f" ({interval.low:.3f} to {interval.high:.3f})" if interval else ""
    return f"{value:.3f}{around}"


def _privacy(run: FinishedRun) -> list[str]:
    document = run.summary["privacy"]
    guarantee = document["guarantee"]
    told = guarantee if isinstance(guarantee, str) else guarantee["of"]
    if not isinstance(guarantee, str) and (noise := guarantee.get("noise")):
        told = f"{told}; {noise}"
    return [
        "## Privacy",
        "",
        f"ε: **{document['epsilon']}** ({told}). What left each site:",
        "",
        *(f"- {sentence}" for sentence in document["leaves each site"]),
        "",
        "Weights tell of what they were trained on, some more than others: whom they may be given "
        "to is the sites' decision.",
    ]


def _limits(run: FinishedRun) -> list[str]:
    summary = run.summary
    few = [s for s, facts in run.silos.items() if facts["sizes"]["test"] < 100]
    lines = [
        "It was measured at the sites above and nowhere else; a new hospital, machine or time is "
        "not covered by any figure here.",
        "Probabilities are as they come from training: where they matter, calibrate them at the "
        "site (`fedsilo calibrate`).",
    ]
    if few:
        lines.append(f"Fewer than 100 test rows: {', '.join(few)}.")
    if summary["stopped"]:
        lines.append(f"The run ended early: {summary['stopped']}.")
    if failures := summary["failures"]:
        lines.append(f"{len(failures)} answers failed or came too late, and the run went on.")
    return ["## Limits", "", *(f"- {line}" for line in lines), f"- {_OPEN} Anything else known."]


def _provenance(run: FinishedRun, facts: Mapping[str, str]) -> list[str]:
    values = as_mapping(run.settings.common) | as_mapping(run.settings.own)
    usual = defaults(CommonSettings) | as_mapping(type(run.settings.own)())
    idle = {*keys_with(CommonSettings, "circumstance"), "method", "dataset", "seed"}
    changed = [k for k, v in values.items() if k not in idle and usual.get(k) != v]
    rows = [[f"`{key}`", f"`{values[key]}`"] for key in sorted(changed)]
    return [
        "## Provenance",
        "",
        *(f"- {name}: `{value}`" for name, value in facts.items()),
        *([""] if facts else []),
        "Settings that are not the default:",
        "",
        *_table(["setting", "value"], rows),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(_escaped(str(cell)) for cell in line)} |" for line in lines]


def _escaped(text: str) -> str:
    """Return a cell's text; a bar in it, as in a site's name, ends no cell."""
    return text.replace("|", "\\|")
