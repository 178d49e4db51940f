from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from torch import nn

from fedsilo.client_app.explain.sample import explain_sample
from fedsilo.client_app.privacy.ledger import LEDGER
from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.moon import MoonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.studies.finished_site import finished_site
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.moon import Moon
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after

Tiny = Callable[..., dict[str, Any]]
Run = Callable[..., tuple[Any, RoundLoop]]
HEAD = {f"projection/layers.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}


@pytest.fixture
def moon(participants: Participants) -> Moon:
    return Moon(CommonSettings(silos=3, width=2), MoonSettings(), participants)


def test_the_network_starts_as_fedavgs_with_a_head_beside_it(
    moon: Moon, participants: Participants
) -> None:
    start = moon.initial_state().arrays
    fedavg = FedAvg(moon.common, NoSettings(), participants).initial_state().arrays
    assert set(start) == set(fedavg) | HEAD
    for name, array in fedavg.items():
        np.testing.assert_array_equal(start[name], array)
    assert start["projection/layers.0.weight"].shape == (8, 8)  # the encoder's 4 * width
    assert start["projection/layers.2.weight"].shape == (256, 8)
    assert all(start[name].any() for name in HEAD)


def test_the_head_goes_out_to_train_and_not_to_evaluate_and_is_no_part_of_the_model(
    moon: Moon, participants: Participants
) -> None:
    state = moon.initial_state()
    network = set(state.arrays) - HEAD
    assert set(arrays_sent(moon, state)["s1a"]) == network | HEAD
    assert set(arrays_expected(moon, state)["s1a"]) == network | HEAD
    assert set(evaluation_of(moon, state).send["s1a"]) == network
    assert set(moon.model(state)) == network


def test_the_head_is_averaged_by_samples_as_the_weights_are(
    moon: Moon, site_reply: Callable[..., Any]
) -> None:
    before = State({"w": np.float32([0]), "projection/w": np.float32([0])}, 1)
    replies = {
        "s1a": site_reply("s1a", {"w": [1.0], "projection/w": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [5.0], "projection/w": [6.0]}, num_examples=3),
    }
    after = state_after(moon, before, replies)
    assert (after.arrays["w"].tolist(), after.arrays["projection/w"].tolist()) == ([4.0], [5.0])


def test_it_tells_that_the_head_leaves(moon: Moon) -> None:
    told = moon.disclosures().leaves
    assert "all weights" in told[0]
    assert "projection head" in told[1]


def test_round_1_is_fedavgs_and_round_2_is_not(spied_run: Run, tiny: Tiny, recorder: Any) -> None:
    grid, loop = spied_run(tiny("moon"), [recorder])
    fedavg, _ = spied_run(tiny("fedavg"))
    first = {name: array for name, array in recorder.states[0].arrays.items() if name not in HEAD}
    sent, other = grid.sent[6].content[ARRAYS], fedavg.sent[6].content[ARRAYS]
    for name, array in first.items():
        np.testing.assert_array_equal(array, other[name].numpy())
        np.testing.assert_array_equal(array, sent[name].numpy())
    name = "encoder.stages.0.weight"
    after = grid.replies[6].content[ARRAYS][name].numpy()
    assert (after != fedavg.replies[6].content[ARRAYS][name].numpy()).any()
    assert recorder.states[0].stateful_sites == ("s1a", "s2a", "s3a")
    assert set(loop.method.model(loop.state)) == set(first)


def test_a_finished_runs_model_is_a_plain_network(
    inline_run: Callable[..., Any], tiny: Tiny
) -> None:
    directory = inline_run(tiny("moon"))
    arrays, _ = load_state(directory.path / "model.safetensors")
    common = resolve(tiny("fedavg")).common
    site = finished_site(directory.path, "s1a", None, None)
    network = build_classifier(common, site.silo.task)
    assert set(arrays) == set(exchanged_arrays(network))
    opened = exchanged_arrays(cast(nn.Module, site.open()))
    for name, array in arrays.items():
        np.testing.assert_array_equal(opened[name].cpu().numpy(), array)
    assert explain_sample(site, "test", 0).lines()


def test_with_differential_privacy_the_head_is_noised_with_the_rest(
    inline_run: Callable[..., Any], tiny: Tiny, tmp_path: Path
) -> None:
    private = {"sample_clip_norm": 1.0, "noise_multiplier": 0.5, "rounds": 1}
    directory = inline_run(tiny("moon", **private))
    noised, _ = load_state(sorted(directory.checkpoints.glob("*.safetensors"))[-1])
    plain = inline_run(tiny("moon", rounds=1), out=tmp_path / "plain")
    whole, _ = load_state(sorted(plain.checkpoints.glob("*.safetensors"))[-1])
    heads = [name for name in noised if name in HEAD or name.split("/", 1)[-1] in HEAD]
    assert len(heads) == 4
    for name in heads:  # without noise round 1 leaves them as they are
        assert np.abs(noised[name] - whole[name]).mean() > 5e-4
    assert (directory.path / "sites" / "s1a" / LEDGER).is_file()


def test_no_mu_at_all_is_refused_before_a_run_starts(tiny: Tiny) -> None:
    with pytest.raises(SettingError, match=r"'moon.contrast-mu' is 0\.0; .*above 0"):
        resolve(tiny("moon", contrast_mu=0.0))
    with pytest.raises(SettingError, match=r"method 'fedavg' has no setting 'moon\.contrast-mu'"):
        resolve(tiny("fedavg") | {"moon.contrast-mu": 0.5})
