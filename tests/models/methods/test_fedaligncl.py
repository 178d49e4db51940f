import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.models.methods.fedaligncl import (
    Discriminator,
    FedAlignCLSettings,
    alignment_loss,
    curriculum_order,
    curriculum_scores,
    discriminator_loss,
    paired_alignment_loss,
    perturb_arrays,
)


def test_only_what_was_right_before_and_is_wrong_now_weighs_two() -> None:
    local = torch.tensor([True, True, False, False])
    now = torch.tensor([True, False, True, False])
    assert curriculum_scores(local, now, 2.0).tolist() == [1.0, 2.0, 1.0, 1.0]


@given(st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=40), st.integers(0, 2**31))
def test_the_order_is_a_permutation_whatever_the_scores(scores: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    order = curriculum_order(torch.tensor(scores, dtype=torch.float64), draw)
    assert sorted(order.tolist()) == list(range(len(scores)))


def test_a_heavy_sample_comes_first_by_the_expected_odds() -> None:
    scores = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    first = torch.stack([curriculum_order(scores, draw)[:2] for _ in range(6000)])
    shares = torch.bincount(first[:, 0], minlength=4).double() / len(first)
    assert torch.allclose(shares, scores / 5, atol=0.02)  # three standard errors
    # Second, if a light one came first: 2 of the 4 that are left
    light_first = first[first[:, 0] != 1]
    assert (light_first[:, 1] == 1).double().mean().item() == pytest.approx(0.5, abs=0.025)


def _linear(weight: float) -> nn.Module:
    """A discriminator whose logit is ``weight`` times a one-dimensional embedding."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return nn.Sequential(layer, nn.Flatten(0))


def test_the_discriminator_loss_is_that_of_equation_2() -> None:
    own, other = torch.tensor([[2.0]]), torch.tensor([[-1.0], [3.0]])
    p = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 3.0)]
    expected = -math.log(p[0]) - (math.log(1 - p[1]) + math.log(1 - p[2])) / 2
    assert discriminator_loss(_linear(1.0), own, other).item() == pytest.approx(expected, rel=1e-6)


def test_the_alignment_loss_is_least_where_the_discriminator_says_one_half() -> None:
    values = {x: alignment_loss(_linear(1.0), torch.tensor([[x]])).item() for x in (-1.0, 0.0, 2.0)}
    assert values[0] == pytest.approx(2 * math.log(2))
    assert values[-1.0] > values[0]
    p = 1 / (1 + math.exp(-2.0))
    assert values[2.0] == pytest.approx(-math.log(p) - math.log(1 - p), rel=1e-6)


def test_the_paired_alignment_loss_is_equation_3_over_two_other_discriminators() -> None:
    own, sent = torch.tensor([[2.0], [-1.0]]), torch.tensor([[2.5], [-1.5]])
    others = [_linear(0.5), _linear(-1.0)]
    log = [-math.log1p(math.exp(-x)) for x in (2.0, -1.0, 1.25, -0.75, -2.5, 1.5)]
    source, first, second = (-(log[n] + log[n + 1]) / 2 for n in (0, 2, 4))
    expected = source + (first + second) / 2
    loss = paired_alignment_loss(_linear(1.0), others, own, sent)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_complement_is_what_a_rival_of_the_opposite_answer_gives() -> None:
    own = torch.tensor([[2.0], [-1.0], [0.5]])
    paired = paired_alignment_loss(_linear(1.0), [_linear(-1.0)], own, own)
    assert paired.item() == pytest.approx(alignment_loss(_linear(1.0), own).item())


def test_no_rival_learns_from_the_paired_loss() -> None:
    extractor, rivals = nn.Linear(1, 3), [Discriminator(3), Discriminator(3)]
    own = extractor(torch.randn(8, 1))
    paired_alignment_loss(Discriminator(3), rivals, own, own + 0.1).backward()
    assert all(p.grad is not None and p.grad.any() for p in extractor.parameters())
    assert all(p.grad is None for rival in rivals for p in rival.parameters())


def test_alignment_moves_the_extractor_and_not_the_discriminator_and_the_other_way_round() -> None:
    extractor, discriminator = nn.Linear(1, 3), Discriminator(3)
    own, other = extractor(torch.randn(8, 1)), torch.randn(8, 3)
    alignment_loss(discriminator, own).backward()
    assert all(p.grad is not None and p.grad.any() for p in extractor.parameters())
    assert all(p.grad is None for p in discriminator.parameters())
    assert all(p.requires_grad for p in discriminator.parameters())
    extractor.zero_grad(set_to_none=True)
    discriminator_loss(discriminator, extractor(torch.randn(8, 1)), other).backward()
    assert all(p.grad is None for p in extractor.parameters())
    assert any(p.grad is not None and p.grad.any() for p in discriminator.parameters())


def _told_apart(detached: bool) -> tuple[float, float]:
    """Train on two Gaussians; return how far apart their features end, and the loss of D."""
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    own = 3 + torch.randn(256, 1, generator=draw)
    other = torch.randn(256, 1, generator=draw)
    extractor = nn.Linear(1, 1)  # features of the site; the other's come as they are
    nn.init.ones_(extractor.weight)
    nn.init.zeros_(extractor.bias)
    discriminator = Discriminator(1)
    teacher = torch.optim.Adam(discriminator.parameters(), lr=0.02)
    mover = torch.optim.Adam(extractor.parameters(), lr=0.02)
    for _ in range(200):
        teacher.zero_grad()
        discriminator_loss(discriminator, extractor(own), other).backward()
        teacher.step()
        mover.zero_grad()
        features: Tensor = extractor(own)
        loss = alignment_loss(discriminator, features.detach() if detached else features)
        if loss.requires_grad:
            loss.backward()
        mover.step()
    with torch.no_grad():
        shift = (extractor(own).mean() - other.mean()).abs().item()
        return shift, discriminator_loss(discriminator, extractor(own), other).item()


def test_alignment_confuses_the_discriminator_and_the_detached_variant_does_not() -> None:
    shift, loss = _told_apart(detached=False)
    assert shift < 0.5
    assert loss > 1.0  # 1.39 would be answering 1/2 to everything
    shift, loss = _told_apart(detached=True)
    assert shift == pytest.approx(3, abs=0.3)
    assert loss < 0.5


ARRAYS = {"weight": torch.full((200, 200), 2.0), "running_mean": torch.zeros(7)}
SETTINGS = FedAlignCLSettings()


def test_the_noise_has_the_stated_variance_and_leaves_buffers_alone() -> None:
    found = perturb_arrays(ARRAYS, {"weight"}, SETTINGS, torch.Generator().manual_seed(0))
    noise = found["weight"] - 2
    assert noise.var().item() == pytest.approx(0.001, rel=0.05)
    assert noise.mean().item() == pytest.approx(0, abs=1e-3)
    assert torch.equal(found["running_mean"], torch.zeros(7))


def test_relative_noise_is_a_factor_of_the_arrays_own_spread() -> None:
    spread = {"weight": torch.linspace(-30, 30, 40_000)}
    settings = replace(SETTINGS, noise_scale="relative")
    found = perturb_arrays(spread, {"weight"}, settings, torch.Generator().manual_seed(0))
    expected = 0.001 * spread["weight"].std(correction=0).item()
    assert (found["weight"] - spread["weight"]).std().item() == pytest.approx(expected, rel=0.02)
    level = perturb_arrays(ARRAYS, {"weight"}, settings, torch.Generator().manual_seed(0))
    assert torch.equal(level["weight"], ARRAYS["weight"])  # all values the same: no spread


def test_without_variance_nothing_is_touched() -> None:
    settings = replace(SETTINGS, noise_variance=0.0)
    found = perturb_arrays(ARRAYS, {"weight"}, settings, torch.Generator())
    assert found == ARRAYS
