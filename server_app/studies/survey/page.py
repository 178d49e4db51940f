"""The page of a survey: who holds what, how far the sites are apart, and what was suppressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedsilo.models.contract.site_facts import SPLITS
from fedsilo.models.contract.survey import Count, Measured, Survey
from fedsilo.server_app.studies.report.page import (
    Block,
    Items,
    Pictures,
    Section,
    Table,
    Text,
    page,
)
from fedsilo.server_app.studies.survey.collect import cell_names
from fedsilo.server_app.studies.survey.document import Between, SurveyDocument
from fedsilo.server_app.studies.survey.pictures import feature_pictures, label_picture

_SUPPRESSED = "suppressed"
_WORST = 20  # pairs in the table of features
_KEPT = "-"  # the hospital keeps it, or there is none
_RULE = (
    "'suppressed' is a count below the hospital's own floor, a true zero too, or one that would "
    "give such a count away by subtraction from a total."
)
_DISTANCE = (
    "Jensen-Shannon distance, base 2: 0 is the same distribution, 1 nothing in common. Cells that "
    "one of both has suppressed count as one, so the sites are at least so far apart. Of few "
    "samples some distance is chance."
)
_FOOT = (
    "Counts and figures are those that left the sites. Of a hospital they are its first answer for "
    "this data set, whatever has been asked since."
)


def survey_page(document: SurveyDocument) -> str:
    """Return the page."""
    answers = document.answers
    sections = [
        Section("Sites", list(_sites(document))),
        Section("Labels", list(_labels(document))),
        Section("How far the sites are apart", list(_distances(document))),
        Section("Features", list(_features(document))),
    ]
    if any(answer.files for answer in answers.values()):
        sections.append(Section("Files", list(_files(answers))))
    return page(
        f"Survey of {document.dataset}",
        sections,
        subtitle=f"{document.run}, asked {document.asked}",
        foot=_FOOT,
    )


def _sites(document: SurveyDocument) -> Iterator[Block]:
    answers = document.answers
    if document.refused:
        yield Items(document.refused, "Without an answer")
    changed = [site for site, answer in answers.items() if answer.about.changed]
    if changed:
        yield Text(
            [
                f"The data of {', '.join(changed)} have changed since the answer. A hospital gives "
                "one answer; it can remove the old one itself."
            ],
            warning=True,
        )
    rows = [
        (
            site,
            *(
                _count((answer.samples or {}).get(split), split in (answer.samples or {}))
                for split in SPLITS
            ),
            _count(answer.left_out.count, True) if answer.left_out else _KEPT,
            str(answer.about.floor),
            answer.about.on,
        )
        for site, answer in answers.items()
    ]
    columns = ("site", "training", "validation", "test", "left out", "floor", "answered on")
    note = f"{_RULE} Left out: rows that lack a value, or files that cannot be decoded."
    yield Table("Samples", columns, rows, note)
    if missing := _missing(answers):
        yield missing


def _missing(answers: Mapping[str, Survey]) -> Table | None:
    """Return which values the rows lack that are left out."""
    lacking = {
        s: a.left_out.missing for s, a in answers.items() if a.left_out and a.left_out.missing
    }
    columns = list(dict.fromkeys(name for named in lacking.values() for name in named))
    if not columns:
        return None
    rows = [
        (name, *(_count(lacking[s].get(name), name in lacking[s]) for s in lacking))
        for name in columns
        if any(lacking[s].get(name) is not None for s in lacking)
    ]
    if not rows:
        return None
    note = "Of columns that are not named here every count is suppressed."
    return Table("Rows left out, by the column without a value", ("column", *lacking), rows, note)


def _labels(document: SurveyDocument) -> Iterator[Block]:
    answers = document.answers
    if picture := label_picture(answers):
        yield Pictures([picture])
    for split in SPLITS:
        held = {s: a for s, a in answers.items() if split in (a.labels or {})}
        names = list(dict.fromkeys(name for a in held.values() for name in a.about.classes))
        rows = []
        for name in names:
            cells = [
                _count((a.labels or {})[split][a.about.classes.index(name)], True)
                if name in a.about.classes
                else _KEPT
                for a in held.values()
            ]
            rows.append((name, *cells))
        if rows:
            yield Table(f"Labels, {_named(split)}", ("label", *held), rows)


def _distances(document: SurveyDocument) -> Iterator[Block]:
    labels, features = document.labels.get("train", []), document.features.get("train", [])
    if not labels and not features:
        yield Text(["There are no two sites with counts to compare."])
        return
    if labels:
        note = f"Of training samples. {_DISTANCE}"
        yield Table("Labels", ("sites", "distance"), [_pair(one) for one in labels], note)
    if features:
        rows = [(one.feature, *_pair(one)) for one in features[:_WORST]]
        more = len(features) - len(rows)
        note = f"{more} more pairs are in survey.json." if more else ""
        yield Table(
            "Features, the most different first", ("feature", "sites", "distance"), rows, note
        )


def _pair(one: Between) -> tuple[str, str]:
    return f"{one.sites[0]}, {one.sites[1]}", f"{one.distance:.3f}"


def _features(document: SurveyDocument) -> Iterator[Block]:
    answers = document.answers
    if pictures := feature_pictures(answers, document.features.get("train", [])):
        yield Pictures(pictures)
    if figures := _figures(answers):
        yield figures
    for name, by_site in _declared(answers).items():
        held = {
            site: (answers[site].histograms or {}).get("train", {}).get(name) for site in by_site
        }
        counted = {site: counts for site, counts in held.items() if counts is not None}
        first = next(iter(by_site.values()))
        alike = {site: c for site, c in counted.items() if by_site[site] == first}
        if alike:
            yield _histogram(f"{name}, training samples", first, alike)


def _histogram(title: str, feature: Measured, counts: Mapping[str, Sequence[Count]]) -> Table:
    rows = [
        (cell, *(_count(cells[place], True) for cells in counts.values()))
        for place, cell in enumerate(cell_names(feature))
    ]
    return Table(title, ("", *counts), rows)


def _figures(answers: Mapping[str, Survey]) -> Table | None:
    rows = []
    for name in _declared(answers):
        for site, answer in answers.items():
            spread = (answer.means or {}).get("train", {}).get(name)
            ends = (answer.percentiles or {}).get("train", {}).get(name)
            if spread or ends:
                mean = (f"{spread.mean:g}", f"{spread.sd:g}") if spread else (_KEPT, _KEPT)
                tails = (f"{ends[0]:g}", f"{ends[1]:g}") if ends else (_KEPT, _KEPT)
                rows.append((name, site, *mean, *tails))
    columns = ("feature", "site", "mean", "sd", "5th percentile", "95th percentile")
    return Table("Training samples", columns, rows) if rows else None


def _files(answers: Mapping[str, Survey]) -> Iterator[Block]:
    rows = [
        (name, site, f"{ends[0]:g}", f"{ends[1]:g}")
        for site, answer in answers.items()
        for name, ends in (answer.file_percentiles or {}).items()
    ]
    note = "A table of counts follows where not all of them are suppressed."
    if rows:
        columns = ("what", "site", "5th percentile", "95th percentile")
        yield Table("Files as they lie at the sites, all splits", columns, sorted(rows), note)
    declared = {
        feature.name: feature for a in answers.values() for feature in a.about.file_features
    }
    for name, feature in declared.items():
        counts = {
            site: a.files[name]
            for site, a in answers.items()
            if a.files and name in a.files and feature in a.about.file_features
        }
        if any(count is not None for cells in counts.values() for count in cells):
            yield _histogram(f"{name} of the files, all splits", feature, counts)


def _declared(answers: Mapping[str, Survey]) -> dict[str, dict[str, Measured]]:
    """Return each feature by site, in the order in which sites name them."""
    declared: dict[str, dict[str, Measured]] = {}
    for site, answer in answers.items():
        for feature in answer.about.features:
            declared.setdefault(feature.name, {})[site] = feature
    return declared


def _count(count: Count, told: bool) -> str:
    if not told:
        return _KEPT
    return _SUPPRESSED if count is None else str(count)


def _named(split: str) -> str:
    return {"train": "training samples", "val": "validation samples"}.get(split, "test samples")
