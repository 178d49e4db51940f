"""The example of a data set with noisy labels: how many flip, and which parts stay clean."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedsilo.core.files.locations import find_places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set
from tests.support.scripts import module_of

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "noisy_labels.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return module_of(EXAMPLE)


def test_of_two_classes_a_flipped_label_is_the_other(example: ModuleType) -> None:
    flipped = example.flipped(torch.tensor([0, 1, 1, 0]), 2, 1.0, torch.Generator())
    assert flipped.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.2, 2), (0.4, 4)])
def test_so_many_of_ten_labels_become_another_class(
    share: float, count: int, example: ModuleType
) -> None:
    labels = torch.arange(10) % 3
    flipped = example.flipped(labels, 3, share, torch.Generator().manual_seed(1))
    assert int((flipped != labels).sum()) == count
    assert set(flipped.tolist()) <= {0, 1, 2}


def test_only_training_labels_are_noisy_and_each_seed_has_its_own(
    example: ModuleType, tmp_path: Path
) -> None:
    places = find_places("", str(tmp_path))
    noisy, clean = example.NoisyLabels("digits", 0.4), data_set("digits")
    first, second = (
        noisy.load("s1a", CommonSettings(silos=3, seed=seed), places) for seed in (0, 1)
    )
    known = clean.load("s1a", CommonSettings(silos=3), places)
    assert noisy.name == "digits-noisy-40"
    assert float((first.train.labels != known.train.labels).double().mean()) == pytest.approx(
        0.4, abs=0.5 / len(known.train)
    )
    assert not torch.equal(first.train.labels, second.train.labels)
    assert first.fingerprints["train"] != known.fingerprints["train"]
    for part in ("val", "test"):
        assert torch.equal(first.splits()[part].labels, known.splits()[part].labels)
        assert first.fingerprints[part] == known.fingerprints[part]
