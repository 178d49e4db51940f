"""Tests of the method 'cross': equations, site, server and whole runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch import nn

from fedsilo.cli.main import main
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.core.errors import SettingError
from fedsilo.core.messages import (
    ARRAYS,
    EVALUATE,
    INCOMING,
    METRICS,
    measurement,
    measurements,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import Value
from fedsilo.models.methods.cross import CROSSED, crossed_metrics, metric_from
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.mixture import expert_array
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays, load_exchanged
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.method import State, initial_weights
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.local import Cross
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate
from tests.support.methods import ALL, InlineRun, Opened, Tiny, fail_in_rounds
from tests.support.tiny import VIT

# The equations


@pytest.mark.parametrize("site", ["ge", "s.1", "a/b", "x-y", "auc-from-ge", ".", "a.b.c"])
def test_a_metrics_of_a_foreign_model_comes_through_the_wire_under_its_name(site: str) -> None:
    name = metric_from("auc", site)
    key = measurement(INCOMING, "test", name)
    assert list(measurements({key: 0.5, "seconds": 1.0})) == [("incoming", "test", name, 0.5)]


def test_metric_from_gives_every_pair_its_own_name() -> None:
    sites = ["b", "from-b", "a-from-b", "auc-from-b"]
    names = [metric_from(m, s) for m in ("accuracy", "balanced-accuracy", "auc") for s in sites]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("task", "metrics"),
    [
        ("classification", CROSSED),
        ("regression", ("mae", "rmse", "r2")),
        ("survival", ("c-index", "brier")),
    ],
)
def test_the_metrics_of_a_task_are_crossed_without_its_loss(
    task: str, metrics: tuple[str, ...]
) -> None:
    assert crossed_metrics(task) == metrics


# At a site. A site that measures all sites' models: its own as ``local`` does, the others by
# hand.

PLAIN = {"mc_passes": 0}


def sent(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the server sends at the end."""
    return {
        expert_array(site, name): array
        for site, arrays in models.items()
        for name, array in arrays.items()
    }


def always(weights: dict[str, Any], label: int) -> dict[str, Any]:
    """Return a model that answers ``label`` whatever it sees."""
    found = {name: np.zeros_like(array) for name, array in weights.items()}
    found["head.4.bias"][label] = 10
    return found


def metrics_of(reply: Any, split: str = "test") -> dict[str, float]:
    return {
        metric: value
        for model, part, metric, value in measurements(dict(reply[METRICS]))
        if (model, part) == ("incoming", split)
    }


def usual(method: str, reply: Any) -> dict[str, Any]:
    skipped = ("seconds", "peak-memory-bytes")
    return {k: v for k, v in reply[METRICS].items() if "-from-" not in k and k not in skipped}


def test_a_site_trains_and_measures_its_own_model_as_local_does_to_the_bit(
    opened: Opened, weights: dict[str, Any]
) -> None:
    crossed = answer(opened("cross", returns=False))
    alone = answer(opened("local"))
    assert ARRAYS not in crossed
    assert usual("cross", crossed) == usual("local", alone)
    last = {"round": 2, "phase": "evaluate"}
    others = sent({"s2a": weights, "s3a": always(weights, 1)})
    assert usual("cross", evaluate(opened("cross", others, **last))) == usual(
        "local", evaluate(opened("local", **last))
    )


def test_the_model_leaves_the_site_when_it_is_asked_for(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("cross")
    reply = answer(method)
    assert set(reply[ARRAYS]) == set(weights)
    kept = exchanged_arrays(cast(nn.Module, opened("cross", round=2).open()))
    for name, array in reply[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), kept[name])


def test_every_model_that_came_is_measured_on_the_sites_own_samples(
    opened: Opened, weights: dict[str, Any]
) -> None:
    answer(opened("cross", own=PLAIN, returns=False))
    labels = opened("cross").silo.test.labels
    first, last = int(labels[0]), int(labels[-1])
    other = {name: array + np.float32(0.01) for name, array in weights.items()}
    received = sent(
        {
            "s1a": weights,
            "s2a": always(weights, first),
            "s3a": other,
            "s4a": always(weights, last),
        }
    )
    method = opened("cross", received, round=2, phase="evaluate", own=PLAIN)
    found = metrics_of(evaluate(method))
    for site, label in (("s2a", first), ("s4a", last)):
        share = (labels == label).double().mean().item()
        assert found[f"accuracy-from-{site}"] == pytest.approx(share)
        assert found[f"balanced-accuracy-from-{site}"] == pytest.approx(1 / len(labels.unique()))
    network = initial_classifier(method.common, method.silo)
    load_exchanged(network, {name: torch.from_numpy(array) for name, array in other.items()})
    with torch.no_grad():
        said = network.eval()(method.silo.test.inputs).argmax(dim=1)
    assert found["accuracy-from-s3a"] == pytest.approx((said == labels).double().mean().item())
    assert "accuracy-from-s2a" in metrics_of(evaluate(method), "val")
    assert not {m for m in found if m.startswith(("loss-from", "entropy-from"))}


