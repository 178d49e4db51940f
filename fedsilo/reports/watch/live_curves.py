"""Draws the curves of a run so far: a metric, the loss, bytes, and the slowest sites."""

from collections.abc import Callable, Mapping, Sequence

from fedsilo.core.drawing.palette import line_styles
from fedsilo.models.measures.intervals import Estimate
from fedsilo.pages.page import Picture, share
from fedsilo.pages.page_pictures import curves, estimates
from fedsilo.server_app.records.shown import Row

OVER = ", mean over hospitals"
_SLOWEST = 10  # largest number of sites in the picture
Line = dict[int, float]  # round -> value


def draw_pictures(
    rows: Sequence[Row], answers: Sequence[Row], headline: str = "accuracy"
) -> list[Picture]:
    """Draw the pictures of a run so far: a metric, the loss, traffic, and the slowest sites.

    The metric has a line for test samples and a line for validation samples. The loss has a third
    line for training samples. The traffic has a line for bytes to the hospitals, and a line for
    bytes from them. A picture without any value is left out.

    Args:
        rows: the rows of metrics.csv that may be shown.
        answers: the rows of traffic.csv, without those of the phase in which sites introduce
            themselves.
        headline: the metric of the first picture. If it is "loss", that picture is left out,
            because the second one shows the loss.
    """
    metric = {
        "test": mean_by_round(rows, "test", headline),
        "val": mean_by_round(rows, "val", headline),
    }
    loss = {
        "test": mean_by_round(rows, "test", "loss"),
        "val": mean_by_round(rows, "val", "loss"),
        "training": mean_by_round(rows, "train", "trained-loss"),
    }
    bytes_ = {
        "to the hospitals": _megabytes_by_round(answers, "bytes_down"),
        "from them": _megabytes_by_round(answers, "bytes_up"),
    }
    # A run whose only metric is the loss has one picture of it
    if headline == "loss":
        metric = {}
    pictures = [
        draw_curve("headline", metric, headline, OVER, share),
        draw_curve("loss", loss, "loss", OVER, share),
        draw_curve("bytes", bytes_, "MB in a round", "", "{:.3g}".format),
        _slowest(answers),
    ]
    return [picture for picture in pictures if picture]


def mean_by_round(rows: Sequence[Row], split: str, metric: str) -> Line:
    """Average a metric of a split over the sites, for each round.

    In each round, the mean is over the sites that have the metric in that round.

    Returns:
        Round -> mean. A round without the metric is left out.
    """
    chosen = [row for row in rows if row["split"] == split and row["metric"] == metric]
    means = {}
    for at, values in _group_values(chosen, "round", "value").items():
        means[int(at)] = sum(values) / len(values)
    return means


def _megabytes_by_round(answers: Sequence[Row], column: str) -> Line:
    """Return round -> sum of a column of bytes over all messages, in MB."""
    sums = {}
    for at, values in _group_values(answers, "round", column).items():
        sums[int(at)] = sum(values) / 1e6
    return sums


def _group_values(rows: Sequence[Row], key: str, column: str) -> dict[str, list[float]]:
    """Group the numbers in ``column`` by the text in the column ``key``: text -> numbers."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(float(row[column]))
    return groups


def draw_curve(
    name: str, lines: Mapping[str, Line], label: str, over: str, text_of: Callable[[float], str]
) -> Picture | None:
    """Draw lines over rounds in one picture.

    Lines without values are left out. If no line has a value, the result is None.

    Args:
        name: the picture's name, unique on its page.
        lines: title of a line -> round -> value. Colours follow the order of all lines, so a line
            keeps its colour when an empty line gets values. If only one line is drawn, its title is
            put before ``label``, because there is no legend.
        label: the label of the vertical axis, and the beginning of the caption.
        over: the rest of the caption.
        text_of: formats each line's last value for readers who cannot see the picture.
    """
    drawn, ends = {}, []
    for title, line in lines.items():
        if line:
            drawn[title] = line
            # max(line) is the last round
            ends.append(f"{title} {text_of(line[max(line)])}")
    if not drawn:
        return None
    if len(drawn) == 1:  # such a picture has no legend
        label = f"{next(iter(drawn))} {label}"
    svg = curves(f"watch-{name}", drawn, line_styles(list(lines)), label)
    caption = f"{label[0].upper()}{label[1:]}{over}."
    return Picture(svg, f"{caption} By round; now: {'; '.join(ends)}.", caption)


def _slowest(answers: Sequence[Row]) -> Picture | None:
    """Draw the ten slowest sites by their mean seconds of work per reply, the slowest first.

    Each reply has the seconds that the site reports for it. A reply with 0 seconds is ignored as
    unreported. If more than ten sites report seconds, the caption says how many quicker sites are
    left out. If no site reports seconds, the result is None.
    """
    # A site that does not report its seconds sends 0
    worked = [row for row in answers if float(row["seconds"])]
    means = {}
    for site, seconds in _group_values(worked, "site", "seconds").items():
        means[site] = sum(seconds) / len(seconds)
    slowest = sorted(means, key=lambda site: -means[site])[:_SLOWEST]
    if not slowest:
        return None
    label = "seconds of work for an answer, mean"
    without = ""
    if len(means) > len(slowest):
        without = f", without {len(means) - len(slowest)} quicker hospitals"
    caption = f"The slowest first{without}: {label}."
    drawn, texts = {}, []
    for site in slowest:
        drawn[site] = Estimate(means[site])
        texts.append(f"{site} {means[site]:.2f}")
    svg = estimates("watch-slow", {"seconds": drawn}, label)
    return Picture(svg, f"{caption} {'; '.join(texts)}.", caption)
