"""Tests of the method 'fedavgm': equations, site and server."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.lab import Lab
from fedsilo.core.errors import SettingError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import build
from fedsilo.engines.experiments import find_experiment
from fedsilo.models.methods.fedavgm import FedAvgMSettings
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.fedavgm import FedAvgM
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after
from tests.support.lab import answer
from tests.support.methods import SiteReply

# The equations


def test_the_first_step_is_the_delta_and_the_second_has_momentum() -> None:
    settings = FedAvgMSettings(momentum=0.5, server_learning_rate=0.1)
    step, v = settings.step(np.array([2.0, -4.0]))
    np.testing.assert_allclose(v, [2.0, -4.0])
    np.testing.assert_allclose(step, [0.2, -0.4])
    step, v = settings.step(np.array([1.0, 1.0]), v)
    np.testing.assert_allclose(v, [2.0, -1.0])  # 0.5 * 2 + 1, 0.5 * -4 + 1
    np.testing.assert_allclose(step, [0.2, -0.1])


def test_without_momentum_at_rate_1_a_step_is_the_delta() -> None:
    settings = FedAvgMSettings(momentum=0.0)
    assert settings.step(3.0, 100.0) == (3.0, 3.0)


def test_the_defaults_are_the_papers() -> None:
    assert FedAvgMSettings() == FedAvgMSettings(momentum=0.9, server_learning_rate=1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"fedavgm.momentum": 1.0}, {"fedavgm.momentum": -0.1}, {"fedavgm.server-learning-rate": 0.0}],
)
def test_a_momentum_that_never_ends_and_a_rate_of_nothing_are_refused(
    wrong: dict[str, float],
) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        build(FedAvgMSettings, wrong)


# At a site


@pytest.mark.parametrize("method", ["fedavgm", "fedadam"])
def test_a_site_answers_as_fedavgs_does_to_the_bit(
    method: str, opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    mine = answer(opened(method, weights))[ARRAYS]
    fedavgs = answer(opened("fedavg", weights))[ARRAYS]
    assert set(mine) == set(fedavgs)
    for name in fedavgs:
        assert mine[name].numpy().tobytes() == fedavgs[name].numpy().tobytes()


# At the server

ROOT = Path(__file__).resolve().parents[2]
MEAN = "norm.running_mean"
VARIANCE = "norm.running_var"


def method(participants: Participants, **own: float) -> FedAvgM:
    return FedAvgM(CommonSettings(silos=3, width=1), FedAvgMSettings(**own), participants)


def replies(site_reply: SiteReply, **arrays: tuple[float, float]) -> dict[str, Reply]:
    """Return what two sites of one and of three samples answer, arrays of one number each."""
    return {
        site: site_reply(
            site,
            {name: np.float32([pair[index]]) for name, pair in arrays.items()},
            num_examples=count,
        )
        for index, (site, count) in enumerate((("s1a", 1), ("s2a", 3)))
    }


def values(arrays: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: array.ravel().tolist() for name, array in arrays.items()}


def test_two_rounds_of_two_sites_and_one_weight_go_by_the_equations(
    participants: Participants, site_reply: SiteReply
) -> None:
    server = method(participants, momentum=0.5, server_learning_rate=0.5)
    start = State({"w": np.float32([1])})
    first = state_after(server, start, replies(site_reply, w=(2.0, 6.0)))
    # the mean is (2 + 3 * 6) / 4 = 5, delta 4, v = 4, w = 1 + 0.5 * 4
    assert values(first.arrays) == {"w": [3.0], "moments/w": [4.0]}
    second = state_after(server, first, replies(site_reply, w=(0.0, 4.0)))
    # the mean is 3, delta 0, v = 0.5 * 4, w = 3 + 0.5 * 2
    assert values(second.arrays) == {"w": [4.0], "moments/w": [2.0]}
    assert {array.dtype for array in second.arrays.values()} == {np.dtype(np.float32)}


def test_batch_norms_running_metrics_are_averaged_and_have_no_momentum(
    participants: Participants, site_reply: SiteReply
) -> None:
    server = method(participants, server_learning_rate=0.5)
    start = State({MEAN: np.float32([9]), VARIANCE: np.float32([9])})
    told = replies(site_reply, **{MEAN: (1.0, 5.0), VARIANCE: (2.0, 6.0)})
    assert values(state_after(server, start, told).arrays) == {MEAN: [4.0], VARIANCE: [5.0]}


def test_moments_are_neither_sent_nor_expected_nor_the_model(participants: Participants) -> None:
    server = method(participants)
    state = State({"w": np.float32([1]), "moments/w": np.float32([2])}, 1)
    assert set(arrays_sent(server, state)["s1a"]) == {"w"}
    assert set(evaluation_of(server, state).send["s1a"]) == {"w"}
    assert set(arrays_expected(server, state)["s1a"]) == {"w"}
    assert set(server.model(state)) == {"w"}


def test_without_momentum_at_rate_1_it_is_fedavg_up_to_rounding(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]]
) -> None:
    # One round: a second one's training would make any size of the first one's last bits
    fedavg = spied_run(tiny("fedavg", rounds=1))[1].state.arrays
    loop = spied_run(tiny("fedavgm", rounds=1, momentum=0.0))[1]
    model = loop.method.model(loop.state)
    assert set(model) == set(fedavg)
    unit = np.finfo(np.float32).eps
    for name, array in fedavg.items():
        np.testing.assert_allclose(model[name], array, rtol=unit, atol=unit * 1e-3)


def test_momentum_changes_the_second_round_and_not_the_first(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], recorder: Any
) -> None:
    spied_run(tiny("fedavg"), [recorder])
    spied_run(tiny("fedavgm"), [recorder])
    (first, second), (with_first, with_second) = recorder.states[:2], recorder.states[2:]
    name = "head.4.weight"
    np.testing.assert_allclose(with_first.arrays[name], first.arrays[name], rtol=1e-4, atol=1e-6)
    assert np.abs(with_second.arrays[name] - second.arrays[name]).max() > 1e-3


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_the_checkpoint_holds_the_moments_and_what_is_sent_does_not(
    name: str,
    inline_run: Callable[..., Any],
    spied_run: Callable[..., Any],
    tiny: Callable[..., dict[str, Any]],
) -> None:
    directory = inline_run(tiny(name))
    newest: Path = sorted(directory.checkpoints.glob("*.safetensors"))[-1]
    arrays, _ = load_state(newest)
    model, _ = load_state(directory.path / "model.safetensors")
    moments = {key for key in arrays if key.startswith("moments/")}
    trained = {key for key in model if not key.endswith(("running_mean", "running_var"))}
    assert moments == {f"moments/{key}" for key in trained}
    assert set(arrays) == set(model) | moments
    grid, _ = spied_run(tiny(name))
    assert all(set(message.content[ARRAYS]) == set(model) for message in grid.sent[3:])


def test_what_leaves_a_site_is_fedavgs(participants: Participants) -> None:
    common = resolve(find_experiment(ROOT / "simulation.yaml", "fedavg-mnist").values).common
    server = FedAvgM(common, FedAvgMSettings(), participants)
    fedavg = FedAvg(common, NoSettings(), participants)
    assert server.disclosures().leaves == fedavg.disclosures().leaves