def test_what_came_of_the_site_itself_has_its_own_metrics_and_noised_ones_if_it_was_noised(
    opened: Opened, weights: dict[str, Any]
) -> None:
    last: dict[str, Any] = {"round": 2, "phase": "evaluate"}
    reply = answer(opened("cross"))
    own = {name: array.numpy() for name, array in reply[ARRAYS].items()}
    first = always(weights, int(opened("cross").silo.test.labels[0]))
    found = metrics_of(evaluate(opened("cross", sent({"a": first, "s1a": own}), **last)))
    assert {m for m in CROSSED if m in found} == {"accuracy", "balanced-accuracy"}
    for metric in ("accuracy", "balanced-accuracy"):
        assert found[f"{metric}-from-s1a"] == found[metric]
    noised = {name: array + np.float32(1) for name, array in own.items()}
    after = metrics_of(evaluate(opened("cross", sent({"a": noised, "s1a": noised}), **last)))
    assert after["accuracy-from-s1a"] == after["accuracy-from-a"]
    assert after["accuracy"] == found["accuracy"]


@pytest.mark.parametrize("name", ["s.1", "a-from-b", "north.ward_2-b"])
def test_a_sites_name_may_hold_what_parts_metrics(
    opened: Opened, weights: dict[str, Any], name: str
) -> None:
    received = sent({name: always(weights, 1)})
    found = metrics_of(evaluate(opened("cross", received, phase="evaluate", own=PLAIN)))
    assert {m for m in found if "-from-" in m} >= {
        f"accuracy-from-{name}",
        f"balanced-accuracy-from-{name}",
    }


def test_a_site_whose_own_model_did_not_come_is_measured_but_not_in_the_matrix(
    opened: Opened, weights: dict[str, Any]
) -> None:
    received = sent({"s2a": weights})
    found = metrics_of(evaluate(opened("cross", received, phase="evaluate", own=PLAIN)))
    assert "accuracy" in found
    assert "accuracy-from-s1a" not in found
    # It has no state, so its own model is the initial one, as what came here is
    assert found["accuracy-from-s2a"] == found["accuracy"]


