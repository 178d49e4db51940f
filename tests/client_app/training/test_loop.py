import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining, batches, passes_of
from fedsilo.client_app.training.optimisers import eager, open_optimiser
from fedsilo.core.errors import SiteError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier
from tests.support.errors import refuses

KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _trained(kind: type[torch.optim.Optimizer], steps: int) -> tuple[list[Tensor], dict]:
    torch.manual_seed(1)
    layer = nn.Linear(3, 2)
    optimiser = kind(layer.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(steps):
        optimiser.zero_grad()
        layer(torch.full((4, 3), float(step))).square().sum().backward()
        optimiser.step()
    return [p.detach() for p in layer.parameters()], optimiser.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_an_eager_optimiser_trains_to_the_same_bits(kind: type[torch.optim.Optimizer]) -> None:
    ours, state = _trained(eager(kind), 5)
    theirs, expected = _trained(kind, 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert state.keys() == expected.keys()
    assert str(state) == str(expected)


def test_a_step_of_an_eager_optimiser_does_not_import_dynamo() -> None:
    code = (
        "import sys, torch\n"
        "from fedsilo.client_app.training.optimisers import eager\n"
        "weight = torch.ones(1, requires_grad=True)\n"
        "optimiser = eager(torch.optim.Adam)([weight])\n"
        "optimiser.zero_grad(); weight.sum().backward(); optimiser.step()\n"
        "optimiser.load_state_dict(optimiser.state_dict())\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "False"


CPU = Compute(torch.device("cpu"), bf16=False)


def order(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@hypothesis_settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 200), size=st.integers(2, 40))
def test_an_epoch_holds_each_index_once_and_no_batch_of_one(count: int, size: int) -> None:
    parts = batches(count, size, order())
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert all(len(part) == size for part in parts[:-2])
    if count > 1:
        assert all(2 <= len(part) <= size + 1 for part in parts)


def test_a_last_batch_of_one_joins_the_batch_before_it() -> None:
    assert [len(part) for part in batches(33, 16, order())] == [16, 17]
    assert [len(part) for part in batches(34, 16, order())] == [16, 16, 2]
    assert [len(part) for part in batches(1, 16, order())] == [1]


def test_the_order_follows_the_generator() -> None:
    first, again, other = (torch.cat(batches(50, 8, order(seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Counting(SiteNetwork):
    """A network whose loss is the mean of its images, times one plus nothing."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.factor = factor
        self.seen: list[int] = []

    def encode(self, images: Tensor) -> Tensor:
        return images

    def classify(self, features: Tensor) -> Tensor:
        return features

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen += labels.tolist()
        return (images.mean() + 0 * self.weight.sum()) * self.factor


def split_of(count: int) -> Split:
    values = torch.arange(count, dtype=torch.float32)
    return Split(values.reshape(-1, 1, 1, 1), values.long())


def test_the_loss_is_the_mean_over_samples_not_over_batches(common: CommonSettings) -> None:
    # 21 samples in batches of 16 and 5: a mean over batches would depend on their order.
    for epochs in (1, 3):
        settings = dataclasses.replace(common, local_epochs=epochs)
        loss = LocalTraining(Counting(), split_of(21), settings, CPU, (1, "s1a")).run()
        assert loss == pytest.approx(10.0)


def test_the_order_of_samples_is_keyed_on_round_and_site(common: CommonSettings) -> None:
    def seen(*key: int | str) -> list[int]:
        network = Counting()
        LocalTraining(network, split_of(20), common, CPU, key).run()
        return network.seen

    assert seen(1, "s1a") == seen(1, "s1a")
    assert seen(1, "s1a") != seen(2, "s1a")
    assert seen(1, "s1a") != seen(1, "s2a")


def test_each_epoch_shows_each_sample_once_in_another_order(common: CommonSettings) -> None:
    network = Counting()
    LocalTraining(
        network, split_of(20), dataclasses.replace(common, local_epochs=3), CPU, (1, "a")
    ).run()
    epochs = [network.seen[i : i + 20] for i in range(0, 60, 20)]
    assert len(network.seen) == 60
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_diverging_training_says_what_to_lower(common: CommonSettings, factor: float) -> None:
    # The server adds site and round.
    said = r"^training diverged, its loss is (nan|inf): lower 'train.learning-rate'$"
    with pytest.raises(SiteError, match=said):
        LocalTraining(Counting(factor), split_of(20), common, CPU, (17, "s2b")).run()


def test_a_far_too_large_step_is_found_out(common: CommonSettings, silo: Silo) -> None:
    wild = dataclasses.replace(common, learning_rate=1e30, local_epochs=3)
    network = build_classifier(common, silo.shape)
    with refuses(SiteError, "train.learning-rate"):
        LocalTraining(network, silo.train, wild, CPU, (2, "s1a")).run()


def trained(common: CommonSettings, silo: Silo, key: tuple[Any, ...]) -> tuple[float, bytes]:
    network: TokenClassifier = build_classifier(common, silo.shape)
    loss = LocalTraining(network, silo.train, common, CPU, key).run()
    state = network.state_dict()
    return loss, b"".join(state[name].numpy().tobytes() for name in sorted(state))


def test_training_is_the_same_bits_for_the_same_key(common: CommonSettings, silo: Silo) -> None:
    first = trained(common, silo, (1, "s1a"))
    torch.rand(17)  # whatever else the process drew in between
    assert trained(common, silo, (1, "s1a")) == first


@pytest.mark.parametrize("key", [(2, "s1a"), (1, "s2a")])
def test_another_round_or_site_draws_other_numbers(
    common: CommonSettings, silo: Silo, key: tuple[int, str]
) -> None:
    assert trained(common, silo, key)[1] != trained(common, silo, (1, "s1a"))[1]


def test_training_leaves_the_processes_random_numbers_alone(
    common: CommonSettings, silo: Silo
) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trained(common, silo, (1, "s1a"))
    assert torch.equal(torch.rand(4), expected)


def test_training_lowers_the_loss(common: CommonSettings, silo: Silo) -> None:
    network = build_classifier(common, silo.shape)
    losses = [
        LocalTraining(network, silo.train, common, CPU, (round_, "s1a")).run()
        for round_ in range(6)
    ]
    assert losses[-1] < losses[0]


def test_a_training_calls_its_hooks_before_each_pass_and_after_each_step(
    common: CommonSettings,
) -> None:
    calls: list[str] = []
    network = Counting()

    def after_step(inputs: Tensor, optimiser: torch.optim.Optimizer) -> None:
        assert optimiser.param_groups[0]["params"][0] is network.weight
        calls.append(f"step of {len(inputs)}")

    LocalTraining(
        network,
        split_of(20),
        dataclasses.replace(common, local_epochs=1),
        CPU,
        (1, "s1a"),
        before_pass=lambda number: calls.append(f"pass {number}"),
        after_step=after_step,
    ).run()
    assert calls == ["pass 0", "step of 16", "step of 4"]


def test_an_optimiser_beside_steps_by_the_same_batch_at_its_own_decayed_rate() -> None:
    network, weight = Counting(), nn.Parameter(torch.tensor(1.0))
    beside = torch.optim.SGD([weight], lr=1.0)
    settings = CommonSettings(rate_decay="inverse-sqrt", local_steps=2, batch_size=4)
    LocalTraining(
        network,
        split_of(8),
        settings,
        CPU,
        (1, "s1a"),
        objective=lambda images, labels: weight + network.loss(images, labels),
        beside=beside,
        counted=(3, 0),
    ).run()
    assert weight.grad is None
    assert weight.item() == pytest.approx(1 - 1 / 2 - 1 / 5**0.5)


HALF = Compute(torch.device("cpu"), bf16=False, fp16=True)


def test_fp16_trains_on_the_gradients_of_the_loss_and_leaves_out_steps_that_overflow(
    common: CommonSettings,
) -> None:
    own = {"optimiser": "sgd", "learning_rate": 0.5, "local_steps": 3, "batch_size": 4}
    settings = dataclasses.replace(common, **own)  # type: ignore[arg-type]
    network, factors, seen = Counting(), iter((3.0, math.inf, 5.0)), list[float]()

    def slope(images: Tensor, labels: Tensor) -> Tensor:
        return (network.weight.sum() + 1) * next(factors)

    def after_step(_: Tensor, optimiser: torch.optim.Optimizer) -> None:
        seen.append(network.weight.grad.item())  # type: ignore[union-attr]

    options = dict[str, Any](objective=slope, after_step=after_step)
    loss = LocalTraining(network, split_of(12), settings, HALF, (1, "s1a"), **options).run()
    assert seen == [3.0, 5.0]
    assert network.weight.item() == -0.5 * (3 + 5)
    assert loss == pytest.approx((1 * 3 + (1 - 0.5 * 3) * 5) / 2), "of the steps that were taken"


def test_fp16_without_a_step_of_finite_gradients_says_what_to_do(common: CommonSettings) -> None:
    network = Counting()
    with refuses(SiteError, "precision", "fp32", "bf16"):
        LocalTraining(
            network,
            split_of(4),
            common,
            HALF,
            (1, "s1a"),
            objective=lambda images, labels: network.weight.sum() * math.inf,
        ).run()


class TwoRates(nn.Module):
    """A module of a fast, a slow and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.ones(1))
        self.slow = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def slow_parameters(self) -> list[nn.Parameter]:
        return [self.slow]


RATES = {"learning_rate": 0.5, "basic_learning_rate": 0.125, "weight_decay": 0.25}


def test_slow_parameters_have_the_basic_learning_rate_and_frozen_ones_none() -> None:
    module = TwoRates()
    groups = open_optimiser(module, CommonSettings(**RATES)).param_groups  # type: ignore[arg-type]
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(1, 0.5), (1, 0.125)]
    assert groups[0]["params"][0] is module.fast
    assert groups[1]["params"][0] is module.slow
    assert [group["weight_decay"] for group in groups] == [0.25, 0.25]


def test_what_a_method_trains_itself_is_in_no_group() -> None:
    class Apart(TwoRates):
        def apart_parameters(self) -> list[nn.Parameter]:
            return [self.fast]

    module = Apart()
    groups = open_optimiser(module, CommonSettings(**RATES)).param_groups  # type: ignore[arg-type]
    trained = [id(p) for group in groups for p in group["params"]]
    assert trained == [id(module.slow)]


def test_a_step_of_sgd_moves_the_slow_parameter_by_its_own_rate() -> None:
    module = TwoRates()
    settings = CommonSettings(optimiser="sgd", learning_rate=0.5, basic_learning_rate=0.125)
    optimiser = open_optimiser(module, settings)
    (module.fast + module.slow).sum().backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    assert (module.fast.item(), module.slow.item(), module.frozen.item()) == (0.5, 0.875, 1.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)],
)
def test_the_optimiser_is_that_of_the_settings_with_one_group_where_nothing_is_slow(
    name: str, kind: type[torch.optim.Optimizer]
) -> None:
    optimiser = open_optimiser(nn.Linear(2, 1), CommonSettings(optimiser=name))
    assert isinstance(optimiser, kind)
    assert type(optimiser).__name__ == kind.__name__
    assert [len(group["params"]) for group in optimiser.param_groups] == [2]


def test_adamw_shrinks_a_weight_by_rate_times_decay_and_adam_takes_decay_for_a_gradient() -> None:
    for name, expected in (("adamw", 1 - 0.5 * 0.25), ("adam", 1 - 0.5)):
        weight = nn.Parameter(torch.ones(1))
        settings = CommonSettings(optimiser=name, learning_rate=0.5, weight_decay=0.25)
        optimiser = open_optimiser(nn.ParameterList([weight]), settings)
        weight.grad = torch.zeros(1)
        optimiser.step()
        assert weight.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("count", "epochs", "steps", "passes"),
    [
        (36, 3, 0, 3),
        (36, 3, 1, 1),
        (36, 3, 3, 1),  # 16, 16 and 4
        (36, 3, 4, 2),
        (36, 3, 7, 3),
        (33, 3, 4, 2),  # 16 and 17: the last batch of one joins the one before
        (2, 1, 5, 5),
    ],
)
def test_passes_of_a_round_by_hand_and_each_is_told_before_it_begins(
    count: int, epochs: int, steps: int, passes: int, common: CommonSettings
) -> None:
    settings = dataclasses.replace(common, local_epochs=epochs, local_steps=steps)
    assert passes_of(count, settings) == passes
    network, told = Counting(), []

    def begins(number: int) -> None:
        told.append((number, len(network.seen)))

    LocalTraining(network, split_of(count), settings, CPU, (1, "s1a"), before_pass=begins).run()
    assert told == [(number, number * count) for number in range(passes)]


def test_an_objective_replaces_the_networks_own_loss(common: CommonSettings) -> None:
    network = Counting()

    def objective(inputs: Tensor, labels: Tensor) -> Tensor:
        return (labels.float() + inputs.flatten()).mean() + 0 * network.weight.sum()

    loss = LocalTraining(network, split_of(21), common, CPU, (1, "s1a"), objective=objective).run()
    assert loss == pytest.approx(20.0)  # twice the mean of 0..20
    assert network.seen == []


def test_a_penalty_is_no_part_of_an_objective_and_is_added_to_it(common: CommonSettings) -> None:
    network = Counting()

    def objective(inputs: Tensor, labels: Tensor) -> Tensor:
        return 0 * network.weight.sum() + 2.0

    def penalty() -> Tensor:
        return torch.tensor(0.5)

    options = dict[str, Any](penalty=penalty, objective=objective)
    loss = LocalTraining(network, split_of(20), common, CPU, (1, "a"), **options).run()
    assert loss == pytest.approx(2.5)


def test_an_optimiser_that_is_given_goes_on_and_else_it_is_a_fresh_one(
    common: CommonSettings,
) -> None:
    settings = dataclasses.replace(common, optimiser="sgd", learning_rate=0.1, local_epochs=1)

    def weight_after_two_rounds(own: bool) -> float:
        network = Counting()
        kept = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) if own else None
        for round_ in (1, 2):
            LocalTraining(
                network,
                split_of(2),
                settings,
                CPU,
                (round_, "s1a"),
                objective=lambda inputs, labels: network.weight.sum(),
                optimiser=kept,
            ).run()
        return network.weight.item()

    # The gradient is 1: velocities 1 and then 1 + 0.9; a fresh one of the settings has none
    assert weight_after_two_rounds(own=True) == pytest.approx(-0.1 * (1 + 1.9))
    assert weight_after_two_rounds(own=False) == pytest.approx(-0.1 * 2)


def test_images_of_8_bits_train_as_their_float_version_does(
    common: CommonSettings, silo: Silo
) -> None:
    draw = torch.Generator().manual_seed(1)
    bytes_ = torch.randint(0, 256, (36, 1, 16, 16), generator=draw, dtype=torch.uint8)
    floats = bytes_.float() / 127.5 - 1
    losses = []
    for inputs in (bytes_, floats):
        network = build_classifier(common, silo.shape)
        split = Split(inputs, silo.train.labels[:36])
        losses.append(LocalTraining(network, split, common, CPU, (1, "s1a")).run())
    assert losses[0] == losses[1]
