import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import nn

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.site_class_means import PrivateMeans, class_means
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.privacy.release import Release

ROWS = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 10.0], [1.0, 0.0]])
LABELS = torch.tensor([0, 0, 0, 1])


def means(counts: tuple[int, ...], clip_norm: float, noise: float = 1e-9) -> PrivateMeans:
    return PrivateMeans(Release(clip_norm, noise, 1, torch.Generator().manual_seed(1)), counts)


def of_rows(silo: Silo, private: PrivateMeans | None, least: int = 1) -> dict[int, Any]:
    held = dataclasses.replace(silo, train=Split(ROWS, LABELS))
    network = cast(SiteNetwork, nn.Identity())
    compute = choose_compute("cpu", "fp32", 1)
    found = class_means(network, held, compute, lambda rows: rows, least, private)
    return {label: mean.tolist() for label, mean in found.items()}


def test_rows_are_clipped_summed_and_divided_by_the_told_counts(silo: Silo) -> None:
    # (3, 4) is clipped to (1.2, 1.6), (0, 10) to (0, 2); told are 4 and 2, not 3 and 1
    told = (4, 2) + (0,) * 8
    found = of_rows(silo, means(told, 2.0))
    assert found[0] == pytest.approx([1.2 / 4, (1.6 + 1 + 2) / 4])
    assert found[1] == pytest.approx([1 / 2, 0], abs=1e-6)
    assert set(found) == {0, 1}


def test_without_privacy_rows_are_whole_and_counts_exact(silo: Silo) -> None:
    assert of_rows(silo, None)[0] == pytest.approx([1, 5])


def test_the_told_counts_say_which_classes_have_a_mean(silo: Silo) -> None:
    told = (2, 3, 0, 5) + (0,) * 6
    assert set(of_rows(silo, means(told, 2.0), least=3)) == {1, 3}


def test_noise_is_the_multiplier_in_clip_norms_on_each_number_of_the_sum() -> None:
    private = means((1, 0), 2.0, noise=3.0)
    sums = private.mean(torch.zeros(1, 40_000))
    assert float(sums.std()) == pytest.approx(6.0, rel=0.02)


def test_a_mean_of_all_samples_is_divided_by_all_that_are_told() -> None:
    assert means((3, 2), 2.0).mean(ROWS).tolist() == pytest.approx([2.2 / 5, 4.6 / 5])
