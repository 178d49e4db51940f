"""What a page may show: an attacker solves for hidden metrics, and must not find them."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.reports.report import READERS, report
from fedsilo.runs.finished_run import FinishedRun, Shown

FLOOR = 10


def _run(
    counts: Sequence[int], right: Sequence[int], floor: int = FLOOR, trust: str = "server"
) -> Shown:
    """Return a run of one site: test samples and right ones by class."""
    recalls = [r / n for r, n in zip(right, counts, strict=True) if n]
    metrics = {"accuracy": sum(right) / sum(counts), "loss": 0.5, "confidence.5.count": 3.0}
    if len(recalls) > 1:
        metrics["balanced-accuracy"] = sum(recalls) / len(recalls)
    metrics |= {f"class.{c}.right": float(r) for c, r in enumerate(right) if counts[c] >= floor}
    row = {"round": "1", "site": "s", "split": "test"}
    silo = {
        "distribution": "s",
        "sizes": {"test": sum(counts)},
        "label_counts": {"test": list(counts)},
        "fingerprints": {"test": "ab"},
        "dropped": 0,
    }
    run = FinishedRun(Path("none"))
    vars(run).update(
        config=SimpleNamespace(),
        silos={"s": silo},
        metric_rows=[
            row | {"metric": name, "value": str(value)} for name, value in metrics.items()
        ],
        summary={
            "rounds": 1,
            "sites": {"s": metrics},
            "mean": metrics,
            "distributions": {"s": metrics},
            "validation": {"mean": {}, "distributions": {}},
        },
        settings=SimpleNamespace(common=CommonSettings(trust=trust, sums_min_count=floor)),
    )
    return run.shown()


def _worlds(
    counts: Sequence[int | None], total: int, metrics: Mapping[str, float]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield all class counts, and right ones, that agree with what is shown."""
    shown_right = [metrics.get(f"class.{c}.right") for c in range(len(counts))]
    sizes = [[n] if n is not None else range(total + 1) for n in counts]
    for n in product(*sizes):
        if sum(n) != total:
            continue
        ranges = [
            [int(r)] if r is not None else range(k + 1) for r, k in zip(shown_right, n, strict=True)
        ]
        for right in product(*ranges):
            if "accuracy" in metrics and sum(right) != round(metrics["accuracy"] * total):
                continue
            recalls = [r / k for r, k in zip(right, n, strict=True) if k]
            balanced = metrics.get("balanced-accuracy")
            if balanced is None or abs(balanced - sum(recalls) / len(recalls)) < 0.0005:
                yield n, right


def _found_out(
    counts: Sequence[int | None], total: int, metrics: Mapping[str, float], place: int
) -> tuple[set[int], set[float]]:
    """Return the possible counts of a class, and its possible sensitivities."""
    possible = list(_worlds(counts, total, metrics))
    assert possible
    return {n[place] for n, _ in possible}, {r[place] / n[place] for n, r in possible if n[place]}


def test_attacker_on_all_metrics_finds_the_suppressed_sensitivity() -> None:
    run = _run([1, 15], [0, 13])
    assert run.whole is not None
    metrics = run.whole.summary["sites"]["s"]
    assert _found_out([1, 15], 16, metrics, 0)[1] == {0.0}
    without = {name: value for name, value in metrics.items() if name != "accuracy"}
    assert _found_out([None, None], 16, without, 0)[1] == {0.0}, "by balanced accuracy"


@st.composite
def _sites(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    counts = draw(st.lists(st.integers(0, 14), min_size=2, max_size=3))
    assume(sum(counts) >= FLOOR and min(counts) < FLOOR)
    return counts, [draw(st.sampled_from([0, n // 2, n, max(0, n - 1)])) for n in counts]


@settings(max_examples=30)
@given(_sites())
def test_attacker_on_shown_metrics_finds_no_figure_of_few_patients(
    site: tuple[list[int], list[int]],
) -> None:
    counts, right = site
    run = _run(counts, right)
    shown, metrics = run.silos["s"]["label_counts"]["test"], run.summary["sites"]["s"]
    for place, count in enumerate(counts):
        if count < FLOOR:
            assert shown[place] is None
            sizes, sensitivities = _found_out(shown, sum(counts), metrics, place)
            assert len(sizes) > 1
            assert len(sensitivities) > 1, "0 of a few, or all of them, follows from nothing"


def test_shown_run_without_a_small_class_is_as_recorded() -> None:
    run = _run([20, 15], [18, 15])
    assert run.whole is not None
    assert run.summary == run.whole.summary
    assert run.metric_rows == run.whole.metric_rows
    assert run.withheld == []


def test_shown_run_of_fewer_than_the_floor_has_nothing_of_the_split() -> None:
    run = _run([4, 5], [4, 4])
    assert run.metric_rows == []
    assert run.summary["mean"] == {}
    assert run.silos["s"]["sizes"] == {"test": None}
    assert run.silos["s"]["label_counts"] == {"test": [None, None]}


def test_shown_run_with_all_right_hides_accuracy_and_counts_by_certainty() -> None:
    shown = {row["metric"] for row in _run([3, 15], [3, 15]).metric_rows}
    assert shown == {"loss"}
    assert "accuracy" in {row["metric"] for row in _run([3, 15], [2, 13]).metric_rows}


def test_shown_run_at_trust_nobody_has_what_such_a_hospital_sends() -> None:
    run = _run([30, 30], [20, 25], trust="nobody")
    assert {row["metric"] for row in run.metric_rows} == {"accuracy", "loss"}


def test_shown_means_are_over_sites_whose_metrics_is_shown() -> None:
    run = _run([1, 15], [0, 13])
    assert "balanced-accuracy" not in run.summary["mean"]
    assert run.summary["mean"]["accuracy"] == pytest.approx(13 / 16)


@pytest.mark.parametrize("reader", READERS)
def test_page_of_a_site_with_one_healthy_patient_has_none_of_his_figures(
    reader: str, hearts: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(hearts / "fedavg-seed0", tmp_path / "run")
    silos: dict[str, Any] = json.loads((run / "silos.json").read_text())
    assert silos["switzerland"]["label_counts"]["test"][0] < FLOOR
    metrics = json.loads((run / "summary.json").read_text())["sites"]["switzerland"]
    html = report([run], reader)
    rows = re.findall(r'<th scope="row">switzerland</th>(.*?)</tr>', html, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    for metric in ("balanced-accuracy", "auc"):
        assert not any(f"{metrics.get(metric, -1):.3f}" in row for row in cells)
    assert not any(cell == "1" for row in cells for cell in row if reader != "dpo")
    assert any("&lt; 10" in row for row in cells)
