import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute, choose_compute
from fedsilo.client_app.training.loop import LocalTraining, add_gradients, micro_batches
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import exchanged_arrays

CPU = Compute(torch.device("cpu"), bf16=False)


@given(count=st.integers(2, 100), size=st.integers(0, 40).filter(lambda size: size != 1))
def test_parts_cover_a_batch_in_order_and_none_is_of_one(count: int, size: int) -> None:
    parts = micro_batches(count, size)
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    assert all(part.stop - part.start >= 2 for part in parts)
    assert all(part.stop - part.start <= (size or count) + 1 for part in parts)


def test_the_gradients_of_parts_add_up_to_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    inputs, labels = torch.randn(7, 3), torch.tensor([0, 1, 1, 0, 1, 0, 0])

    def objective(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(layer(x), y)

    def penalty() -> Tensor:
        return layer.weight.square().sum()

    found = []
    for size in (0, 3):
        layer.zero_grad(set_to_none=True)
        settings = CommonSettings(micro_batch=size)
        loss = add_gradients(objective, inputs, labels, settings, CPU, penalty)
        found.append((loss, layer.weight.grad.clone()))
    assert torch.allclose(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)
    expected = objective(inputs, labels) + penalty()
    assert torch.equal(found[0][0], expected.detach())


def test_micro_batches_of_a_whole_batch_change_no_bit(common: CommonSettings, silo: Silo) -> None:
    found = []
    for size in (0, 16):
        settings = dataclasses.replace(common, micro_batch=size)
        network = build_classifier(settings, silo.shape)
        LocalTraining(network, silo.train, settings, CPU, (1, "s1a")).run()
        found.append(exchanged_arrays(network))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_after_each_step_the_batch_is_handed_on_and_a_plan_is_kept_to(
    common: CommonSettings, silo: Silo
) -> None:
    seen: list[Tensor] = []
    network = build_classifier(common, silo.shape)

    def see(inputs: Tensor, optimiser: torch.optim.Optimizer) -> None:
        seen.append(inputs)

    plan = [[torch.tensor([3, 4]), torch.tensor([0, 35])]]
    LocalTraining(network, silo.train, common, CPU, (1, "a"), plan=plan, after_step=see).run()
    assert len(seen) == 2
    assert torch.equal(seen[0], silo.train.inputs[[3, 4]])
    assert torch.equal(seen[1], silo.train.inputs[[0, 35]])


def test_radiographs_train_as_their_standardised_version_does(common: CommonSettings) -> None:
    torch.manual_seed(0)
    raw = torch.randint(-32768, 32767, (12, 1, 16, 16), dtype=torch.int16)
    pixels = raw.float()
    spread, mean = torch.std_mean(pixels, dim=(1, 2, 3), keepdim=True, correction=0)
    labels = torch.arange(12) % 10
    found = []
    for inputs in (raw, (pixels - mean) / spread):
        network = build_classifier(common, NetworkShape((1, 16, 16), 10))
        LocalTraining(network, Split(inputs, labels), common, CPU, (1, "a")).run()
        found.append(exchanged_arrays(network))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_is_held_is_picked_by_rows() -> None:
    compute = choose_compute("cpu", "fp32", 1)
    rows = torch.arange(12).reshape(6, 2)
    assert torch.equal(compute.hold(rows)(torch.tensor([4, 1])), rows[[4, 1]])
