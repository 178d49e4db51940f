"""FedEFM at a silo: what a host trains, who learns from whom, and what the silo goes on from."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fedsilo.client_app import session
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.loop import LocalTraining, steps_of
from fedsilo.datasets.io.state_files import load_state
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedefm import multishot_loss
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.inline_engine import run_inline
from tests.support.lab import answer
from tests.support.lab import steps_of as fit_of

Opened = Callable[..., Lab]
Arrays = dict[str, Any]
NAMED = {"phase": "overseas", "round": 2, "step": 0}
HOME = {"phase": "distil", "round": 2, "step": 1}


def other(weights: Arrays, seed: int) -> Arrays:
    """Return weights near ``weights``, as another silo's would be."""
    draw = np.random.default_rng(seed)
    return {
        name: array
        if "running" in name or "num_batches" in name
        else (array + 0.05 * draw.standard_normal(array.shape)).astype(np.float32)
        for name, array in weights.items()
    }


def below(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def after_round_1(opened: Opened, weights: Arrays, **own: Any) -> Arrays:
    """Let s1a train alone in round 1, and return its model."""
    reply = answer(opened("fedefm", below("model/", weights), own=own))
    return {name: array.numpy() for name, array in reply.array_records[ARRAYS].items()}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_host_trains_its_visitor_on_its_own_data_for_so_many_steps(
    steps: int, opened: Opened, weights: Arrays
) -> None:
    own = {"overseas_steps": steps, "local_steps": 2, "rate_decay": "inverse-sqrt"}
    visitor = other(weights, 1)
    site = opened("fedefm", below("visitor/s2a/", visitor), own=own, **NAMED)
    back = answer(site).array_records[ARRAYS]
    again = opened("fedefm", below("visitor/s2a/", visitor), own=own, **NAMED)
    common = resolve_steps(again, steps)
    expected = again.classifier({name: torch.from_numpy(a) for name, a in visitor.items()})
    LocalTraining(
        expected,
        again.silo.train,
        common,
        again.compute,
        (2, "s1a", "overseas", "s2a"),
        counted=(steps_of(len(again.silo.train), again.common), 0),
    ).run()
    wanted = exchanged_arrays(cast(nn.Module, expected))
    assert set(back) == {f"visitor/s2a/{name}" for name in wanted}
    for name, array in wanted.items():
        np.testing.assert_array_equal(back[f"visitor/s2a/{name}"].numpy(), array.numpy())
    moved = [not np.array_equal(back[f"visitor/s2a/{n}"].numpy(), a) for n, a in visitor.items()]
    assert any(moved), "it was trained"


def resolve_steps(site: Lab, steps: int) -> Any:
    return dataclasses.replace(site.common, local_steps=steps) if steps else site.common


def start_of(site: Lab) -> dict[str, Any]:
    """Return the arrays from which a silo trains."""
    start: dict[str, Any] = site.session.method._start(site)
    return start


def test_a_silo_goes_on_from_its_own_model_though_theta_came(
    opened: Opened, weights: Arrays
) -> None:
    mine = after_round_1(opened, weights)
    theta = other(weights, 2)
    received = below("model/", theta) | below("expert/s2a/", other(mine, 3))
    start = start_of(opened("fedefm", received, **HOME))
    for name, array in mine.items():
        np.testing.assert_array_equal(start[name].numpy(), array)


def test_from_the_mean_it_goes_on_from_theta_and_says_so_if_that_is_missing(
    opened: Opened, weights: Arrays
) -> None:
    own = {"continue_from": "mean"}
    mine = after_round_1(opened, weights, **own)
    theta, expert = other(weights, 2), below("expert/s2a/", other(mine, 3))
    start = start_of(opened("fedefm", below("model/", theta) | expert, own=own, **HOME))
    for name, array in theta.items():
        np.testing.assert_array_equal(start[name].numpy(), array)
    with pytest.raises(SiteError, match="site s1a received none"):
        start_of(opened("fedefm", expert, own=own, **HOME))


def test_the_own_model_learns_and_the_experts_teach(opened: Opened, weights: Arrays) -> None:
    own = {"dropout": 0.0}
    mine = after_round_1(opened, weights, **own)
    received = {host: other(mine, seed) for host, seed in (("s2a", 3), ("s3a", 4))}
    arrays = below("expert/s2a/", received["s2a"]) | below("expert/s3a/", received["s3a"])
    site = opened("fedefm", arrays, own=own, **HOME)
    start = start_of(site)
    for name, array in mine.items():
        np.testing.assert_allclose(start[name].numpy(), array, atol=1e-6)
    network = site.classifier(start)
    experts: dict[str, TokenClassifier] = {
        host: site.classifier({n: torch.from_numpy(np.asarray(a)) for n, a in arrays.items()})
        for host, arrays in received.items()
    }
    for expert in experts.values():
        cast(nn.Module, expert).eval()
    inputs, labels = site.silo.train.inputs[:8], site.silo.train.labels[:8]
    training = fit_of(site, network)
    network.eval()
    found = training.loss(inputs, labels)
    expected, weighed = multishot_loss(
        network, experts, inputs, labels, site.session.method.settings
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    told = {f"trained.train.closeness-from-{host}" for host in weighed}
    assert told <= site.metrics.keys()


def test_theta_is_sent_each_round_where_silos_go_on_from_it(
    tiny: Callable[..., dict[str, Any]], tmp_path: Any
) -> None:
    def model(start: str, every: int) -> bytes:
        name = f"{start}-{every}"
        more = {"continue_from": start, "evaluate_every": every, "rounds": 3}
        values = tiny("fedefm", topology="ring", **more) | {
            "run.name": name,
            "run.out": str(tmp_path),
        }
        return (run_inline(resolve(values), 3).path / "model.safetensors").read_bytes()

    mean = model("mean", 1)
    assert mean == model("mean", 0), "how often one measures decides nothing"
    assert mean != model("own", 0)


def test_a_silos_images_change_nothing_that_another_sends_before_their_models_met(
    tiny: Callable[..., dict[str, Any]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any exchange a silo's model knows its own images alone."""
    usual = session.load_silo

    def sent(altered: str) -> dict[str, Any]:
        def load(name: str, settings: CommonSettings) -> Silo:
            silo = usual(name, settings)
            if name != altered:
                return silo
            inverted = dataclasses.replace(silo.train, inputs=1 - silo.train.inputs)
            return dataclasses.replace(silo, train=inverted)

        with monkeypatch.context() as patch:
            patch.setattr(session, "load_silo", load)
            name = {"run.name": altered or "plain", "run.out": str(tmp_path)}
            values = tiny("fedefm", topology="ring", silos=5, rounds=1) | name
            path = run_inline(resolve(values), 5).path
        arrays, _ = load_state(next((path / "checkpoints").glob("*.safetensors")))
        return arrays

    plain, altered = sent(""), sent("s2a")
    silos = {name.split("/")[1] for name in plain if name.startswith("silo/")}
    changed = {
        name.split("/")[1]
        for name in plain
        if name.startswith("silo/") and not np.array_equal(plain[name], altered[name])
    }
    assert len(silos) == 5
    assert changed == {"s2a"}


def test_by_average_a_silo_starts_from_half_its_model_and_half_the_visitors_mean(
    opened: Opened, weights: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own model 1, visitors 2 and 4, each a step of 1 further: 1 / 2 + (3 + 5) / 4 = 2.5."""
    own = {"visit": "average", "overseas_steps": 1}
    mine = after_round_1(opened, weights, **own)
    ones = {name: np.ones_like(array) for name, array in mine.items()}
    received = {
        f"neighbour/{s}/{n}": k * a for s, k in (("s2a", 2), ("s3a", 4)) for n, a in ones.items()
    }
    site = opened("fedefm", received, own=own, **(HOME | {"phase": "train", "step": 0}))
    visits: list[Any] = []

    def fit(self: Lab, network: nn.Module, **given: Any) -> None:
        visits.append((given["steps"], given["aside"]))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 1

    monkeypatch.setattr(Lab, "fit", fit)
    monkeypatch.setattr(
        type(site.session.method),
        "_home_model",
        lambda self, lab: {n: torch.ones(a.shape) for n, a in mine.items()},
    )
    start = start_of(site)
    assert visits == [(1, ("overseas", "s2a")), (1, ("overseas", "s3a"))]
    trained = dict(
        site.classifier({n: torch.from_numpy(a) for n, a in mine.items()}).named_parameters()
    )
    for name in trained:
        np.testing.assert_array_equal(start[name].numpy(), np.full_like(mine[name], 2.5))
