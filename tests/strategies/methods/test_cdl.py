from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from torch import nn

from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.cdl import CDLSettings
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.studies.finished_site import finished_site
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.cdl import CDL
from fedsilo.strategies.methods.decentralised import Decentralised

Tiny = Callable[..., dict[str, Any]]
Run = Callable[..., tuple[Any, CDL]]


def sent_arrays(message: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in message.content[ARRAYS].items()}


@pytest.mark.parametrize("kind", ["ring", "complete", "star"])
def test_it_mixes_on_the_topology_that_is_named(participants: Participants, kind: str) -> None:
    settings = CDLSettings(divergence_topology=kind)
    strategy = CDL(CommonSettings(silos=3, width=1), settings, participants)
    assert isinstance(strategy, Decentralised)
    named = "hub" if kind == "star" else kind
    assert strategy.kind() == named
    assert f"'{named}'" in strategy.disclosures().leaves[0]


def test_round_1_is_rings_and_round_2_is_not_and_no_support_model_travels(
    spied_run: Run, tiny: Tiny
) -> None:
    grid, strategy = spied_run(tiny("cdl"))
    ring, _ = spied_run(tiny("ring"))
    for ours, theirs in zip(grid.sent[3:9], ring.sent[3:9], strict=True):
        mine, other = sent_arrays(ours), sent_arrays(theirs)
        assert set(mine) == set(other)
        assert all((mine[name] == other[name]).all() for name in mine)
    replies, others = grid.replies[3:9], ring.replies[3:9]
    names = set(sent_arrays(replies[0]))
    assert all(set(sent_arrays(reply)) == names for reply in [*replies, *others])
    name = "encoder.stages.0.weight"
    same = [
        (sent_arrays(a)[name] == sent_arrays(b)[name]).all()
        for a, b in zip(replies, others, strict=True)
    ]
    assert same == [True] * 3 + [False] * 3
    assert strategy.state.stateful_sites == ("s1a", "s2a", "s3a")


def test_a_finished_runs_model_is_a_plain_network(
    inline_run: Callable[..., Any], tiny: Tiny, tmp_path: Path
) -> None:
    directory = inline_run(tiny("cdl"))
    arrays, _ = load_state(directory.path / "model.safetensors")
    site = finished_site(directory.path, "s1a", None, None)
    opened = exchanged_arrays(cast(nn.Module, site.open()))
    assert set(opened) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(opened[name].cpu().numpy(), array)


def test_no_beta_at_all_is_refused_before_a_run_starts(tiny: Tiny) -> None:
    with pytest.raises(SettingError, match=r"'cdl.divergence-beta' is 0\.0; .*above 0"):
        resolve(tiny("cdl", divergence_beta=0.0))
    with pytest.raises(SettingError, match=r"method 'ring' has no setting 'cdl\.divergence-beta'"):
        resolve(tiny("ring") | {"cdl.divergence-beta": 0.4})
