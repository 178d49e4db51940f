"""The page of a survey: the sites' data, the distances between sites, and the suppressed counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.site_facts import SPLITS
from fedsilo.core.survey import Count, MeasuredFeature, Survey
from fedsilo.pages.page import Table, render_page
from fedsilo.reports.survey.document import (
    Between,
    Distances,
    SurveyDocument,
    cell_names,
    read_survey_document,
)
from fedsilo.reports.survey.survey_pictures import (
    feature_pictures,
    is_binary,
    label_picture,
    training_counts,
)
from fedsilo.server_app.run.survey import SURVEY

Answers = Mapping[str, Survey]  # site -> its answer

_WORST = 20  # largest number of pairs in the table of features
_NONE = "-"  # the hospital does not send it, or it does not exist
_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
_RULE = (
    "'suppressed' is a count below the hospital's own floor, a true zero too, or one that would "
    "reveal such a count by subtraction from a total."
)
_DISTANCE = (
    "Jensen-Shannon distance, base 2: 0 is the same distribution, 1 nothing in common. Cells that "
    "either site has suppressed count as one cell, so the sites are at least this far apart. With "
    "few samples some distance is chance."
)
_FOOT = (
    "Counts and statistics are those that left the sites. A hospital's are its first answer for "
    "this data set, whatever has been asked since."
)


def write_survey_page(folder: Path) -> Path:
    """Write survey.html into the folder that has survey.json, and return its path.

    Raises:
        RunDirectoryError: survey.json is missing or damaged, or was written by another version of
            fedsilo.
    """
    page = folder / "survey.html"
    write_atomically(page, survey_page(read_survey_document(folder / SURVEY)))
    return page


def survey_page(document: SurveyDocument) -> str:
    """Build the HTML page of a survey from the answers of the sites.

    The page first lists the reasons of the sites that did not answer, and the sites whose data have
    changed since their answer. Pictures and tables follow: the samples, the labels, the distances
    between sites, the features, and the files of image data sets. The text "suppressed" stands for
    a count that is too small to be sent.
    """
    answers = document.sites
    training = document.distances.get("train", Distances())
    label_pictures = []
    labels_drawn = label_picture(answers)
    if labels_drawn:
        label_pictures.append(labels_drawn)
    changed = []
    has_files = False
    for site, answer in answers.items():
        if answer.about.changed:
            changed.append(site)
        has_files |= bool(answer.files)
    data = {
        "refused": document.refused,
        "changed": changed,
        "sites": list(_sites(document)),
        "label_pictures": label_pictures,
        "labels": list(_labels(answers)),
        "distances": list(_distances(training, document)),
        "feature_pictures": feature_pictures(document, training.features),
        "features": list(_features(document)),
        "has_files": has_files,
        "files": list(_files(answers)),
    }
    subtitle = f"{document.run}, asked {document.asked}"
    title = f"Survey of {document.dataset}"
    return render_page("survey.html", title, data, subtitle=subtitle, foot=_FOOT)


def _sites(document: SurveyDocument) -> Iterator[Table]:
    """Yield a table of the sites' samples, and a table of the rows that the sites left out.

    The first table has a row per site. It gives the samples in each split, the rows left out, the
    smallest count that the site sends (its floor), and the date of its answer.

    The second table has a row per data column, and a column per site. It counts the rows that a
    site left out because the column's value was missing or out of range. A data column without any
    known count has no row. An empty second table is left out.
    """
    rows = []
    for site, answer in document.sites.items():
        samples = answer.samples or {}
        left_out = _NONE
        if answer.left_out:
            left_out = _count_text(answer.left_out.count)
        cells = [_cell(samples, split) for split in SPLITS]
        rows.append((site, *cells, left_out, str(answer.about.floor), answer.about.on))
    columns = ("site", *_SPLIT_NAMES.values(), "left out", "floor", "answered on")
    note = (
        f"{_RULE} Left out: rows with a missing value or one out of range, or files that cannot be "
        "decoded."
    )
    yield Table("Samples", columns, rows, note)
    lacking = _rows_left_out(document)
    if lacking:
        note = "For columns that are not listed here, every count is suppressed."
        title = "Rows left out, by the column whose value is missing or out of range"
        yield _counts(title, "column", lacking, note)


def _rows_left_out(document: SurveyDocument) -> dict[str, dict[str, Count]]:
    """Count the rows that each site left out because a column's value is missing or out of range.

    The result maps site -> title of the column -> count. One count covers both reasons. None stands
    for a count that the site suppressed to protect patients. A column whose counts are suppressed
    at all sites is left out, and so is a site that sent no such counts. If no column remains, the
    result is empty.
    """
    # Otherwise a hundred columns with only suppressed counts would have a row each
    missing = {}
    listed = set()
    for site, answer in document.sites.items():
        if answer.left_out and answer.left_out.missing:
            missing[site] = answer.left_out.missing
            for name, count in missing[site].items():
                if count is not None:
                    listed.add(name)
    if not listed:
        return {}
    lacking: dict[str, dict[str, Count]] = {}
    for site, counts in missing.items():
        lacking[site] = {}
        for name, count in counts.items():
            if name in listed:
                lacking[site][document.title(name)] = count
    return lacking


def _labels(answers: Answers) -> Iterator[Table]:
    """Yield a table of label counts for each split.

    A table has a row per class and a column per site. A split has no table if no site sent its
    counts.
    """
    for split, name in _SPLIT_NAMES.items():
        counts = {}
        for site, answer in answers.items():
            if answer.labels and split in answer.labels:
                classes = answer.about.classes
                counts[site] = dict(zip(classes, answer.labels[split], strict=True))
        if counts:
            yield _counts(f"Labels, {name} samples", "label", counts)


def _distances(training: Distances, document: SurveyDocument) -> Iterator[Table]:
    """Yield two tables of the distances between sites: one for labels, one for features.

    Distances are Jensen-Shannon distances between the training samples of two sites. The first
    table has a row for each pair of sites. The second table has a row for each pair of sites and
    each feature, but only the 20 rows with the largest distances. If there are more, a note below
    it gives their number. A table without distances is left out.

    Args:
        training: the distances in the training samples, the largest first.
        document: the survey, for the titles of the features.
    """
    if training.labels:
        note = f"Measured on training samples. {_DISTANCE}"
        rows = list(map(_pair, training.labels))
        yield Table("Labels", ("sites", "distance"), rows, note)
    if training.features:
        shown = []
        for between in training.features[:_WORST]:
            shown.append((document.title(between.feature), *_pair(between)))
        more = len(training.features) - len(shown)
        note = ""
        if more:
            note = f"{more} more pairs are in survey.json."
        columns = ("feature", "sites", "distance")
        yield Table("Features, the most different first", columns, shown, note)


def _pair(between: Between) -> tuple[str, str]:
    """Format the two sites of a distance, and the distance with three decimals."""
    return ", ".join(between.sites), f"{between.distance:.3f}"


def _features(document: SurveyDocument) -> Iterator[Table]:
    """Yield the tables that describe the features in the training samples.

    The first table gives the mean, the standard deviation, and the 5th and 95th percentiles of each
    feature at each site. It does not list binary features. A table with a histogram follows for
    each feature whose counts some site sent. It has a column per site. If sites declare a feature
    differently, the first declaration counts, and sites with another one are left out.
    """
    answers = document.sites
    declared: dict[str, MeasuredFeature] = {}
    for answer in answers.values():
        for feature in answer.about.features:
            declared.setdefault(feature.name, feature)  # the first site's declaration counts
    rows = _statistics_rows(declared, document)
    if rows:
        columns = ("feature", "site", "mean", "sd", "5th percentile", "95th percentile")
        yield Table("Training samples", columns, rows)
    for name, feature in declared.items():
        counts = {}
        for site, cells in training_counts(feature, answers).items():
            counts[site] = dict(zip(document.cell_titles(feature), cells, strict=True))
        if counts:
            yield _counts(f"{document.title(name)}, training samples", "", counts)


def _statistics_rows(
    declared: Mapping[str, MeasuredFeature], document: SurveyDocument
) -> list[tuple[str, ...]]:
    """Build a row of statistics per feature and site: mean, standard deviation, two percentiles.

    Sites without statistics have no row. Binary features are left out, because counts describe
    them.
    """
    rows = []
    for name, feature in declared.items():
        if is_binary(cell_names(feature)):
            continue  # its mean follows from the table of counts
        for site, answer in document.sites.items():
            statistics = _statistics(answer, name)
            if statistics:
                rows.append((document.title(name), site, *statistics))
    return rows


def _statistics(answer: Survey, name: str) -> tuple[str, ...] | None:
    """Format the statistics of a feature in a site's training samples as four cells.

    The cells are the mean, the standard deviation, the 5th and the 95th percentile. A site may send
    only the first two, or only the percentiles. A missing cell is "-". If the site sent neither,
    the result is None.
    """
    # A hospital may allow means, percentiles, both or none
    spread = (answer.means or {}).get("train", {}).get(name)
    ends = (answer.percentiles or {}).get("train", {}).get(name)
    if not spread and not ends:
        return None
    cells = [_NONE] * 4
    if spread:
        cells[:2] = [_number(spread.mean), _number(spread.sd)]
    if ends:
        cells[2:] = [_number(ends[0]), _number(ends[1])]
    return tuple(cells)


def _number(value: float | None) -> str:
    """Format a number with up to six digits; None becomes "-"."""
    if value is None:
        return _NONE
    return f"{value:g}"


def _files(answers: Answers) -> Iterator[Table]:
    """Yield the tables about the properties of the sites' files, such as the size of images.

    The first table gives the 5th and the 95th percentile of each property at each site. It is left
    out if no site sent percentiles. A table of counts follows for each property that has at least
    one known count. If sites declare a property differently, the last declaration counts, and sites
    with another one are left out.
    """
    rows = []
    declared: dict[str, MeasuredFeature] = {}
    for site, answer in answers.items():
        for name, (low, high) in (answer.file_percentiles or {}).items():
            rows.append((name, site, f"{low:g}", f"{high:g}"))
        for feature in answer.about.file_features:
            declared[feature.name] = feature  # the last site's declaration counts
    if rows:
        note = "A table of counts follows if not all of them are suppressed."
        columns = ("what", "site", "5th percentile", "95th percentile")
        yield Table("Files at the sites, all splits", columns, sorted(rows), note)
    for name, feature in declared.items():
        counts = _file_counts(feature, answers)
        if any(map(_has_count, counts.values())):
            yield _counts(f"{name} of the files, all splits", "", counts)


def _file_counts(feature: MeasuredFeature, answers: Answers) -> dict[str, dict[str, Count]]:
    """Count the files at each site by a property, such as the width of the images.

    The result maps site -> cell -> number of files. A site is left out if it divides the property
    into other cells than ``feature`` does, or sends no counts of it.
    """
    counts = {}
    for site, answer in answers.items():
        # Sites with other edges have other cells, which do not fit into a common table
        is_declared = feature in answer.about.file_features
        if is_declared and answer.files and feature.name in answer.files:
            cells = answer.files[feature.name]
            counts[site] = dict(zip(cell_names(feature), cells, strict=True))
    return counts


def _has_count(cells: Mapping[str, Count]) -> bool:
    """Tell whether at least one count is not suppressed."""
    return any(count is not None for count in cells.values())


def _counts(
    caption: str, heading: str, by_site: Mapping[str, Mapping[str, Count]], note: str = ""
) -> Table:
    """Build a table of counts, with a column for each site.

    Each name in ``by_site`` (site -> name -> count) has a row, in the order of the first site that
    has the name. A missing count is "-". ``heading`` is the title of the column of names.
    ``caption`` and ``note`` are the texts above and below the table.
    """
    names: dict[str, None] = {}
    for counts in by_site.values():
        names |= dict.fromkeys(counts)
    rows = []
    for name in names:
        rows.append((name, *(_cell(counts, name) for counts in by_site.values())))
    return Table(caption, (heading, *by_site), rows, note)


def _cell(counts: Mapping[str, Count], name: str) -> str:
    """Format the count with this name: "-" if it was not sent, "suppressed" if it is hidden."""
    if name not in counts:
        return _NONE
    return _count_text(counts[name])


def _count_text(count: Count) -> str:
    if count is None:
        return "suppressed"
    return str(count)
