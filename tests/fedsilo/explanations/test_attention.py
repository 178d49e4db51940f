"""Where a prompted ViT looked: at one image, and at the most certain ones of each class."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.compute import Compute
from fedsilo.core.errors import DataError
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.attention import (
    explain_by_attention,
    most_certain_explanations,
)
from fedsilo.explanations.image_explanation import ImageExplanation
from fedsilo.explanations.sample import explain_sample
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.networks.prompted_vit import PromptedViT
from tests.support.errors import refuses
from tests.support.tiny import VIT_FIELDS

CPU = Compute(torch.device("cpu"), bf16=False)
NAMES = ["zero", "one"]
Opened = Callable[..., Lab]


@pytest.fixture
def network(opened: Opened) -> PromptedViT:
    """Return a prompted ViT of 16 patches for grey images of 16 pixels a side and ten classes."""
    return cast(PromptedViT, opened("fedevprompt").open())


def bytes_split(count: int, labels: list[int], channels: int = 1) -> Split:
    draw = torch.Generator().manual_seed(2)
    shape = (count, channels, 16, 16)
    images = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    return Split(images, torch.tensor(labels))


def test_an_explanation_is_what_the_network_says_of_that_image(network: PromptedViT) -> None:
    split = bytes_split(3, [0, 1, 2])
    classes = [str(label) for label in range(10)]
    assert network.evidence is not None
    prior = network.evidence.prior
    found = explain_by_attention(network, split, CPU, 1, "title", classes)
    image = split.inputs[1:2].float() / 127.5 - 1
    with torch.no_grad():
        alpha = network.eval()(image)[0].exp()
        rollout = network.encode_with_rollout(image)[1]
    assert found.probabilities == pytest.approx((alpha / alpha.sum()).tolist())
    assert found.beliefs == pytest.approx(((alpha - prior) / alpha.sum()).tolist(), abs=1e-6)
    assert found.vacuity == pytest.approx(10 / alpha.sum().item())
    assert sum([*found.beliefs, found.vacuity or 0.0]) == pytest.approx(1, abs=1e-5)
    assert sum(found.probabilities) == pytest.approx(1, abs=1e-5)
    assert found.saliency.values.shape == (4, 4)
    assert torch.equal(found.saliency.values.flatten(), rollout[0])
    assert found.saliency.values.sum().item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(found.image, split.inputs[1])
    assert (
        explain_by_attention(network, split, CPU, 2, "title", classes).probabilities
        != found.probabilities
    )


def test_a_network_that_is_not_evidential_has_probabilities_and_no_beliefs(opened: Opened) -> None:
    method = opened("fedavg", own=VIT_FIELDS | {"loss": "cross-entropy"})
    plain = cast(PromptedViT, method.classifier(None))
    split, classes = bytes_split(1, [0]), [str(label) for label in range(10)]
    found = explain_by_attention(plain, split, CPU, 0, "title", classes)
    with torch.no_grad():
        logits = plain.eval()(split.inputs.float() / 127.5 - 1)
    assert found.probabilities == pytest.approx(logits.softmax(dim=1)[0].tolist())
    assert (found.beliefs, found.vacuity) == ([], None)
    assert found.document()["vacuity"] is None
    lines = found.lines()
    assert lines[1:11] == [
        f"{name}: probability {p:.3f}" for name, p in zip(classes, found.probabilities, strict=True)
    ]
    assert len(lines) == 12
    assert lines[11].startswith("looked most at row ")
    (of_class_0, *_) = most_certain_explanations(plain, split, CPU, classes, 1)
    assert of_class_0[0].uncertainty() == ("doubt", pytest.approx(1 - max(found.probabilities)))


@pytest.fixture
def of_two(opened: Opened) -> PromptedViT:
    """Return a prompted ViT of two classes."""
    from fedsilo.models.networks.build import build_classifier
    from fedsilo.models.networks.kinds import NetworkShape

    task = NetworkShape((1, 16, 16), 2)
    return cast(PromptedViT, build_classifier(opened("fedevprompt").common, task))


def vacuities(network: PromptedViT, images: Tensor) -> Tensor:
    with torch.no_grad():
        return vacuity(network.eval()(images.float() / 127.5 - 1).exp())


def test_of_each_class_the_most_certain_images_are_explained(of_two: PromptedViT) -> None:
    labels = [0, 1, 0, 0, 1, 0]
    split = bytes_split(6, labels)
    sheet = most_certain_explanations(of_two, split, CPU, NAMES, 2)
    assert [len(explanations) for explanations in sheet] == [2, 2]
    uncertain = vacuities(of_two, split.inputs)
    with torch.no_grad():
        maps = of_two.encode_with_rollout(split.inputs.float() / 127.5 - 1)[1]
    assert maps.std(dim=0).max() > 1e-5, "maps differ from image to image"
    for label, explanations in enumerate(sheet):
        own = [index for index in range(6) if labels[index] == label]
        ranked = sorted(own, key=lambda index: uncertain[index].item())[:2]
        for explanation, index in zip(explanations, ranked, strict=True):
            assert explanation.title == NAMES[label]
            assert torch.equal(explanation.image, split.inputs[index])
            rollout = explanation.saliency.values.flatten()
            torch.testing.assert_close(rollout, maps[index], atol=1e-6, rtol=0)
            assert explanation.uncertainty() == ("vacuity", pytest.approx(uncertain[index].item()))


def test_fewer_images_than_asked_for_are_all_and_a_class_may_have_none(
    of_two: PromptedViT,
) -> None:
    sheet = most_certain_explanations(of_two, bytes_split(3, [0, 1, 0]), CPU, NAMES, 5)
    assert [len(explanations) for explanations in sheet] == [2, 1]
    sheet = most_certain_explanations(of_two, bytes_split(2, [0, 0]), CPU, NAMES, 1)
    assert [len(explanations) for explanations in sheet] == [1, 0]


def test_a_site_explains_a_row_by_its_truth_and_refuses_one_that_is_not_there(
    opened: Opened,
) -> None:
    method = opened("fedevprompt")
    label = int(method.silo.test.labels[3])
    found = cast(ImageExplanation, explain_sample(method, "test", 3))
    assert found.title == f"s1a, test row 3: truth {label}"
    assert list(found.classes) == [str(number) for number in range(10)]
    for row in (-1, 10):
        with refuses(DataError, "s1a", 10, row):
            explain_sample(method, "test", row)
    with refuses(DataError, "s1a", "4"):
        explain_sample(method, "val", 4)
