"""What a network takes over from a run's model, and what it leaves to the seed."""

import dataclasses
from typing import Any

import pytest
import torch

from fedsilo.client_app.training.compute import Compute
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.server_app.studies.finetune.data import Pooled
from fedsilo.server_app.studies.finetune.tasks import Segmentation
from fedsilo.server_app.studies.finetune.training import Study, start
from fedsilo.server_app.studies.finetune.transfer import TransferReport, transfer
from fedsilo.server_app.studies.finetune.weights import RunModel


def run_model(common: CommonSettings, task: Task, **more: Any) -> RunModel:
    """Return a run's model with arrays all of 7."""
    network = build_classifier(common, task)
    state = {n: t for n, t in network.state_dict().items() if t.is_floating_point()}
    arrays = {name: torch.full_like(tensor, 7.0) for name, tensor in state.items()}
    return dataclasses.replace(
        RunModel("run", "fedavg", common, arrays, ((), task.classes), True), **more
    )


SMALL = CommonSettings(width=2, device="cpu")


def test_what_does_not_fit_stays_as_the_seed_has_it_and_is_counted() -> None:
    given = run_model(SMALL, Task((3, 16, 16), 2))
    network = build_classifier(SMALL, Task((1, 16, 16), 2))
    before = network.encoder.stages[0].weight.clone()  # type: ignore[index,union-attr]
    report = transfer(network, given, SMALL, ((), 2))
    state = network.state_dict()
    assert report.left == ("encoder.stages.0.weight",), "grey images have another first layer"
    assert torch.equal(state["encoder.stages.0.weight"], before)
    below = {n: t for n, t in state.items() if n.startswith("encoder.") and t.is_floating_point()}
    numbers = sum(tensor.numel() for tensor in below.values())
    assert (report.arrays, report.of) == (len(below) - 1, len(below))
    assert report.share == pytest.approx(1 - 2 * 9 / numbers)
    assert all((t == 7).all() for n, t in below.items() if n not in report.left)
    assert report.head is True
    assert (state["head.4.weight"] == 7).all()
    assert "left to the seed: encoder.stages.0.weight" in report.summary()


@pytest.mark.parametrize("classes", [((), 3), (("a", "b"), 2)])
def test_a_head_for_other_classes_is_the_seed_s(classes: tuple[tuple[str, ...], int]) -> None:
    given = run_model(SMALL, Task((1, 16, 16), 2))
    network = build_classifier(SMALL, Task((1, 16, 16), classes[1]))
    report = transfer(network, given, SMALL, classes)
    assert report.head is False
    assert report.share == 1
    assert not (network.state_dict()["head.1.weight"] == 7).any()


def test_a_run_of_another_width_fits_nowhere_and_is_named() -> None:
    arrays = {"encoder.stages.0.weight": torch.zeros(9, 1, 3, 3)}
    given = run_model(SMALL, Task((1, 16, 16), 2), arrays=arrays)
    with pytest.raises(SettingError, match=r"none of the 1 arrays of run \(network 'conv'\) fits"):
        transfer(build_classifier(SMALL, Task((1, 16, 16), 2)), given, SMALL, ((), 2))


def test_starts_differ_in_nothing_but_what_they_took() -> None:
    images = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    part = Split(images, images[:, 0])
    pooled = Pooled(part, part, part, Task((1, 16, 16), 2), (), ("a",), ("a",))
    compute = Compute(torch.device("cpu"), bf16=False)
    plan = Study(Segmentation("unet"), SMALL, pooled, compute, seeds=1, epochs=1)
    scratch, nothing = start(plan, None, 0)
    given, report = start(plan, run_model(SMALL, Task((1, 16, 16), 2)), 0)
    assert nothing is None
    assert isinstance(report, TransferReport)
    others = [n for n in scratch.state_dict() if not n.startswith("pyramid.encoder.")]
    first, second = scratch.state_dict(), given.state_dict()
    assert len(others) > 10
    assert all(torch.equal(first[name], second[name]) for name in others)
    other, _ = start(plan, None, 1)
    assert not torch.equal(other.state_dict()["head.weight"], first["head.weight"])
