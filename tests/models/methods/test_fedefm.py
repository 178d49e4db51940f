"""FedEFM's loss: plain distillation where closeness is 1, and nothing of it where it is 0."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fedsilo.models.contract.array_names import by_site
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods import fedefm
from fedsilo.models.methods.decentralised import mix_models
from fedsilo.models.methods.fedefm import (
    FedEFMSettings,
    batch_closeness,
    distillation,
    multishot_loss,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import TokenClassifier

PLAIN = FedEFMSettings()


def _network(seed: int) -> TokenClassifier:
    settings = CommonSettings(network="conv", width=4, dropout=0.0, seed=seed)
    return build_classifier(settings, Task((1, 16, 16), 3)).eval()


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
