"""The page of a survey: who holds what, how far the sites are apart, and what was suppressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedsilo.core.site_facts import SPLITS
from fedsilo.core.survey import Count, MeasuredFeature, Survey
from fedsilo.pages.page import Table, render_page
from fedsilo.reports.survey.document import (
    Between,
    Distances,
    SurveyDocument,
    cell_names,
)
from fedsilo.reports.survey.survey_pictures import (
    feature_pictures,
    is_binary,
    label_picture,
    training_counts,
)

_WORST = 20  # pairs in the table of features
_NONE = "-"  # the hospital keeps it to itself, or there is none
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


def survey_page(document: SurveyDocument) -> str:
    """Build the page of a survey."""
    answers = document.sites
    training = document.distances.get("train", Distances())
    label_drawn = label_picture(answers)
    data = {
        "refused": document.refused,
        "changed": [site for site, answer in answers.items() if answer.about.changed],
        "sites": list(_sites(answers)),
        "label_pictures": [label_drawn] if label_drawn else [],
        "labels": list(_labels(answers)),
        "distances": list(_distances(training)),
        "feature_pictures": feature_pictures(answers, training.features),
        "features": list(_features(answers)),
        "has_files": any(answer.files for answer in answers.values()),
        "files": list(_files(answers)),
    }
    subtitle = f"{document.run}, asked {document.asked}"
    title = f"Survey of {document.dataset}"
    return render_page("survey.html", title, data, subtitle=subtitle, foot=_FOOT)


def _sites(answers: Mapping[str, Survey]) -> Iterator[Table]:
    rows = [
        (
            site,
            *(_cell(answer.samples or {}, split) for split in SPLITS),
            _cell({"count": answer.left_out.count} if answer.left_out else {}, "count"),
            str(answer.about.floor),
            answer.about.on,
        )
        for site, answer in answers.items()
    ]
    columns = ("site", *_SPLIT_NAMES.values(), "left out", "floor", "answered on")
    note = f"{_RULE} Left out: rows that lack a value, or files that cannot be decoded."
    yield Table("Samples", columns, rows, note)
    missing = {s: a.left_out.missing for s, a in answers.items() if a.left_out}
    known = {name for counts in missing.values() for name, n in counts.items() if n is not None}
    lacking = {s: {n: c for n, c in by.items() if n in known} for s, by in missing.items() if by}
    if known:
        note = "For columns that are not listed here, every count is suppressed."
        yield _counts("Rows left out, by the column without a value", "column", lacking, note)


def _labels(answers: Mapping[str, Survey]) -> Iterator[Table]:
    for split, name in _SPLIT_NAMES.items():
        counts = {
            site: dict(zip(answer.about.classes, answer.labels[split], strict=True))
            for site, answer in answers.items()
            if answer.labels and split in answer.labels
        }
        if counts:
            yield _counts(f"Labels, {name} samples", "label", counts)


def _distances(training: Distances) -> Iterator[Table]:
    """Yield the distances of the training samples' labels and features; none without counts."""
    if training.labels:
        note = f"Measured on training samples. {_DISTANCE}"
        rows = [_pair(one) for one in training.labels]
        yield Table("Labels", ("sites", "distance"), rows, note)
    if training.features:
        shown = [(one.feature, *_pair(one)) for one in training.features[:_WORST]]
        more = len(training.features) - len(shown)
        note = f"{more} more pairs are in survey.json." if more else ""
        columns = ("feature", "sites", "distance")
        yield Table("Features, the most different first", columns, shown, note)


def _pair(one: Between) -> tuple[str, str]:
    return ", ".join(one.sites), f"{one.distance:.3f}"


def _features(answers: Mapping[str, Survey]) -> Iterator[Table]:
    declared: dict[str, MeasuredFeature] = {}  # as the first site has it that names it
    for answer in answers.values():
        for feature in answer.about.features:
            declared.setdefault(feature.name, feature)
    rows = [
        (name, site, *statistics)
        for name, feature in declared.items()
        for site, answer in answers.items()
        if not is_binary(cell_names(feature))  # its mean is its count
        if (statistics := _statistics(answer, name))
    ]
    if rows:
        columns = ("feature", "site", "mean", "sd", "5th percentile", "95th percentile")
        yield Table("Training samples", columns, rows)
    for name, feature in declared.items():
        counts = {
            site: dict(zip(cell_names(feature), cells, strict=True))
            for site, cells in training_counts(feature, answers).items()
        }
        if counts:
            yield _counts(f"{name}, training samples", "", counts)


def _statistics(answer: Survey, name: str) -> tuple[str, ...] | None:
    """Return mean, sd and two percentiles of a feature, or None if the site sent none of them."""
    spread = (answer.means or {}).get("train", {}).get(name)
    ends = (answer.percentiles or {}).get("train", {}).get(name)
    if not spread and not ends:
        return None
    values = [spread.mean, spread.sd] if spread else [None, None]
    return tuple(
        _NONE if value is None else f"{value:g}" for value in (*values, *(ends or (None, None)))
    )


def _files(answers: Mapping[str, Survey]) -> Iterator[Table]:
    rows = [
        (name, site, f"{ends[0]:g}", f"{ends[1]:g}")
        for site, answer in answers.items()
        for name, ends in (answer.file_percentiles or {}).items()
    ]
    if rows:
        note = "A table of counts follows if not all of them are suppressed."
        columns = ("what", "site", "5th percentile", "95th percentile")
        yield Table("Files at the sites, all splits", columns, sorted(rows), note)
    declared = {one.name: one for answer in answers.values() for one in answer.about.file_features}
    for name, feature in declared.items():
        counts = {
            site: dict(zip(cell_names(feature), answer.files[name], strict=True))
            for site, answer in answers.items()
            if answer.files and name in answer.files and feature in answer.about.file_features
        }
        if any(count is not None for cells in counts.values() for count in cells.values()):
            yield _counts(f"{name} of the files, all splits", "", counts)


def _counts(
    caption: str, heading: str, by_site: Mapping[str, Mapping[str, Count]], note: str = ""
) -> Table:
    """Return a table with a row for each name that counts have, and a column for each site."""
    names = dict.fromkeys(name for counts in by_site.values() for name in counts)
    rows = [(name, *(_cell(counts, name) for counts in by_site.values())) for name in names]
    return Table(caption, (heading, *by_site), rows, note)


def _cell(counts: Mapping[str, Count], name: str) -> str:
    """Return a count as text."""
    if name not in counts:
        return _NONE
    count = counts[name]
    return "suppressed" if count is None else str(count)
