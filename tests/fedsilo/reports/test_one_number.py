"""One run with a small hospital shows one set of numbers, wherever it is read.

The places are the terminal at the end of the run, ``compare``, the three reports, the card, the
notebook and what is sent to a tracker.
"""

import io
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from statistics import fmean

import pytest

import fedsilo
from fedsilo.comparison.over_seeds import Comparison
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.inference.export.card import card_text
from fedsilo.reports.report import report
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records import tracking
from fedsilo.server_app.records.tracking import Scalar
from tests.fedsilo.conftest import HEARTS
from tests.support.setting_keys import as_keys

SITES = ("cleveland", "hungary", "switzerland", "va")
METRICS = ("accuracy", "balanced-accuracy", "auc", "calibration-error")
SMALL = "switzerland"  # 16 test patients, of whom one is healthy
NUMBER = re.compile(r"\d\.\d{3}|n/a")
Numbers = dict[str, dict[str, str]]  # site or "all" -> metric -> number with three decimals


@dataclass
class Printed:
    """A finished run, what its terminal said, and what its tracker was sent."""

    run: FinishedRun
    settings: Mapping[str, Value]
    terminal: str = ""
    sent: list[Scalar] = field(default_factory=list)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Train a run as ``fedsilo compare`` names it, so that it is compared without a second run."""
    sent: list[Scalar] = []

    def open_tracker(*_: object) -> Generator[None, Sequence[Scalar], None]:
        while True:
            sent.extend((yield))

    settings = as_keys(HEARTS) | {"rounds": 3, "seed": 0, "run.track": "tensorboard"}
    own = {"method": "fedavg", "run.name": "fedavg-seed0"}
    own |= {"run.out": str(tmp_path_factory.mktemp("one"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "TRACKERS", {"tensorboard": open_tracker})
        capture = io.StringIO()
        patch.setattr("sys.stdout", capture)
        path = run_inline(resolve(settings | own), len(SITES)).path
    return Printed(FinishedRun.open(path), settings, capture.getvalue(), sent)


def _compare(printed: Printed, no_floor: bool = False) -> Comparison:
    out = printed.run.path.parent
    return fedsilo.compare("fedavg", seeds=1, out=out, settings=printed.settings, no_floor=no_floor)


class _Rows(HTMLParser):
    """Collects the cells of all table rows of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def _numbers(rows: Sequence[Sequence[str]], metrics: Sequence[str]) -> Numbers:
    """Read the first table whose header names all ``metrics``: its rows by site, and of all."""
    found: Numbers = {}
    places: list[int] = []
    for row in rows:
        cells = [cell.strip().removeprefix("test ").replace(" ", "-").lower() for cell in row]
        if not places and set(metrics) <= set(cells):
            places = [cells.index(metric) for metric in metrics]
        elif places and cells and cells[0] in (*SITES, "all") and cells[0] not in found:
            found[cells[0]] = {}
            for metric, place in zip(metrics, places, strict=True):
                match = NUMBER.match(row[place].strip())
                assert match, row
                found[cells[0]][metric] = match[0]
    return found


def _of_page(run: FinishedRun, reader: str, metrics: Sequence[str]) -> Numbers:
    page = _Rows()
    page.feed(report([run.path], reader))
    return _numbers(page.rows, metrics)


def test_every_page_and_table_shows_the_same_numbers(printed: Printed) -> None:
    run = printed.run
    lines = [re.split("[│┃]", line)[1:-1] for line in printed.terminal.splitlines()]
    terminal = _numbers(lines, METRICS)
    assert terminal.keys() == {*SITES, "all"}
    comparison = _compare(printed)
    compared: Numbers = {}
    for row in comparison.results.itertuples():
        if row.experiment == "fedavg":
            compared.setdefault(row.group, {})[row.metric] = f"{row.value:.3f}"
    for numbers in compared.values():
        for metric in METRICS:
            numbers.setdefault(metric, "n/a")
    assert compared == terminal
    assert _of_page(run, "research", METRICS) == terminal
    of_sites = {site: terminal[site] for site in SITES}
    card = [line.strip("|").split("|") for line in card_text(run, None).splitlines()]
    assert _numbers(card, METRICS) == of_sites
    clinic = _of_page(run, "clinic", METRICS[:3])
    for site, numbers in clinic.items():
        assert numbers.items() <= terminal[site].items()
    assert clinic.keys() == set(SITES)
    last = {tag: value for tag, at, value in printed.sent if at == 3}
    for metric in METRICS:
        assert f"{last[f'test/{metric}']:.3f}" == terminal["all"][metric]


def test_all_is_the_mean_over_the_hospitals_that_are_shown(printed: Printed) -> None:
    comparison = _compare(printed)
    means = printed.run.shown().summary["mean"]
    every = printed.run.summary["sites"]
    for metric in ("balanced-accuracy", "auc"):
        assert metric not in printed.run.shown().summary["sites"][SMALL]
        shown = fmean(every[site][metric] for site in SITES if site != SMALL)
        assert means[metric] == pytest.approx(shown)
    told = " ".join(printed.terminal.split())
    notes = " ".join(comparison.notes)
    for text in (told, notes):
        assert f"over 3 of 4 sites, without {SMALL}" in text
        assert f"n/a at {SMALL}: " in text


def test_the_officers_page_has_no_number_of_the_small_hospital(printed: Printed) -> None:
    page = report([printed.run.path], "dpo")
    for metric in METRICS[:3]:
        value = printed.run.summary["sites"][SMALL].get(metric)
        if value is not None:
            assert f"{value:.3f}" not in page


def test_without_the_floor_all_values_are_compared(printed: Printed) -> None:
    results = _compare(printed, no_floor=True).results
    means = results[(results.experiment == "fedavg") & (results.group == "all")]
    assert dict(zip(means.metric, means.value, strict=True)) == pytest.approx(
        {metric: printed.run.summary["mean"][metric] for metric in METRICS}
    )
