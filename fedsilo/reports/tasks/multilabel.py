"""The parts of reports of a run with several findings: AUC by finding and site."""

from collections.abc import Mapping

from fedsilo.core.one_line import format_count
from fedsilo.models.measures.finding_metrics import FindingOutcome, finding_outcomes
from fedsilo.models.measures.intervals import Estimate, of_auc
from fedsilo.pages.page import NONE, Picture, Table, with_interval
from fedsilo.pages.page_pictures import estimates
from fedsilo.reports.clinic import INTERVALS, Examination, final_metrics
from fedsilo.reports.tasks.shared import limit_of, values_of
from fedsilo.runs.finished_run import Shown


def result(run: Shown, site: str | None) -> str:
    """State the AUC on test samples, averaged over the findings, in one sentence.

    A finding is a label that a sample may have. The AUC is that of ``site``, or the mean over all
    sites if ``site`` is None or empty. If the run shows no AUC, for example because of too few
    patients, the sentence says so.
    """
    values, where = values_of(run, site)
    if "auc" not in values:
        return "No AUC on test data may be shown for this run."
    findings = format_count(len(run.class_names()), "finding")
    return f"The AUC of {findings} is {values['auc']:.3f} on average ({where})."


def limit(run: Shown, site: str | None) -> str:
    """Describe the main limit of ``result`` in one sentence; ``site`` is not used."""
    return limit_of(run, "no AUC is known")


def sections(run: Shown) -> list[Examination]:
    """Build the section of the clinic's page on how well each finding is recognised.

    Each site has a table of its findings, with the number of test samples that have the finding,
    and the AUC. A picture shows the AUCs of all sites. If too few samples have a finding or lack
    it, a sentence names the finding as left out. If no AUC is shown, there are no tables and no
    picture.

    Returns:
        A list with this one section.
    """
    title = "How well each finding is recognised"
    tables, left_out = [], []
    drawn: dict[str, dict[str, Estimate]] = {}
    for site, by_name in final_metrics(run).items():
        total = run.silos.get(site, {"sizes": {}})["sizes"].get("test") or 0
        rows = []
        for outcome in finding_outcomes(by_name, run.class_names()):
            area = _area(outcome, total)
            if area is None:
                left_out.append(f"{outcome.name} at {site}")
                continue
            rows.append([outcome.name, f"{outcome.count:,}", with_interval(area)])
            drawn.setdefault(outcome.name, {})[site] = area
        if rows:
            columns = ["finding", f"{run.noun(2)} that have it", "AUC"]
            tables.append(Table(f"Site {site}, {total or NONE} test {run.noun(2)}", columns, rows))
    sentences = [meaning(run)]
    if left_out:
        sentences.append(
            f"Left out, because fewer than {run.floor} test {run.noun(2)} have the finding or lack "
            f"it: {', '.join(left_out)}."
        )
    if not drawn:
        return [Examination(title, sentences)]
    sentences.append(INTERVALS)
    return [Examination(title, sentences, _picture(run, drawn), tables)]


def meaning(run: Shown) -> str:
    """Explain the AUC of a finding to a reader who does not know this metric.

    ``run`` is not used.
    """
    return (
        "AUC: how often a sample with the finding gets a higher probability of it than one "
        "without; 0.5 is chance. Means are over the findings that some samples have and others "
        "lack."
    )


def _area(outcome: FindingOutcome, total: int) -> Estimate | None:
    """Return the AUC of a finding, and its 95 % interval if enough is known.

    If the AUC or the number of samples with the finding is None, because it is hidden, the result
    is None.

    Args:
        outcome: the AUC of the finding, and the number of samples that have it.
        total: the number of test samples; 0 if unknown. There is no interval unless ``total`` is
            larger than the number of samples with the finding.
    """
    if outcome.auc is None or outcome.count is None:
        return None
    if total <= outcome.count:
        return Estimate(outcome.auc)
    return Estimate(outcome.auc, of_auc(outcome.auc, outcome.count, total - outcome.count))


def _picture(run: Shown, drawn: Mapping[str, Mapping[str, Estimate]]) -> Picture:
    """Draw the AUC of each finding at each site, with its 95 % interval, for a page.

    The alternative text lists all AUCs.

    Args:
        run: the run, whose name keeps the picture's ids unique on the page.
        drawn: finding -> site -> estimate of the AUC.
    """
    svg = estimates(f"{run.name}-findings", drawn, "AUC")
    texts = []
    for name, by_site in drawn.items():
        texts += [f"{name}, {site}: {with_interval(area)}" for site, area in by_site.items()]
    return Picture(svg, f"AUC by finding and site. {'; '.join(texts)}.", "AUC by finding and site.")
