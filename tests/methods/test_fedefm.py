"""Tests of the method 'fedefm': equations, site and whole runs."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

import fedsilo.engines.inline_engine
from fedsilo.client_app import opening
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedefm import FedEFMSite
from fedsilo.client_app.training.loop import LocalTraining, steps_of
from fedsilo.core.array_names import by_site
from fedsilo.core.errors import SiteError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, CONFIG
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.engines.inline_engine import InlineGrid, run_inline
from fedsilo.models.methods import fedefm
from fedsilo.models.methods.decentralised import mix_models
from fedsilo.models.methods.fedefm import (
    EXPERT,
    VISITOR,
    FedEFMSettings,
    batch_closeness,
    distillation,
    multishot_loss,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from tests.support.lab import answer
from tests.support.lab import steps_of as fit_of
from tests.support.methods import InlineRun, Opened, Tiny

# The equations. FedEFM's loss: plain distillation where closeness is 1, and nothing of it where
# it is 0.

PLAIN = FedEFMSettings()


def _network(seed: int) -> TokenClassifier:
    settings = CommonSettings(network="conv", width=4, dropout=0.0, seed=seed)
    return build_classifier(settings, NetworkShape((1, 16, 16), 3)).eval()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 1, 16, 16), torch.tensor([0, 1, 2, 0, 1, 2])


def test_distillation_by_hand() -> None:
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * math.log(3), 0.0]])
    # At T = 2 the teacher is (3/4, 1/4), the student (1/2, 1/2)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert distillation(student, teacher, 2.0).item() == pytest.approx(4 * forward)


def test_with_closeness_one_and_one_neighbour_it_is_plain_distillation(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedefm, "batch_closeness", lambda *_: torch.tensor(1.0))
    inputs, labels = batch
    student, expert = _network(0), _network(1)
    settings = dataclasses.replace(PLAIN, distillation_beta=0.3, temperature=2.0)
    loss, told = multishot_loss(student, {"j": expert}, inputs, labels, settings)
    plain = 0.3 * distillation(student(inputs), expert(inputs), 2.0)
    plain = plain + 0.7 * torch.nn.functional.cross_entropy(student(inputs), labels)
    torch.testing.assert_close(loss, plain)
    assert told == {"j": 1.0}


def test_each_expert_weighs_as_near_as_it_is_and_gets_no_gradient(
    batch: tuple[Tensor, Tensor],
) -> None:
    inputs, labels = batch
    student, near, far = _network(0), _network(0), _network(1)
    loss, told = multishot_loss(student, {"near": near, "far": far}, inputs, labels, PLAIN)
    loss.backward()
    assert told["near"] == pytest.approx(1, abs=1e-6)
    assert 0 <= told["far"] < told["near"]
    assert all(p.grad is None for p in [*near.parameters(), *far.parameters()])
    assert any(p.grad is not None and p.grad.any() for p in student.parameters())


def test_in_training_too_a_model_is_nearest_to_itself(batch: tuple[Tensor, Tensor]) -> None:
    inputs, labels = batch
    student, expert = _network(0).train(), _network(0)
    dropping = student.get_submodule("head.0")
    dropping.eval()  # a module that the caller keeps at rest
    _, told = multishot_loss(student, {"self": expert}, inputs, labels, PLAIN)
    assert told["self"] == pytest.approx(1, abs=1e-6)
    assert student.training
    assert not dropping.training
    once = _network(0).train()
    once(inputs)
    torch.testing.assert_close(student.state_dict(), once.state_dict())  # a batch counts once


def test_the_closeness_has_gradients_only_if_the_setting_says_so(
    batch: tuple[Tensor, Tensor],
) -> None:
    """By the product rule: d(w D) is w dD with a constant w, and w dD + D dw with gradients."""
    inputs, labels = batch
    student, expert = _network(1), _network(2).requires_grad_(False)

    def gradients(loss: Tensor) -> Tensor:
        parts = torch.autograd.grad(loss, list(student.parameters()), allow_unused=True)
        return torch.cat([part.flatten().double() for part in parts if part is not None])

    beta_one = dataclasses.replace(PLAIN, distillation_beta=1.0)
    moving = dataclasses.replace(beta_one, emd_gradient=True)
    weights = list(student.parameters())
    constant = gradients(multishot_loss(student, {"j": expert}, inputs, labels, beta_one)[0])
    both = gradients(multishot_loss(student, {"j": expert}, inputs, labels, moving)[0])

    own_map, other_map = student.encode_with_map(inputs)[1], expert.encode_with_map(inputs)[1]
    taught = expert.classify(expert.features(expert.encode(inputs)))
    logits = student.classify(student.features(student.encode(inputs)))
    distance = float(distillation(logits, taught, PLAIN.temperature))
    of_weight = torch.autograd.grad(
        batch_closeness(own_map, other_map, moving), weights, allow_unused=True
    )
    expected = [
        torch.zeros_like(weight) if part is None else part
        for weight, part in zip(weights, of_weight, strict=True)
    ]
    more = distance * torch.cat([part.flatten().double() for part in expected])
    assert more.norm() > 0.01 * constant.norm()
    torch.testing.assert_close(both, constant + more, rtol=1e-4, atol=1e-6)


def test_a_negative_closeness_weighs_nothing() -> None:
    maps = torch.rand(2, 3, 3, 4) + 0.1
    assert batch_closeness(maps, -maps, PLAIN).item() == 0
    assert batch_closeness(maps, maps, PLAIN).item() == pytest.approx(1)


def test_mixing_by_hand_and_without_a_model_that_did_not_come() -> None:
    models = {"b": {"w": torch.tensor([2.0])}, "a": {"w": torch.tensor([6.0])}}
    assert mix_models(models, {"a": 0.25, "b": 0.75})["w"].tolist() == [3.0]
    # c is missing: the weights that are left are scaled to 1
    assert mix_models(models, {"a": 0.125, "b": 0.375, "c": 0.5})["w"].tolist() == [3.0]
    assert by_site({"a/w.x": 1, "b/w.x": 2}) == {"a": {"w.x": 1}, "b": {"w.x": 2}}


# At a site. FedEFM at a silo: what a host trains, who learns from whom, and what the silo goes on
# from.

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
    usual = opening.load_silo

    def sent(altered: str) -> dict[str, Any]:
        def load(name: str, settings: CommonSettings) -> Silo:
            silo = usual(name, settings)
            if name != altered:
                return silo
            inverted = dataclasses.replace(silo.train, inputs=1 - silo.train.inputs)
            return dataclasses.replace(silo, train=inverted)

        with monkeypatch.context() as patch:
            patch.setattr(opening, "load_silo", load)
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


# Whole runs. Whole runs of FedEFM: who is sent what, its bytes, and a silo that dies between the
# phases.


class _Spy(InlineGrid):
    """Keeps every message."""

    seen: list[tuple[str, int, list[str]]]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            config = message.content.config_records[CONFIG]
            arrays = message.content.array_records
            names = sorted(arrays[ARRAYS]) if ARRAYS in arrays else []
            phase, node = str(config.get("phase", "hello")), message.metadata.dst_node_id
            type(self).seen.append((phase, node, names))
        return super().push_messages(sent)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> type[_Spy]:
    monkeypatch.setattr(fedsilo.engines.inline_engine, "InlineGrid", _Spy)
    _Spy.seen = []
    return _Spy


def test_models_travel_as_the_ring_says_and_nothing_else_does(
    tiny: Tiny, inline_run: InlineRun, spied: type[_Spy]
) -> None:
    directory = inline_run(tiny("fedefm", topology="ring"))
    nodes = sorted({node for _, node, _ in spied.seen})
    sites = dict(zip(nodes, ["s1a", "s2a", "s3a"], strict=True))
    before = {"s1a": "s3a", "s2a": "s1a", "s3a": "s2a"}
    overseas = [(sites[n], names) for phase, n, names in spied.seen if phase == "overseas"]
    assert [site for site, _ in overseas] == ["s1a", "s2a", "s3a"]
    after = {there: here for here, there in before.items()}
    for site, names in overseas:  # a silo hosts the one that it is the predecessor of
        assert {name.split("/")[1] for name in names} == {after[site]}
        assert all(name.startswith(VISITOR) for name in names)
    for phase, node, names in spied.seen:
        if phase == "distil":
            experts = [name for name in names if name.startswith(EXPERT)]
            assert {name.split("/")[1] for name in experts} == {before[sites[node]]}
            assert all(name.startswith((EXPERT, "model/")) for name in names)
    document = directory.read_json("closeness.json")
    assert sorted(document) == ["s1a<-s3a", "s2a<-s1a", "s3a<-s2a"]
    assert all(0 <= weight <= 1 for line in document.values() for weight in line.values())


@pytest.mark.parametrize(("topology", "neighbours"), [("ring", 1), ("complete", 2)])
def test_overseas_takes_two_models_a_neighbour_more_and_the_relay_a_third(
    topology: str, neighbours: int, tiny: Tiny, inline_run: InlineRun
) -> None:
    rows = inline_run(tiny("fedefm", topology=topology)).read_csv("traffic.csv")
    sent: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row["site"] == "s1a" and row["round"] in ("1", "2"):
            sent[row["phase"]] = (int(row["bytes_down"]), int(row["bytes_up"]))
    model = sent["train"][1]  # FedAvg's one model up; down another
    both = sum(sent["overseas"])
    assert both == pytest.approx(2 * neighbours * model, rel=0.05)
    assert sent["distil"][0] == pytest.approx((1 + neighbours) * model, rel=0.05)
    assert sent["distil"][1] == pytest.approx(model, rel=0.05)


def _distilled(facts: Mapping[str, Any], round_: str) -> set[str]:
    """Return the silos that a checkpoint has the closeness of a round of."""
    return {edge.partition("<-")[0] for edge in facts["extras"]["closeness"][round_]}


def test_a_silo_that_dies_between_the_phases_is_left_out_of_the_mean_and_the_run_resumes(
    tiny: Tiny,
    inline_run: InlineRun,
    spied: type[_Spy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tiny("fedefm", rounds=3, min_sites=2)
    start = FedEFMSite._start

    def dying(site: FedEFMSite, lab: Lab) -> dict[str, Tensor]:
        now = lab.instruction
        if (lab.site, now.phase, now.round) == ("s2a", "distil", 2):
            raise SiteError("site s2a has died")
        return start(site, lab)

    monkeypatch.setattr(FedEFMSite, "_start", dying)
    whole = inline_run(values, out=tmp_path / "whole")
    arrays, facts = load_state(whole.path / "checkpoints" / "round-000002.safetensors")
    assert _distilled(facts, "2") == {"s1a", "s3a"}
    name = next(n for n in sorted(arrays) if n.startswith("model/"))
    own = [arrays[name.replace("model/", f"silo/{site}/")] for site in ("s1a", "s3a")]
    assert arrays[name] == pytest.approx((own[0] + own[1]) / 2, abs=1e-6)
    assert not any(n.startswith("back/") for n in arrays)
    _, facts = load_state(whole.path / "checkpoints" / "round-000003.safetensors")
    assert _distilled(facts, "3") == {"s1a", "s2a", "s3a"}, "it is back in the next round"

    class Dying(_Spy):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            if [phase for phase, _, _ in _Spy.seen].count("overseas") > 3:
                raise KeyboardInterrupt  # in round 3
            return super().pull_messages(message_ids)

    spied.seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", Dying)
        with pytest.raises(KeyboardInterrupt):
            inline_run(values, out=tmp_path / "cut")
    cut = inline_run({**values, "resume": True}, out=tmp_path / "cut")
    for file in ("metrics.csv", "model.safetensors"):
        assert (cut.path / file).read_bytes() == (whole.path / file).read_bytes()


def test_by_average_models_go_to_their_hosts_and_no_expert_comes_home(
    tiny: Tiny, inline_run: InlineRun, spied: type[_Spy]
) -> None:
    directory = inline_run(tiny("fedefm", topology="complete", visit="average"))
    assert {phase for phase, _, _ in spied.seen} == {"hello", "train", "evaluate"}
    received = [names for phase, _, names in spied.seen if phase == "train"][-1]
    assert {name.split("/")[1] for name in received if name.startswith("neighbour/")} == {
        "s1a",
        "s2a",
    }
    assert directory.read_json("summary.json")["mean"]["accuracy"] > 0
