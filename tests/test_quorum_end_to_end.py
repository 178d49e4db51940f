"""Rounds that end without all sites: the same bytes with each engine, and after each kill."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from flwr.app import Message

import fedsilo.server_app.run.inline_engine
from fedsilo.models.contract.errors import FedsiloError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.inline_engine import InlineGrid, run_inline
from fedsilo.server_app.run.process_engine import run_with_processes

Tiny = Callable[..., dict[str, Value]]
SLOW = {"speeds": "{s3a: 0.4}", "round-quorum": 0.6}
WAYS = ("drop", "discounted")
INT8 = {"wire-precision": "int8", "wire-top-k": 0.3}


def values_of(tiny: Tiny, late: str, out: Path, method: str = "fedavg") -> dict[str, Value]:
    named = {"late-replies": late, "out": str(out), "run-name": "run", "rounds": 5}
    return tiny(method) | SLOW | named


def digests(directory: RunDirectory) -> dict[str, bytes]:
    names = ("metrics.csv", "model.safetensors", "arrivals.csv")
    files = [*(directory.path / name for name in names), *directory.path.glob("sites/*/*")]
    return {str(path.relative_to(directory.path)): path.read_bytes() for path in files}


def rows(directory: RunDirectory) -> list[tuple[int, str, int, float]]:
    with (directory.path / "arrivals.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    return [(int(r["round"]), r["site"], int(r["asked"]), float(r["seconds"])) for r in read]


def test_a_site_of_less_than_half_the_speed_answers_every_third_round(
    tiny: Tiny, tmp_path: Path
) -> None:
    """36 samples in batches of 16 are 3 steps: 3 seconds, and 7.5 at 0.4 steps a second."""
    directory = run_inline(resolve(values_of(tiny, "discounted", tmp_path)), 3)
    assert rows(directory) == [
        (1, "s1a", 1, 3.0),
        (1, "s2a", 1, 3.0),
        (2, "s1a", 2, 6.0),
        (2, "s2a", 2, 6.0),
        (3, "s3a", 1, 7.5),
        (3, "s1a", 3, 9.0),
        (3, "s2a", 3, 9.0),
        (4, "s1a", 4, 12.0),
        (4, "s2a", 4, 12.0),
        (5, "s1a", 5, 15.0),
        (5, "s2a", 5, 15.0),
    ]
    stale = [r for r in directory.read_csv("metrics.csv") if r["metric"] == "staleness"]
    assert [(r["round"], r["site"], r["value"]) for r in stale] == [("3", "s3a", "2")]
    assert set(directory.read_json("summary.json")["sites"]) == {"s1a", "s2a", "s3a"}


@pytest.mark.parametrize(
    ("late", "wire"), [("drop", {}), ("discounted", {}), ("discounted", INT8)], ids=str
)
def test_processes_give_the_same_bytes(
    late: str, wire: dict[str, Value], tiny: Tiny, tmp_path: Path
) -> None:
    inline = run_inline(resolve(values_of(tiny, late, tmp_path / "inline") | wire), 3)
    asked = resolve(values_of(tiny, late, tmp_path / "processes") | wire)
    resources: dict[str, Value] = {"num-supernodes": 3, "init-args-num-cpus": 2}
    assert digests(run_with_processes(asked, resources)) == digests(inline)


def test_a_discounted_reply_changes_the_model_and_a_dropped_one_does_not(
    tiny: Tiny, tmp_path: Path
) -> None:
    models = {}
    for late in WAYS:
        directory = run_inline(resolve(values_of(tiny, late, tmp_path / late)), 3)
        models[late] = (directory.path / "model.safetensors").read_bytes()
    assert models["drop"] != models["discounted"]
    # Without the late site's question the others' rounds are the same
    norms = [
        {(r["round"], r["site"]): r["value"] for r in run.read_csv("metrics.csv")
         if r["metric"] == "norm" and r["round"] in "12"}
        for run in (RunDirectory(tmp_path / late / "run") for late in WAYS)
    ]  # fmt: skip
    assert norms[0] == norms[1]


class DyingGrid(InlineGrid):
    """Takes the process down, as it were, after ``lives`` answered messages."""

    lives = -1

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if type(self).lives == 0:
            raise KeyboardInterrupt
        type(self).lives -= 1
        return super().pull_messages(message_ids)


@pytest.mark.parametrize(
    ("method", "late", "wire"),
    [
        ("fedavg", "discounted", {}),
        ("fedavg", "drop", {}),
        ("scaffold", "discounted", {}),
        ("ditto", "drop", {}),
        ("fedavg", "discounted", INT8),
        ("scaffold", "drop", INT8 | {"wire-down": "bf16"}),
    ],
    ids=str,
)
def test_a_run_killed_at_any_message_resumes_to_the_same_bytes(
    method: str,
    late: str,
    wire: dict[str, Value],
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = values_of(tiny, late, tmp_path / "whole", method) | wire
    whole = digests(run_inline(resolve(values), 3))
    monkeypatch.setattr(fedsilo.server_app.run.inline_engine, "InlineGrid", DyingGrid)
    for lives in (
        range(4, 17) if (method, late, wire) == ("fedavg", "discounted", {}) else (8, 10, 13)
    ):
        again = values | {"out": str(tmp_path / f"{lives}")}
        monkeypatch.setattr(DyingGrid, "lives", lives)
        with pytest.raises(KeyboardInterrupt):
            run_inline(resolve(again), 3)
        monkeypatch.setattr(DyingGrid, "lives", -1)
        assert digests(run_inline(resolve(again | {"resume": True}), 3)) == whole, lives


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"round-quorum": 1.5}, "'round-quorum' is 1.5; it must be a number, above 0 and at most"),
        ({"round-quorum": 0.3}, "leaves 1 of 3 sites: a mean needs two"),
        ({"method": "uefl"}, "method 'uefl' does not average what all sites send"),
        ({"secure-aggregation": "secagg", "clip-norm": 1.0}, "a sum in secret needs all sites"),
        ({"sites-per-round": 2}, "set 'sites-per-round' to 0"),
        ({"speeds": "{north: 2}"}, "'speeds' names site 'north'; the sites are s1a, s2a, s3a"),
        ({"speeds": "{s1a: 0}"}, "the speed of site s1a in 'speeds' is 0; it must be a number ab"),
        ({"speeds": "[1, -2, 1]"}, "the speed of site 2 in 'speeds' is -2; it must be a number"),
        ({"speeds": "[1, 1]"}, "has 2 speeds, and there are 3 sites"),
        ({"speeds": "lognormal:fast"}, "the deviation of 'speeds' is 'fast'; it must be a number"),
        ({"speeds": "gone.yaml"}, "gone.yaml"),
        ({"speeds": "fast"}, "'speeds' is 'fast'; it must be a mapping, as {north: 0.1}"),
    ],
    ids=str,
)
def test_what_no_quorum_or_clock_can_be_is_refused_in_one_line(
    changes: dict[str, Value], told: str, tiny: Tiny, tmp_path: Path
) -> None:
    values = values_of(tiny, "drop", tmp_path) | changes
    with pytest.raises(FedsiloError) as caught:
        run_inline(resolve(values), 3)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
