"""Where a prompted ViT looked: one image in words and as a picture, and a sheet of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from client_app.explain.attention import Look, draw_over, draw_sheet, look
from client_app.methods.base import SiteMethod
from client_app.training.compute import Compute
from datasets.silo.silos import Split
from models.contract.errors import DataError
from models.maths.dirichlet import vacuity
from models.networks.prompted_vit import PromptedViT

CPU = Compute(torch.device("cpu"), bf16=False)
NAMES = ["zero", "one"]
VIT = {
    "network": "vit",
    "backbone_weights": "random",
    "backbone_width": 16,
    "backbone_depth": 2,
    "backbone_heads": 2,
    "backbone_patch": 4,
    "prompt_length": 3,
    "basic_layers": 1,
}
Opened = Callable[..., SiteMethod]


@pytest.fixture
def network(opened: Opened) -> PromptedViT:
    """Return a prompted ViT of 16 patches for grey images of 16 pixels a side and ten classes."""
    return cast(PromptedViT, opened("fedevprompt").open_network())


def hand_made() -> Look:
    rollout = torch.zeros(2, 3)
    rollout[1, 2] = 1.0
    return Look(
        "s1a, test row 4", -torch.ones(1, 4, 6), rollout, NAMES, [0.25, 0.75], [0.0, 0.5], 0.5
    )


def test_a_look_in_words_by_hand() -> None:
    assert hand_made().lines() == [
        "s1a, test row 4",
        "zero: probability 0.250, belief 0.000",
        "one: probability 0.750, belief 0.500",
        "vacuity 0.500 (1: no evidence at all)",
        "looked most at row 2, column 3 of 2 x 3 patches",
    ]


def test_a_look_as_a_document_holds_everything_but_the_image() -> None:
    document = json.loads(json.dumps(hand_made().document()))
    assert document == {
        "title": "s1a, test row 4",
        "rollout": [[0, 0, 0], [0, 0, 1]],
        "classes": NAMES,
        "probabilities": [0.25, 0.75],
        "beliefs": [0.0, 0.5],
        "vacuity": 0.5,
    }


def shown(image: Any) -> Any:
    return np.asarray(image.get_array())


def test_a_look_as_a_picture_is_the_image_and_the_image_under_its_map() -> None:
    figure = hand_made().figure()
    left, right = figure.axes
    assert len(left.images) == 1
    assert len(right.images) == 2
    assert shown(left.images[0]).shape == (4, 6, 3)
    assert (shown(left.images[0]) == 0).all(), "-1 is black, in all three colours"
    assert (figure.get_suptitle() or "").splitlines() == hand_made().lines()[:-1]
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_map_is_drawn_over_its_image_at_the_images_size(channels: int) -> None:
    image = torch.linspace(-1, 1, 8 * 8).reshape(1, 8, 8).repeat(channels, 1, 1)
    rollout = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    axes = Figure().subplots()
    draw_over(axes, image, rollout)
    under, over = axes.images
    pixels = shown(under)
    assert pixels.shape == (8, 8, 3)
    assert pixels[0, 0] == pytest.approx([0, 0, 0])
    assert pixels[-1, -1] == pytest.approx([1, 1, 1])
    drawn = shown(over)
    assert drawn.shape == (8, 8)
    assert np.unravel_index(drawn.argmax(), drawn.shape) in [(r, c) for r in (6, 7) for c in (0, 1)]
    assert drawn[-1, 0] == pytest.approx(1.0)
    assert drawn[:4, 4:].max() < 0.2
    assert over.get_alpha() == pytest.approx(0.55)


def bytes_split(count: int, labels: list[int], channels: int = 1) -> Split:
    draw = torch.Generator().manual_seed(2)
    shape = (count, channels, 16, 16)
    images = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    return Split(images, torch.tensor(labels))


def test_a_look_is_what_the_network_says_of_that_image(network: PromptedViT) -> None:
    split = bytes_split(3, [0, 1, 2])
    classes = [str(label) for label in range(10)]
    assert network.evidence is not None
    prior = network.evidence.prior
    found = look(network, split, CPU, 1, "title", classes)
    image = split.inputs[1:2].float() / 127.5 - 1
    with torch.no_grad():
        alpha = network.eval()(image)[0].exp()
        rollout = network.encode_with_rollout(image)[1]
    assert found.probabilities == pytest.approx((alpha / alpha.sum()).tolist())
    assert found.beliefs == pytest.approx(((alpha - prior) / alpha.sum()).tolist(), abs=1e-6)
    assert found.vacuity == pytest.approx(10 / alpha.sum().item())
    assert sum([*found.beliefs, found.vacuity or 0.0]) == pytest.approx(1, abs=1e-5)
    assert sum(found.probabilities) == pytest.approx(1, abs=1e-5)
    assert found.rollout.shape == (4, 4)
    assert torch.equal(found.rollout.flatten(), rollout[0])
    assert found.rollout.sum().item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(found.image, image[0])
    assert look(network, split, CPU, 2, "title", classes).probabilities != found.probabilities


def test_a_network_that_is_not_evidential_has_probabilities_and_no_beliefs(opened: Opened) -> None:
    method = opened("fedavg", own=VIT | {"loss": "cross-entropy"})
    plain = cast(PromptedViT, method.classifier(None))
    split, classes = bytes_split(1, [0]), [str(label) for label in range(10)]
    found = look(plain, split, CPU, 0, "title", classes)
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
    rows, _ = sheet(plain, split, 1, classes=10)
    doubt = 1 - max(found.probabilities)
    assert rows[0][0].get_title().endswith(f"\ndoubt {doubt:.2f}")


def sheet(
    network: PromptedViT, split: Split, count: int, classes: int = 2
) -> tuple[list[list[Any]], Any]:
    """Return the panels in rows, and the figure."""
    names = [f"class-{label}" for label in range(classes)]
    figure = draw_sheet(network, split, CPU, names, "the title", count)
    axes = figure.axes
    return [axes[start : start + count] for start in range(0, len(axes), count)], figure


@pytest.fixture
def of_two(opened: Opened) -> PromptedViT:
    """Return a prompted ViT of two classes."""
    from models.networks.build import build_classifier
    from models.networks.kinds import Task

    task = Task((1, 16, 16), 2)
    return cast(PromptedViT, build_classifier(opened("fedevprompt").common, task))


def vacuities(network: PromptedViT, images: Tensor) -> Tensor:
    with torch.no_grad():
        return vacuity(network.eval()(images.float() / 127.5 - 1).exp())


def test_a_sheet_has_two_rows_per_class_of_its_most_certain_images(of_two: PromptedViT) -> None:
    labels = [0, 1, 0, 0, 1, 0]
    split = bytes_split(6, labels)
    rows, figure = sheet(of_two, split, 2)
    assert len(rows) == 4
    assert figure.get_suptitle() == "the title"
    uncertain = vacuities(of_two, split.inputs)
    with torch.no_grad():
        maps = of_two.encode_with_rollout(split.inputs.float() / 127.5 - 1)[1]
    rollouts = maps.reshape(6, 4, 4)
    assert maps.std(dim=0).max() > 1e-5, "maps differ from image to image"
    for label in (0, 1):
        own = [index for index in range(6) if labels[index] == label]
        ranked = sorted(own, key=lambda index: uncertain[index].item())[:2]
        for column, index in enumerate(ranked):
            upper, lower = rows[2 * label][column], rows[2 * label + 1][column]
            pixels = split.inputs[index, 0].numpy() / 255
            assert np.abs(shown(upper.images[0])[:, :, 0] - pixels).max() < 1e-6
            assert np.abs(shown(lower.images[0])[:, :, 0] - pixels).max() < 1e-6
            expected = Figure().subplots()
            draw_over(expected, split.inputs[index].float() / 127.5 - 1, rollouts[index])
            assert np.allclose(shown(lower.images[1]), shown(expected.images[1]), atol=1e-6)
            first, second = upper.get_title().splitlines()
            assert first.startswith(f"class-{label}: said class-")
            assert second == f"vacuity {uncertain[index]:.2f}"


def test_an_answer_that_is_wrong_stands_in_red(of_two: PromptedViT) -> None:
    split = bytes_split(6, [0, 1, 0, 0, 1, 0])
    rows, _ = sheet(of_two, split, 4)
    titles = [panel.title for row in rows for panel in row if panel.get_title()]
    assert len(titles) == 6
    for title in titles:
        name, said = title.get_text().splitlines()[0].split(": said ")
        assert title.get_color() == ("black" if said == name else "tab:red")
    assert {title.get_color() for title in titles} == {"black", "tab:red"}


def test_fewer_images_than_asked_for_leave_panels_empty(of_two: PromptedViT) -> None:
    rows, _ = sheet(of_two, bytes_split(3, [0, 1, 0]), 5)
    assert [len(row) for row in rows] == [5, 5, 5, 5]
    filled = [[bool(panel.images) for panel in row] for row in rows]
    assert filled == [[True, True, False, False, False]] * 2 + [[True] + [False] * 4] * 2
    assert not any(panel.axison for row in rows for panel in row)


def test_a_class_without_images_is_told_of_and_the_other_is_drawn(of_two: PromptedViT) -> None:
    rows, figure = sheet(of_two, bytes_split(2, [0, 0]), 1)
    assert [[bool(panel.images) for panel in row] for row in rows] == [[True]] * 2 + [[False]] * 2
    assert rows[2][0].get_title(loc="left") == "class-1: no image"
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


def test_a_site_explains_a_row_by_its_truth_and_refuses_one_that_is_not_there(
    opened: Opened,
) -> None:
    method = opened("fedevprompt")
    label = int(method.silo.test.labels[3])
    found = cast(Look, method.explain("test", 3))
    assert found.title == f"s1a, test row 3: truth {label}"
    assert list(found.classes) == [str(number) for number in range(10)]
    for row in (-1, 10):
        with pytest.raises(DataError, match=rf"s1a has 10 test rows.*there is no row {row}"):
            method.explain("test", row)
    with pytest.raises(DataError, match="s1a has 4 val rows"):
        method.explain("val", 4)
