"""An optimiser over rounds: what a site keeps of it, and that it is one optimiser."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training import paced_epochs as pacing
from fedsilo.client_app.training.optimisers import moments_of, open_optimiser, restore_moments
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings_schema import Value
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.lab import answer, fitted

Opened = Callable[..., Lab]
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
RUN = {"optimiser_state": "run"}
PREFIX = "pace/optimiser/"


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in ("fedavg", "local", "uefl", "moon", "fedefm")),
        ("fedavg-ft", {"rounds": 4, "fedavg-ft.finetune-rounds": 2}),
    ],
)
def test_a_kept_optimiser_counts_the_steps_of_all_rounds(
    method: str, changes: dict[str, Value], tiny: Tiny, inline_run: InlineRun
) -> None:
    run = inline_run(tiny(method) | {"train.optimiser-state": "run"} | changes)
    rounds = sorted((run.path / "sites" / "s1a").glob("round-*.safetensors"))
    counted = [
        {value.item() for name, value in load_state(path)[0].items() if name.endswith("/step")}
        for path in rounds
    ]
    counts = [max(steps) for steps in counted if steps]
    assert len(counts) >= 2
    assert counts == sorted(set(counts)), "each round goes on where the last one was"


def test_experts_go_on_with_the_warm_ups_optimiser_and_the_router_has_its_own(
    tiny: Tiny, inline_run: InlineRun
) -> None:
    run = inline_run(
        tiny("picsr")
        | {"train.optimiser-state": "run", "rounds": 5, "picsr.experts": "finetuned"}
        | {"picsr.warmup-rounds": 2, "picsr.expert-rounds": 2}
    )
    rounds = sorted((run.path / "sites" / "s1a").glob("round-*.safetensors"))
    *_, experts, router = (load_state(path)[0] for path in rounds)
    steps = [
        {a.item() for n, a in kept.items() if n.endswith("/step")} for kept in (experts, router)
    ]
    assert steps == [{12.0}, {3.0}], "three steps a round, four rounds of the network"


@pytest.mark.parametrize("method", ["fedavg", "fedevprompt"])
def test_an_optimiser_begins_afresh_each_round_by_default(
    method: str, tiny: Tiny, inline_run: InlineRun
) -> None:
    run = inline_run(tiny(method))
    states = (run.path / "sites").glob("*/*.safetensors")
    assert not [n for path in states for n in load_state(path)[0] if n.startswith(PREFIX)]


def test_two_rounds_are_as_many_steps_of_one_optimiser(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept on disk is all that a round hands on: one optimiser in memory ends the same."""
    own = RUN | {"dropout": 0.0}
    stored = []
    for round_ in (1, 2):
        site = opened("local", {}, evaluate=False, own=own, round=round_)
        answer(site)
        path = site.state_files.folder / f"round-{round_:06d}-00.safetensors"
        stored.append(load_state(path)[0])
    both = [
        opened("local", {}, evaluate=False, own=own, round=r, expects_state=False) for r in (1, 2)
    ]
    network = both[0].classifier(None)
    optimiser = open_optimiser(network, both[0].common)
    monkeypatch.setattr(pacing, "open_optimiser", lambda *_: optimiser)
    monkeypatch.setattr(pacing, "restore_moments", lambda *_: None)
    for site in both:
        fitted(site, network)
    for name, tensor in exchanged_arrays(network).items():
        assert torch.equal(tensor, torch.as_tensor(stored[1][name])), name


def test_a_parameter_of_another_shape_begins_afresh() -> None:
    before, after = nn.Linear(3, 2), nn.Linear(3, 4)
    optimiser = torch.optim.Adam(before.parameters())
    before(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    moments = moments_of(optimiser, before)
    second = torch.optim.Adam(after.parameters())
    restore_moments(second, after, moments | {"weight/exp_avg": torch.ones(4, 3)})
    assert not second.state[after.weight], "its other moments are of the old shape"
    assert not second.state[after.bias]
    third = torch.optim.Adam(before.parameters())
    restore_moments(third, before, moments)
    assert third.state[before.weight]["step"].item() == 1


@pytest.mark.parametrize(("fused", "place"), [(True, "meta"), (None, "cpu")])
def test_step_counts_are_where_the_optimiser_reads_them(fused: bool | None, place: str) -> None:
    network = nn.Linear(3, 2, device="meta")  # stands for a GPU
    optimiser = torch.optim.Adam(network.parameters())
    optimiser.param_groups[0]["fused"] = fused
    stored = {"weight/step": torch.tensor(3.0), "weight/exp_avg": torch.ones(2, 3)}
    restore_moments(optimiser, network, stored)
    moments = optimiser.state[network.weight]
    assert moments["step"].device.type == place
    assert moments["exp_avg"].device.type == "meta"


@pytest.mark.parametrize("state", ["round", "run"])
def test_a_plan_of_batches_holds_whether_or_not_the_optimiser_is_kept(
    state: str, opened: Opened
) -> None:
    lab = opened("fedavg", own={"optimiser_state": state})
    lab.fit(lab.classifier(None), plan=[[torch.tensor([0, 1])], [torch.tensor([2, 3, 4])]])
    assert lab.work == {"steps": 2, "samples": 5}
