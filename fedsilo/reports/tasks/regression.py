"""A regression's parts of reports: errors by site, and outcomes against predictions."""

from collections.abc import Mapping, Sequence

from fedsilo.core.one_line import format_measure
from fedsilo.models.measures.regression_metrics import OutcomeBin, pool_outcome_bins
from fedsilo.pages.page import NONE, Picture, Table
from fedsilo.pages.page_pictures import against_diagonal
from fedsilo.reports.clinic import Examination, final_metrics
from fedsilo.reports.tasks.shared import limit_of, values_of
from fedsilo.runs.finished_run import Shown

_ERRORS = {"mae": "MAE", "rmse": "RMSE", "r2": "R²"}


def result(run: Shown, site: str | None) -> str:
    """Summarise the mean absolute error on test samples in one sentence, in the outcome's unit.

    The error is that of ``site``. If ``site`` is None or empty, it is the mean over all sites. The
    sentence ends with R² if the run shows it. If the run shows no error, for example because of too
    few patients, the sentence says only this.
    """
    values, where = values_of(run, site)
    if "mae" not in values:
        return "No error on test data may be shown for this run."
    explained = ""
    if "r2" in values:
        explained = f", and R² is {values['r2']:.2f}"
    name = run.class_names()[0]
    error = f"{format_measure(values['mae'])} on average (MAE, {where})"
    return f"Predictions of {name} are off by {error}{explained}."


def limit(run: Shown, site: str | None) -> str:
    """Describe the main limit of ``result`` in one sentence; ``site`` is not used."""
    return limit_of(run, "no error of a single hospital is known")


def sections(run: Shown) -> list[Examination]:
    """Build the sections of the clinic's report: errors by site, and calibration."""
    metrics = final_metrics(run)
    return [_errors(run, metrics), _calibration(run, metrics)]


def meaning(run: Shown) -> str:
    """Explain MAE, RMSE and R², the metrics of a regression, for a reader who does not know them.

    The text names the variable that the model of the run predicts.
    """
    return (
        "MAE, the mean absolute error, and RMSE, the root mean square error, are in the unit of "
        f"the outcome, {run.class_names()[0]}. R² is 1 for perfect predictions, and 0 for always "
        "predicting the mean outcome of the site's test samples; it may be negative."
    )


def _errors(run: Shown, metrics: Mapping[str, Mapping[str, float]]) -> Examination:
    """Build the section of the clinic's page with the MAE, RMSE and R² of each site.

    The table has a row for each site, and a column for each metric that at least one site has. A
    missing value is "n/a". If no site has any of these metrics, the section has only a sentence
    that says so. ``metrics`` maps each site to its metrics on test samples.
    """
    title = "How far it is off"
    shown = [metric for metric in _ERRORS if any(metric in found for found in metrics.values())]
    if not shown:
        return Examination(title, ["No error on test samples may be shown."])
    rows = []
    for site, by_name in metrics.items():
        cells = [format_measure(by_name[metric]) if metric in by_name else NONE for metric in shown]
        rows.append([site, *cells])
    columns = ["site", *(_ERRORS[metric] for metric in shown)]
    table = Table("Errors on test samples, by site", columns, rows)
    return Examination(title, [meaning(run)], tables=[table])


def _calibration(run: Shown, metrics: Mapping[str, Mapping[str, float]]) -> Examination:
    """Build the section of the clinic's page that compares mean outcomes with mean predictions.

    Each site has grouped its test samples by their prediction. These groups are pooled over the
    sites. A site's group is left out if it has too few samples. The section has a picture and a
    table of the groups. If no group is left, it has only a sentence that says so. ``metrics`` maps
    each site to its metrics on test samples, with those of each group.
    """
    title, name = "Whether its predictions can be trusted", run.class_names()[0]
    bins = pool_outcome_bins(metrics.values())
    if not bins:
        sentence = "No group of predictions has enough test samples to be shown."
        return Examination(title, [sentence])
    sentences = [
        "Test samples are grouped by their prediction. Where predictions can be trusted, the mean "
        "outcome of a group equals its mean prediction: its point is on the dashed line. Groups "
        f"with fewer than {run.floor} samples at a site are left out."
    ]
    return Examination(title, sentences, _picture(run, bins), [_bin_table(run, bins, name)])


def _bin_table(run: Shown, bins: Sequence[OutcomeBin], name: str) -> Table:
    """Build the table that compares predictions with outcomes, by group of test samples.

    A group has the samples of all sites with similar predictions. Each row has the mean prediction,
    the mean outcome and the number of samples of a group. ``run`` gives the word for the samples,
    and ``name`` is the name of the outcome.
    """
    rows = []
    for one in bins:
        rows.append([format_measure(one.predicted), format_measure(one.observed), f"{one.count:,}"])
    columns = [f"predicted {name}, mean", "observed, mean", run.noun(2)]
    return Table("By prediction, all sites together", columns, rows)


def _picture(run: Shown, bins: Sequence[OutcomeBin]) -> Picture:
    points = [(one.predicted, one.observed) for one in bins]
    name = run.class_names()[0]
    svg = against_diagonal(
        f"{run.name}-calibration", points, f"predicted {name}, mean", "observed, mean"
    )
    texts = []
    for predicted, observed in points:
        texts.append(f"{format_measure(predicted)} predicted, {format_measure(observed)} observed")
    alt = f"Mean outcome against mean prediction. {'; '.join(texts)}."
    return Picture(svg, alt, "Mean outcome by predicted outcome, all sites together.")