def test_one_foreign_model_is_open_at_a_time_and_nothing_is_stored(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[TokenClassifier] = []
    monkeypatch.setattr(
        "fedsilo.client_app.lab.initial_classifier",
        lambda *site: built.append(initial_classifier(*site)) or built[-1],
    )
    received = sent(dict.fromkeys(("s1a", "s2a", "s3a"), weights))
    method = opened("cross", received, phase="evaluate", own=PLAIN)
    assert evaluate(method)[METRICS]["kept-state"] == 0
    assert len(built) == 1
    assert not method.state_files.folder.exists()


def test_a_model_that_does_not_fit_is_refused(opened: Opened, weights: dict[str, Any]) -> None:
    received = sent({"s2a": weights})
    del received[expert_array("s2a", "head.4.bias")]
    with refuses(SettingError, "head.4.bias"):
        evaluate(opened("cross", received, phase="evaluate"))


def test_an_evidential_model_is_measured_with_the_prior_of_the_site_that_tests(
    opened: Opened, weights: dict[str, Any]
) -> None:
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    own = PLAIN | {"loss": "evidential"}
    method = opened("cross", sent({"s2a": zeros}), phase="evaluate", own=own)
    found = metrics_of(evaluate(method))
    # Equal evidence for all classes: it answers the rarest of this site's training samples
    counts = torch.bincount(method.silo.train.labels, minlength=10)
    right = (method.silo.test.labels == counts.argmin()).double().mean().item()
    assert found["accuracy-from-s2a"] == pytest.approx(right)


# At the server. The server's side of ``cross``: what is collected, sent, and put into the matrix.

COMMON = CommonSettings(rounds=3, silos=3, width=1, run_name="run")
WEIGHTS = initial_weights(build_classifier(COMMON, NetworkShape((1, 16, 16), 10)))
STATE = State({}, 3)
Run = Callable[..., tuple[Any, RoundLoop]]


@pytest.fixture
def cross(participants: Participants) -> Cross:
    return Cross(COMMON, NoSettings(), participants)


@pytest.mark.parametrize(("round_", "expects"), [(0, False), (1, False), (2, True)])
def test_only_the_last_round_expects_the_sites_own_models(
    cross: Cross, round_: int, expects: bool
) -> None:
    every = {name: ArraySpec(array.shape) for name, array in WEIGHTS.items()}
    assert arrays_expected(cross, State({}, round_))["s1a"] == (every if expects else {})


def test_weights_cross_the_wire_once_up_and_once_down(
    spied_run: Run, tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy = spied_run(tiny("cross", rounds=3))
    sent, replies = grid.sent[3:], grid.replies[3:]
    carry = [ARRAYS in message.content.array_records for message in sent]
    assert carry == [False] * 9 + [True] * 3
    assert [ARRAYS in reply.content.array_records for reply in replies] == (
        [False] * 6 + [True] * 3 + [False] * 3
    )
    assert [told(message)["returns"] for message in sent] == [False] * 6 + [True] * 3 + [False] * 3
    for message in sent[9:]:
        assert set(message.content[ARRAYS]) == set(strategy.state.arrays)
        for site, reply in zip(ALL, replies[6:9], strict=True):
            for name, array in reply.content[ARRAYS].items():
                received = message.content[ARRAYS][f"expert/{site}/{name}"]
                np.testing.assert_array_equal(received.numpy(), array.numpy())


@pytest.mark.parametrize(("round_", "models"), [(2, ALL), (3, ["s1a", "s3a"]), (4, ALL)])
def test_the_run_goes_on_without_the_model_of_a_site_that_failed_in_the_last_round(
    participants: Participants,
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    told: Any,
    round_: int,
    models: list[str],
) -> None:
    def good(message: Message) -> RecordDict:
        arrays = WEIGHTS if told(message)["returns"] else None
        found: RecordDict = content(arrays, **measured)
        return found

    common = CommonSettings(rounds=3, silos=3, width=1, run_name="run", min_sites=2)
    strategy = RoundLoop(Cross(common, NoSettings(), participants), run_dir="/somewhere")
    grid = spy_grid(fake_app(good, s2a=fail_in_rounds([round_], told, good)))
    strategy.start(grid, 3, 20)
    for arrays in (strategy.state.arrays, grid.sent[-1].content[ARRAYS]):
        assert sorted({name.split("/")[1] for name in arrays}) == models
    assert told(grid.sent[-1])["phase"] == EVALUATE


def auc_metrics(**auc: float) -> dict[str, float]:
    return {f"auc-from-{site}": value for site, value in auc.items()} | {"auc": 0.1, "loss": 2.0}


def test_the_matrix_has_a_row_per_training_site_and_a_column_per_testing_one(cross: Cross) -> None:
    values = {
        "s1a": auc_metrics(s1a=0.9, s2a=0.5, s3a=0.6),
        "s2a": auc_metrics(s1a=0.55, s2a=0.8, s3a=0.65),
        "s3a": auc_metrics(s1a=0.7, s2a=0.75, s3a=0.95),
    }
    assert cross.documents(STATE, values) == {
        "cross.json": {
            "auc": {
                "trained": ALL,
                "tested": ALL,
                "values": [[0.9, 0.55, 0.7], [0.5, 0.8, 0.75], [0.6, 0.65, 0.95]],
            }
        }
    }


def test_what_failed_or_is_undefined_is_null(cross: Cross) -> None:
    values = {
        "s1a": {"accuracy": 0.5, "accuracy-from-s1a": 0.5, "accuracy-from-s3a": 0.25},
        # s2a's model is missing, and so are s3a's metrics
        "s2a": {"accuracy": 1.0, "accuracy-from-s1a": 1.0, "accuracy-from-s3a": 0.75, "auc": 0.5},
    }
    document = cross.documents(STATE, values)["cross.json"]
    assert list(document) == ["accuracy"]
    assert document["accuracy"]["values"] == [[0.5, 1.0, None], [None] * 3, [0.25, 0.75, None]]


def test_without_test_metrics_there_is_no_matrix_and_no_picture(cross: Cross) -> None:
    assert cross.documents(STATE, {}) == {}


def test_cross_says_that_models_go_to_all_others_once_and_are_measured_there(cross: Cross) -> None:
    models, measured = cross.disclosures().leaves
    assert "go to all other sites once" in models
    assert "auc" in measured
    assert "every site's model" in measured


# Whole runs. Whole runs of ``cross``: the diagonal is ``local``, and every file carries the
# matrix.


def metrics(directory: RunDirectory) -> dict[tuple[str, ...], str]:
    return {
        (row["round"], row["site"], row["split"], row["metric"]): row["value"]
        for row in directory.read_csv("metrics.csv")
    }


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="conv"),
        pytest.param(VIT, id="vit", marks=pytest.mark.soak),
        pytest.param({"loss": "evidential"}, id="edl", marks=pytest.mark.soak),
    ],
)
def test_the_diagonal_is_local_to_the_bit(
    changes: dict[str, Value], tiny: Tiny, inline_run: InlineRun
) -> None:
    alone = inline_run(tiny("local", **changes) | {"run.name": "local"})
    crossed = inline_run(tiny("cross", **changes) | {"run.name": "cross"}, draw=True)
    found, local = metrics(crossed), metrics(alone)
    assert {k: v for k, v in found.items() if "-from-" not in k[3]} == local
    foreign = {key for key in found if "-from-" in key[3]}
    assert {key[0] for key in foreign} == {"2"}, "only the final evaluation"
    for site in ALL:
        assert (
            found["2", site, "test", f"accuracy-from-{site}"]
            == (local["2", site, "test", "accuracy"])
        )
    document = crossed.read_json("cross.json")["accuracy"]
    assert document["trained"] == document["tested"] == ALL
    for y, trained in enumerate(ALL):
        for x, tested in enumerate(ALL):
            told = found["2", tested, "test", f"accuracy-from-{trained}"]
            assert document["values"][y][x] == float(told)
    assert (crossed.path / "cross.png").is_file()
    summary = crossed.read_json("summary.json")
    column = [row[1] for row in document["values"]]
    names = [f"accuracy-from-{site}" for site in ALL]
    assert [summary["sites"]["s2a"][name] for name in names] == column
    mean = sum(document["values"][0]) / 3
    assert summary["mean"]["accuracy-from-s1a"] == pytest.approx(mean)


