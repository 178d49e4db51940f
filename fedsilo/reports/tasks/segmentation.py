"""A segmentation's parts of reports: Dice, IoU and distances of outlines, by site and by class."""

from collections.abc import Mapping

from fedsilo.core.metric_names import CLASS
from fedsilo.pages.page import NONE, Table
from fedsilo.reports.clinic import Examination, final_metrics
from fedsilo.reports.tasks.shared import limit_of, values_of
from fedsilo.runs.finished_run import Shown

_COLUMNS = {
    "dice": "Dice",
    "iou": "IoU",
    "surface-distance": "distance of outlines, mean",
    "hausdorff-95": "distance of outlines, 95 %",
}
_MEANING = (
    "Dice is 2 |P and T| / (|P| + |T|), and IoU is |P and T| / |P or T|, of the predicted pixels P "
    "and the true pixels T of a class; 1 is a perfect mask and 0 a missed one. Distances between "
    "the outlines of both masks are in pixels of the resized images. All are means over the test "
    "images; an image counts for a class only if the class is in its true or its predicted mask."
)


def result(run: Shown, site: str | None) -> str:
    """Summarise the Dice score on test images in one sentence.

    The score is that of ``site``. If ``site`` is None or empty, it is the mean over all sites. If
    the run shows no score, for example because of too few images, the sentence says so.
    """
    values, where = values_of(run, site)
    if "dice" not in values:
        return "No Dice score on test images may be shown for this run."
    marked = ", ".join(run.class_names()[1:])
    return f"Masks of {marked} have a Dice score of {values['dice']:.3f} ({where})."


def limit(run: Shown, site: str | None) -> str:
    """Describe the main limit of ``result`` in one sentence; ``site`` is not used."""
    return limit_of(run, "no Dice score is known")


def sections(run: Shown) -> list[Examination]:
    """Build the section of the clinic's page on how well predicted masks agree with true masks.

    The first table has a row for each site. The second table has a row for each class and site. The
    columns are Dice, IoU, and two distances between outlines. Rows without any metric are left out,
    and a single missing metric is "n/a". An empty second table is left out. If the first table is
    empty, the section has only a sentence that says so.

    Returns:
        A list with this one section.
    """
    metrics = final_metrics(run)
    title = "How well its masks agree with the true ones"
    rows, by_class = [], []
    for site, by_name in metrics.items():
        if any(name in by_name for name in _COLUMNS):
            rows.append([site, *_cells(by_name, "")])
        for number, name in enumerate(run.class_names()):
            cells = _cells(by_name, f"{CLASS}.{number}.")
            if any(cell != NONE for cell in cells):
                by_class.append([name, site, *cells])
    if not rows:
        return [Examination(title, ["No Dice score on test images may be shown."])]
    tables = [Table("Masks of test images, by site", ["site", *_COLUMNS.values()], rows)]
    if by_class:
        columns = ["class", "site", *_COLUMNS.values()]
        tables.append(Table("Masks of test images, by class and site", columns, by_class))
    return [Examination(title, [meaning(run)], tables=tables)]


def meaning(run: Shown) -> str:
    """Explain the metrics to a reader who does not know them; ``run`` is not used."""
    return _MEANING


def _cells(metrics: Mapping[str, float], prefix: str) -> list[str]:
    """Format a site's metrics, over all classes or of one class, as the cells of a row.

    The cells are Dice, IoU, and the mean and the 95 % distance between outlines. Dice and IoU have
    three decimals, and distances one. A missing metric is "n/a".

    Args:
        metrics: metric -> value.
        prefix: the text before the metrics' names: "class.N." for class N, or empty for all
            classes.
    """
    cells = []
    for name in _COLUMNS:
        value = metrics.get(f"{prefix}{name}")
        if value is None:
            cells.append(NONE)
        elif name in ("dice", "iou"):
            cells.append(f"{value:.3f}")
        else:
            cells.append(f"{value:.1f}")
    return cells
