"""``fedsilo gradcam``: the sheet, its captions and colours, and what is refused."""

from pathlib import Path

import pytest
import torch

from fedsilo.cli.main import main
from fedsilo.core.drawing.palette import BLACK, WRONG
from fedsilo.explanations.gradcam_pictures import (
    GradCamSheet,
    RunColumn,
    choose_by_scenario,
    choose_rows_by_scenario,
    draw_sheet,
    gradcam_sheet,
    open_networks,
)
from fedsilo.explanations.image_explanation import ImageExplanation
from fedsilo.explanations.saliency_maps import cam_map
from fedsilo.runs.finished_run import FinishedRun


def explained(probabilities: list[float], label: int, cam: torch.Tensor) -> ImageExplanation:
    image, names = torch.zeros(1, 8, 8, dtype=torch.uint8), ["no", "yes"]
    saliency = cam_map(cam, label, names)
    return ImageExplanation("test row 3", image, saliency, names, probabilities, [], None)


def test_a_sheet_has_the_images_and_a_column_per_run() -> None:
    right = explained([0.2, 0.8], 1, torch.ones(2, 2))
    wrong = explained([0.6, 0.4], 1, torch.zeros(2, 2))
    columns = [
        RunColumn("first\nFedAvg", [right, wrong]),
        RunColumn("second\nLocal", [right, right]),
    ]
    figure = draw_sheet(GradCamSheet("title", columns, [1, 1]))
    panels = [figure.axes[:3], figure.axes[3:]]
    assert [[len(axes.images) for axes in row] for row in panels] == [[1, 2, 2], [1, 2, 2]]
    assert [axes.get_title() for axes in panels[0]] == ["image", "first\nFedAvg", "second\nLocal"]
    assert [axes.get_title() for axes in panels[1]] == ["", "", ""]
    assert [row[0].get_xlabel() for row in panels] == ["test row 3", "test row 3"]
    assert panels[0][1].get_xlabel() == "predicts yes: 0.80"
    assert (
        panels[1][1].get_xlabel() == "predicts no: 0.60\nmap of yes: 0.40\n(no region supports it)"
    )
    colours = [[axes.xaxis.label.get_color() for axes in row[1:]] for row in panels]
    assert colours == [[BLACK, BLACK], [WRONG, BLACK]]


def _gradcam(finished: Path, runs: list[str], *more: str) -> int:
    paths = [str(finished / run) for run in runs]
    return main(["gradcam", *paths, "--site", "s2a", *more])


def test_the_command_draws_shared_and_own_models(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [tmp_path / "said.png", tmp_path / "asked.png", tmp_path / "train.png"]
    more: list[list[str]] = [[], ["--class", "4"], ["--split", "train"]]
    for picture, options in zip(pictures, more, strict=True):
        told = ("--rows", "0,3", "--picture", str(picture), *options)
        assert _gradcam(finished, ["fedavg", "local"], *told) == 0
        assert capsys.readouterr().out == f"{picture}\n"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len({picture.read_bytes() for picture in pictures}) == 3


def test_images_are_chosen_by_who_is_right_about_them() -> None:
    truths = torch.tensor([0, 0, 1, 1, 1, 0, 1])
    first = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    second = torch.tensor([0, 0, 1, 0, 0, 1, 1])
    third = torch.tensor([0, 0, 1, 0, 0, 1, 0])
    assert choose_rows_by_scenario(truths, [first, second, third], 1) == [
        (0, "all are right"),
        (2, "all are right"),
        (3, "all are wrong"),
        (5, "the first alone is right"),
        (4, "the first alone is right"),
        (1, "the second is right, the first is not"),
        (6, "the second is right, the first is not"),
    ]
    twice = choose_rows_by_scenario(torch.zeros(3), [torch.zeros(3), torch.zeros(3)], 2)
    assert twice == [(0, "all are right"), (1, "all are right")]


def test_the_command_draws_images_of_the_four_scenarios(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "four.png"
    told = ("--scenarios", "1", "--split", "train", "--picture", str(picture))
    assert _gradcam(finished, ["fedavg", "local"], *told) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    runs = [FinishedRun.open(finished / name) for name in ("fedavg", "local")]
    opened = open_networks(runs, "s2a", "train", None, None)
    sheet = gradcam_sheet(opened, choose_by_scenario(opened, 1, "train"), "train", None)
    assert len(sheet.reasons) == len(sheet.truths) == len(sheet.columns[0].explanations) > 1
    for place, (truth, reason) in enumerate(zip(sheet.truths, sheet.reasons, strict=True)):
        right = [column.explanations[place].answer() == truth for column in sheet.columns]
        assert (
            right
            == {
                "all are right": [True, True],
                "all are wrong": [False, False],
                "the first alone is right": [True, False],
                "the second is right, the first is not": [False, True],
            }[reason]
        )
    assert draw_sheet(sheet).axes[0].get_xlabel().endswith(sheet.reasons[0])


def test_an_image_of_a_convolutional_network_is_explained(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("fedavg", "local"):
        picture = tmp_path / f"{run}.png"
        told = ["explain", str(finished / run), "--site", "s2a", "--row", "3"]
        assert main([*told, "--picture", str(picture)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("s2a, test row 3: truth ")
        assert len(lines) == 12, "the title, ten classes and the place"
        assert lines[-1].startswith("Grad-CAM: ")
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("runs", "more", "told"),
    [
        (["vit"], ["--rows", "0"], "of a ViT 'fedsilo attention' draws where it looked"),
        (["ensemble"], ["--rows", "0"], "ensemble: this model mixes 3 networks"),
        (["fedavg"], ["--rows", "0,15"], "site s2a has 15 test rows, counted from 0"),
        (["fedavg"], ["--rows", "x"], "--rows must be row numbers counted from 0"),
        (["fedavg"], ["--scenarios", "1"], "name two runs or more"),
        (["fedavg"], ["--scenarios", "0"], "--scenarios must be at least 1, but is 0"),
        (["fedavg"], ["--scenarios", "1", "--rows", "0"], "either by --rows or by --scenarios"),
        (["fedavg"], [], "choose images either by --rows or by --scenarios"),
        (["fedavg"], ["--rows", "0", "--class", "cat"], "--class must be one of 0, 1,"),
        (
            ["fedavg", "local"],
            ["--rows", "0", "--state-dir", "x"],
            "--state-dir x has the state of",
        ),
        (["fedavg", "table"], ["--rows", "0"], "there is no silo 's2a'"),
        (["nowhere"], ["--rows", "0"], "nowhere does not exist: name one that does"),
    ],
)
def test_what_has_no_map_is_told_in_one_line(
    runs: list[str],
    more: list[str],
    told: str,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "none.png"
    assert _gradcam(finished, runs, "--picture", str(picture), *more) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not picture.exists()


def test_a_table_has_no_maps(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcam", str(finished / "table"), "--site", "va", "--rows", "0"]) == 1
    assert "of a table 'fedsilo explain' says what it can" in capsys.readouterr().err
    assert main(["explain", str(finished / "table"), "--site", "va", "--row", "0"]) == 0
    assert "Shapley values" in capsys.readouterr().out
