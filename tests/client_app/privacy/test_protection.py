"""The one way out of a site: ledger, cap, noise; and what a hospital may say of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.client_app.hello import feature_sums
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedevprompt import as_maps
from fedsilo.client_app.privacy.protection import LEDGER, OwnCap, read_own_ledger, spend
from fedsilo.client_app.session import open_session
from fedsilo.client_app.site.identity import site_settings
from fedsilo.datasets.registry import load_silo
from fedsilo.models.contract.errors import (
    ERROR_CODES,
    CheckpointError,
    RefusedError,
    SettingError,
    SiteError,
)
from fedsilo.models.contract.messages import ARRAYS, DP_RELEASES, EVALUATE, METRICS, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedevprompt import map_fault
from fedsilo.models.privacy.accountant import epsilon
from tests.support.lab import answer, evaluate, lab_of, session_with

PRIVATE: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 2.0}
ONE, TWO = epsilon(2.0, 1, 1e-5), epsilon(2.0, 2, 1e-5)
Opened = Callable[..., Lab]
Node = Callable[..., Context]


def ledger(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "sites" / "s1a" / LEDGER).read_text())
    return found


def sent(records: RecordDict) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in records.array_records[ARRAYS].items()}


@pytest.fixture
def at_site(opened: Opened, weights: Mapping[str, Any]) -> Callable[..., Lab]:
    """Return a function that opens FedAvg with differential privacy: settings, fields."""

    def make(own: Mapping[str, Any] | None = None, **fields: Any) -> Lab:
        return opened("fedavg", weights, own={**PRIVATE, **(own or {})}, **fields)

    return make


def test_every_message_with_arrays_is_counted_also_a_repeated_one(
    at_site: Opened, tmp_path: Path
) -> None:
    for count, round_ in ((1, 1), (2, 2), (3, 2)):
        records = answer(at_site(round=round_))
        assert records[METRICS][DP_RELEASES] == count
        assert ledger(tmp_path) == {
            "releases": count,
            "clip-norm": 1.0,
            "noise-multiplier": 2.0,
            "delta": 1e-5,
        }
    asked = evaluate(at_site(round=3, phase=EVALUATE))
    assert (asked[METRICS][DP_RELEASES], ledger(tmp_path)["releases"]) == (3, 3)
    assert (tmp_path / "sites" / "s1a" / LEDGER).stat().st_mode & 0o777 == 0o600


def test_without_clipping_nothing_is_noised_counted_or_written(
    opened: Opened, weights: Mapping[str, Any], tmp_path: Path
) -> None:
    method = opened("fedavg", weights)
    records = method.reply(send={"w": torch.tensor([3.0, 4.0])})
    assert sent(records)["w"].tolist() == [3, 4]
    assert DP_RELEASES not in records[METRICS]
    assert not (tmp_path / "sites").exists()


def test_what_leaves_is_clipped_and_noised(at_site: Opened, weights: Mapping[str, Any]) -> None:
    came = {name: torch.from_numpy(array) for name, array in weights.items()}
    far = {name: array + 100 for name, array in came.items()}
    quiet = sent(at_site({"noise_multiplier": 1e-9}).reply(send=far))
    told = np.concatenate([(quiet[name] - came[name].numpy()).ravel() for name in quiet])
    assert np.linalg.norm(told.astype(np.float64)) == pytest.approx(1, rel=1e-3)
    assert all(array.dtype == np.float32 for array in quiet.values())


def test_the_noise_has_the_deviation_that_was_asked_for(
    at_site: Opened, weights: Mapping[str, Any]
) -> None:
    came = {name: torch.from_numpy(array) for name, array in weights.items()}
    loud = sent(at_site().reply(send=came))
    told = [
        (loud[name] - array.numpy()).ravel()
        for name, array in came.items()
        if not name.endswith("running_var")
    ]
    assert np.concatenate(told).std() == pytest.approx(2, rel=0.05)


def test_a_simulation_repeats_its_noise_and_a_real_site_never_does(at_site: Opened) -> None:
    values = {"w": torch.zeros(50)}

    def told(**fields: Any) -> list[float]:
        return [float(v) for v in sent(at_site(**fields).reply(send=values))["w"]]

    simulated = {"run_dir": "/run"}
    assert told(**simulated) == told(**simulated)
    others = [{"round": 2}, {"step": 1}, {"site": "s2a"}]
    assert all(told(**simulated) != told(**simulated, **other) for other in others)
    assert told() != told()


def test_epsilon_that_is_spent_keeps_everything_at_the_site(
    at_site: Opened, tmp_path: Path
) -> None:
    cap = {"max_epsilon": (ONE + TWO) / 2}
    answer(at_site(cap))
    said = rf"epsilon is spent: 1 noisy messages of this run are {ONE:.4g} .* make it {TWO:.4g}"
    with pytest.raises(SiteError, match=said):
        answer(at_site(cap, round=2))
    assert ledger(tmp_path)["releases"] == 1
    asked = evaluate(at_site(cap, round=3, phase=EVALUATE))
    assert asked[METRICS][DP_RELEASES] == 1, "measuring costs nothing"


def test_exactly_the_cap_may_be_spent(at_site: Opened) -> None:
    assert ARRAYS in answer(at_site({"max_epsilon": ONE})).array_records


def test_a_method_that_sends_nothing_spends_nothing(opened: Opened, tmp_path: Path) -> None:
    records = answer(opened("local", own={**PRIVATE, "max_epsilon": 1e-3}))
    assert records[METRICS][DP_RELEASES] == 0
    assert not (tmp_path / "sites" / "s1a" / LEDGER).exists()


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", "null", '{"releases": 3}'),
        '{"releases": -1, "clip-norm": 1, "noise-multiplier": 2}',
        '{"releases": true, "clip-norm": 1, "noise-multiplier": 2}',
    ],
)
def test_a_damaged_ledger_is_refused(at_site: Opened, tmp_path: Path, content: str) -> None:
    path = tmp_path / "sites" / "s1a" / LEDGER
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"privacy-ledger.json is damaged .* 'run-name'"):
        answer(at_site())
    assert path.read_text() == content


@pytest.mark.parametrize("other", [{"noise_multiplier": 3.0}, {"clip_norm": 2.0}])
def test_a_ledger_of_other_noise_is_refused(at_site: Opened, other: dict[str, float]) -> None:
    at_site().reply(send={"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"counts messages of .* and the run asks for"):
        at_site(other).reply(send={"w": torch.ones(2)})


def test_diverged_training_is_told_of_and_not_hidden_in_noise(
    at_site: Opened, tmp_path: Path
) -> None:
    with pytest.raises(SiteError, match="training diverged, 'b' holds"):
        at_site().reply(send={"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
    assert not (tmp_path / "sites").exists(), "nothing left, and nothing is counted"


def test_noised_maps_are_maps() -> None:
    maps = torch.tensor([[0.5, 0.5, 0.0], [-1.0, 3.0, 1.0], [-1.0, -2.0, 0.0]]).double()
    found = as_maps(maps)
    assert found[0].tolist() == [0.5, 0.5, 0]
    assert found[1].tolist() == [0, 0.75, 0.25]
    assert found[2].tolist() == pytest.approx([1 / 3] * 3)
    assert map_fault(found.float()) is None


def test_the_maps_of_fedevprompt_leave_in_the_form_that_the_server_checks(opened: Opened) -> None:
    found = sent(answer(opened("fedevprompt", own={**PRIVATE, "noise_multiplier": 0.05})))
    assert found
    assert all(map_fault(torch.from_numpy(maps.copy())) is None for maps in found.values())


def real(tmp_path: Path, **node: Any) -> dict[str, Any]:
    return {"site": "s1a", "state-dir": str(tmp_path / "own"), "trust": "server", **node}


@pytest.mark.parametrize(("runs", "own", "least"), [(0.0, 2, 2.0), (3.0, 2, 2.0), (1.0, 2, 1.0)])
def test_a_hospitals_own_cap_can_only_be_the_lower_one(
    context: Node, tmp_path: Path, runs: float, own: float, least: float
) -> None:
    node = context(real(tmp_path, **{"max-epsilon": own}), **PRIVATE, max_epsilon=runs)
    assert site_settings(node).max_epsilon == least


def test_a_hospitals_own_cap_is_at_its_own_delta(context: Node, tmp_path: Path) -> None:
    loose = {**PRIVATE, "delta": 0.9}
    plain = context(real(tmp_path), **loose)
    assert site_settings(plain).delta == 0.9
    capped = context(real(tmp_path, **{"max-epsilon": 2.0}), **loose)
    assert site_settings(capped).delta == 1e-5
    strict = context(real(tmp_path, **{"max-epsilon": 2.0, "delta": 1e-7}), **loose)
    assert site_settings(strict).delta == 1e-7


def test_a_cap_that_is_none_is_refused(context: Node, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="'max-epsilon'"):
        site_settings(context(real(tmp_path, **{"max-epsilon": -1.0}), **PRIVATE))
    free = context(real(tmp_path, **{"max-epsilon": 0}), **PRIVATE, max_epsilon=5.0)
    assert site_settings(free).max_epsilon == 5


def test_a_hospital_with_a_cap_sends_no_arrays_of_a_run_without_clipping(
    context: Node, message: Callable[..., Message], weights: Mapping[str, Any], tmp_path: Path
) -> None:
    node = context(real(tmp_path, **{"max-epsilon": 2.0}))
    with pytest.raises(RefusedError, match="has a cap on epsilon and the run's 'clip-norm' is 0"):
        answer(lab_of(message(TRAIN, weights), node))
    alone = context(real(tmp_path, **{"max-epsilon": 2.0}), method="local")
    with pytest.raises(RefusedError, match="there is no epsilon, of arrays or of measurements"):
        answer(lab_of(message(TRAIN), alone))


def test_a_hospital_with_a_cap_sends_no_exact_sums() -> None:
    free = CommonSettings(dataset="heart-synthetic")
    silo = load_silo("va", free)
    assert feature_sums(session_with(free, silo)) is not None
    capped = dataclasses.replace(free, max_epsilon=2.0)
    with pytest.raises(SiteError, match="site va has a cap on epsilon and sends no exact sums"):
        feature_sums(session_with(capped, silo))
    assert (
        feature_sums(session_with(dataclasses.replace(capped, standardise="declared"), silo))
        is None
    )


def test_a_hospital_may_change_its_cap_during_a_run(
    context: Node, message: Callable[..., Message], tmp_path: Path
) -> None:
    for round_, cap in ((1, 9.0), (2, 8.0)):
        node = context(real(tmp_path, **{"max-epsilon": cap}), method="local", **PRIVATE)
        records = answer(lab_of(message(TRAIN, round=round_), node))
        assert records[METRICS][DP_RELEASES] == 0


def test_the_refusal_reaches_the_server_in_its_own_words(
    context: Node, message: Callable[..., Message], weights: Mapping[str, Any], tmp_path: Path
) -> None:
    node = context(real(tmp_path, **{"max-epsilon": ONE / 2}), **PRIVATE)
    reply = app(message(TRAIN, weights), node)
    assert reply.has_error()
    assert reply.error.reason.startswith("epsilon is spent: 0 noisy messages of all runs")
    assert reply.error.code == ERROR_CODES["epsilon-spent"]


def test_a_site_checks_the_settings_whatever_the_server_has_checked(
    context: Node, tmp_path: Path
) -> None:
    node = context(real(tmp_path))
    node.run_config["clip-norm"] = 1.0
    with pytest.raises(SettingError, match="differential privacy needs both"):
        open_session(node)


def test_a_hospitals_cap_holds_over_all_runs_whatever_their_names(
    context: Node, message: Callable[..., Message], weights: Mapping[str, Any], tmp_path: Path
) -> None:
    node = context(real(tmp_path, **{"max-epsilon": (ONE + TWO) / 2}), **PRIVATE)
    first = answer(lab_of(message(TRAIN, weights, run_name="one"), node))
    assert first[METRICS][DP_RELEASES] == 1
    with pytest.raises(SiteError, match=r"1 noisy messages of all runs .* hospital's own 'max-eps"):
        answer(lab_of(message(TRAIN, weights, run_name="two"), node))
    assert read_own_ledger(tmp_path / "own" / ".own" / "s1a" / LEDGER) == {2.0: 1}
    assert not (tmp_path / "own" / "two" / "s1a" / LEDGER).exists()


def test_messages_of_unlike_noise_add_up_in_the_hospitals_ledger(tmp_path: Path) -> None:
    own = OwnCap(tmp_path / "own.json", epsilon(2.0, 3, 1e-5), 1e-5)
    for z, run in ((2.0, "a"), (4.0, "b"), (4.0, "c"), (4.0, "d"), (4.0, "e")):
        settings = CommonSettings(clip_norm=1.0, noise_multiplier=z)
        spend(tmp_path / run / LEDGER, settings, own)  # four of z = 4 tell what one of z = 2 does
    with pytest.raises(SiteError, match="5 noisy messages of all runs"):
        spend(tmp_path / "f" / LEDGER, CommonSettings(clip_norm=1.0, noise_multiplier=1.0), own)
    spend(tmp_path / "a" / LEDGER, CommonSettings(clip_norm=1.0, noise_multiplier=2.0), own)
    assert read_own_ledger(own.ledger) == {2.0: 2, 4.0: 4}


@pytest.mark.parametrize("text", ["{", "[]", '{"releases": {"x": 1}}', '{"releases": {"2.0": -1}}'])
def test_a_damaged_ledger_of_all_runs_stops_the_site(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"hospital's privacy ledger own.json is damaged"):
        read_own_ledger(tmp_path / "own.json")


def test_messages_side_by_side_are_all_counted(tmp_path: Path) -> None:
    settings = CommonSettings(clip_norm=1.0, noise_multiplier=2.0)
    path = tmp_path / LEDGER
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: spend(path, settings, None), range(40)))
    assert sorted(counts) == list(range(1, 41))