def _hospitals(folder: Path) -> list[str]:
    """Write two sites whose names hold dots and dashes; the truth is age > 50, at 'b.-2' reversed.

    Rows of a site are as many sick as not.
    """
    for site, sick in (("a-from.b", 1), ("b.-2", 0)):
        rows = [f"{age},{sick if age > 50 else 1 - sick}" for age in range(20, 82) if age != 50]
        (folder / f"{site}.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
    (folder / "schema.yaml").write_text(
        "columns:\n  - {name: age}\nlabel: {column: sick, classes: {'no': [0], 'yes': [1]}}\n"
        "sites:\n  a-from.b: a-from.b.csv\n  b.-2: b.-2.csv\n"
    )
    (folder / "simulation.yaml").write_text(
        "experiments:\n  own:\n    config: {method: cross, dataset: table, rounds: 2, "
        "local-steps: 80, learning-rate: 0.1, dropout: 0.0, mc-passes: 0, device: cpu, "
        f"data-dir: {folder}}}\n"
    )
    return ["--file", str(folder / "simulation.yaml"), "--out", str(folder / "out")]


def test_two_sites_of_opposite_truth_do_well_at_home_and_badly_abroad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = _hospitals(tmp_path)
    markdown = tmp_path / "t.md"
    shown = ["--metrics", "auc,auc-from-*", "--markdown", str(markdown)]
    engine = ["--engine", "inline", "--seed", "0", "--name", "own-seed0"]
    assert main(["simulate", "own", *engine, *where]) == 0  # compare runs what is missing slowly
    assert main(["compare", "own", "--seeds", "1", *where, *shown]) == 0
    assert "runs, " not in capsys.readouterr().out
    directory = RunDirectory(tmp_path / "out" / "own-seed0")
    document: dict[str, Any] = json.loads((directory.path / "cross.json").read_text())
    assert list(document) == ["accuracy", "balanced-accuracy", "auc", "average-precision"]
    assert document["auc"]["trained"] == ["a-from.b", "b.-2"]
    assert document["auc"]["values"] == [[1.0, 0.0], [0.0, 1.0]]
    (home, abroad), (back, own) = document["accuracy"]["values"]
    assert min(home, own) > 0.8
    assert max(abroad, back) < 0.2
    title, _, *lines = markdown.read_text().splitlines()
    assert title == (
        "| experiment | group | test auc | test auc-from-a-from.b | test auc-from-b.-2 |"
    )
    assert lines[:3] == [
        "| own | a-from.b | 1.000 | 1.000 | 0.000 |",
        "| own | b.-2 | 1.000 | 0.000 | 1.000 |",
        "| own | all | 1.000 | 0.500 | 0.500 |",
    ]
