"""Explanations as text, document and picture."""

import io
import json
import math
from typing import Any

import pytest
import torch

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.explanations.routing import DRAWN, LISTED, PatientExplanation, explain_routing
from fedsilo.models.methods.picsr import PICSRNetwork, PICSRSettings, Router
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape


@pytest.fixture
def explanation() -> PatientExplanation:
    """Return what was said of a patient by two experts over six features."""
    return PatientExplanation(
        title="va, test row 0: truth disease",
        experts=["cleveland", "va"],
        weights=[0.25, 0.75],
        answers=[0.5, 0.875],
        distances=[2.1, 0.3],
        scores=[[-2.1, 0.25, 0.5], [0.0, -0.3, 0.55]],
        features=["age", "sex", "chol", "fbs", "pulse", "pain"],
        contributions=[[1.5, -0.25, 0.5, 0.0, 0.1, 0.3], [0.0, 0.1, 0.2, 0.4, -0.3, -0.15]],
    )


def many(count: int) -> PatientExplanation:
    """Return an explanation of ``count`` features, of which the last matters most."""
    parts = [[index / count for index in range(count)]]
    names = [f"f{index}" for index in range(count)]
    return PatientExplanation(
        "t", ["a"], [1.0], [0.5], [sum(parts[0])], [[-1.0, 0.0]], names, parts
    )


def test_lines_have_share_and_answer_of_each_hospital_the_heaviest_first(
    explanation: PatientExplanation,
) -> None:
    title, _, first, second = explanation.lines()
    assert title == "va, test row 0: truth disease"
    assert first.split()[:4] == ["va", "weight", "75.0", "%"]
    assert "87.5 %" in first
    assert first.endswith("fbs, pulse, chol")
    assert second.split()[:4] == ["cleveland", "weight", "25.0", "%"]
    assert second.endswith("age, chol, pain")


def test_a_line_names_no_more_features_than_fit() -> None:
    assert LISTED == 3
    assert many(100).lines()[-1].endswith(" in f99, f98, f97")
    assert many(2).lines()[-1].endswith(" in f1, f0")


def test_document_has_every_field_of_the_explanation(explanation: PatientExplanation) -> None:
    read = json.loads(json.dumps(explanation.document()))
    assert PatientExplanation(**read) == explanation


def texts(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_the_picture_shows_voices_beside_what_each_feature_adds(
    explanation: PatientExplanation,
) -> None:
    figure = explanation.figure()
    figure.savefig(io.BytesIO(), format="png")
    voices, scores, parts = figure.axes
    assert [bar.get_height() for bar in voices.patches] == [0.25, 0.75, 0.5, 0.875]
    assert [label.get_text() for label in voices.get_xticklabels()] == ["cleveland", "va"]
    assert texts(scores) == ["from cleveland", "from va", "bias"]
    assert [label.get_text() for label in scores.get_xticklabels()] == ["cleveland", "va"]
    assert scores.images[0].get_array().tolist() == [[-2.1, 0.0], [0.25, -0.3], [0.5, 0.55]]
    assert [text.get_text() for text in scores.texts] == [
        *("-2.10", "0.00", "0.25", "-0.30", "0.50", "0.55"),
    ]
    assert "adds to the score" in scores.get_title()
    assert "adds to the distance" in parts.get_title()
    assert texts(parts) == explanation.features
    assert parts.images[0].get_array().tolist() == [
        list(column) for column in zip(*explanation.contributions, strict=True)
    ]
    columns = [label.get_text() for label in parts.get_xticklabels()]
    assert columns == ["cleveland\n(sum 2.10)", "va\n(sum 0.30)"]
    assert figure.get_suptitle() == explanation.title


def test_of_many_features_those_that_matter_most_are_drawn_in_their_own_order() -> None:
    _, _, parts = many(100).figure().axes
    assert texts(parts) == [f"f{index}" for index in range(70, 100)]
    assert len(texts(parts)) == DRAWN == 30


def test_a_feature_that_brings_nearer_matters_as_much_as_one_that_takes_apart() -> None:
    parts = [[0.1] * 40]
    parts[0][7] = -2.0
    names = [f"f{index}" for index in range(40)]
    whole = PatientExplanation("t", ["a"], [1.0], [0.5], [1.9], [[-1.9, 0.0]], names, parts)
    drawn = whole.figure().axes[2]
    assert "f7" in texts(drawn)
    assert drawn.images[0].get_clim() == (-2.0, 2.0)


def test_a_patient_on_every_prototype_is_drawn_too() -> None:
    nothing = PatientExplanation(
        *("t", ["a", "b"], [0.5, 0.5], [1.0, 0.0], [0.0, 0.0]), [[0.0] * 3] * 2, ["x"], [[0.0]] * 2
    )
    nothing.figure().savefig(io.BytesIO(), format="png")
    assert all(line.endswith("in x") for line in nothing.lines()[2:])


def test_a_router_is_explained_by_hand() -> None:
    """Two experts without an opinion on the features: biases alone say 3/4 and 1/5."""
    task, experts = NetworkShape((2,), 2), {}
    for site, odds in (("a", 3.0), ("b", 0.25)):
        experts[site] = build_classifier(CommonSettings(), task)
        with torch.no_grad():
            layer = experts[site].head[1]  # type: ignore[index]  # a Sequential
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor([0.0, math.log(odds)]))
    router = Router(features=2, experts=2, settings=PICSRSettings(router_width=2))
    with torch.no_grad():
        router.embedding[1].weight.copy_(torch.eye(2))
        router.embedding[1].bias.zero_()
    prototypes = {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor([0.0, 0.0])}
    network = PICSRNetwork(experts, prototypes, router)
    found = explain_routing(network.train(), torch.tensor([3.0, 0.0]), "patient", [])
    weight = 1 / (1 + math.exp(5 - 3))  # of a, at distance 5; b is at distance 3
    assert found.distances == pytest.approx([5.0, 3.0])
    assert found.weights == pytest.approx([weight, 1 - weight])
    assert found.scores == [[-5.0, 0.0, 0.0], [0.0, -3.0, 0.0]]  # a new layer is the identity
    assert found.answers == pytest.approx([0.75, 0.2])
    assert found.contributions == [pytest.approx([9 / 5, 16 / 5]), pytest.approx([3.0, 0.0])]
    assert found.features == ["0", "1"]
    mixed = weight * 0.75 + (1 - weight) * 0.2
    assert found.title.endswith(f"of the last class is {100 * mixed:.1f} %")


def test_features_keep_their_names() -> None:
    experts = {"a": build_classifier(CommonSettings(), NetworkShape((2,), 2))}
    router = Router(features=2, experts=1, settings=PICSRSettings())
    network = PICSRNetwork(experts, {"a": torch.zeros(2)}, router)
    assert explain_routing(network, torch.ones(2), "t", ["age", "sex"]).features == ["age", "sex"]
