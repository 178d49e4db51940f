"""``fedsilo embeddings``: the numbers, the plane, whose model embeds, the files."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsilo.cli.main import main
from fedsilo.core.errors import DataError
from fedsilo.core.files.state_files import load_state
from fedsilo.explanations.embedding_pictures import (
    Cloud,
    Panel,
    Selection,
    document,
    draw_panels,
    measure_separability,
    project_to_plane,
)
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.runs.finished_run import FinishedRun

SITES = ["s1a", "s2a", "s3a"]


def cloud_of(values: Any, site: list[int], label: list[int]) -> Cloud:
    return Cloud(
        sites=[f"site-{number}" for number in range(max(site) + 1)],
        classes=[f"class-{number}" for number in range(max(label) + 1)],
        site=np.array(site),
        row=np.arange(len(site)),
        label=np.array(label),
        values=np.asarray(values, dtype=np.float32),
        own_models=False,
    )


def test_what_tells_the_site_and_what_tells_the_class_by_hand() -> None:
    noise = np.random.default_rng(0).normal(size=(60, 2))
    site, label = [0] * 30 + [1] * 15 + [2] * 15, [0, 1] * 30
    apart = noise * 0.1 + np.array([[10.0 * s, 0.0] for s in site])
    found = measure_separability(cloud_of(apart, site, label), 0)
    assert found["site accuracy"] == 1
    assert found["largest site"] == 0.5
    assert found["label AUC"] is not None
    assert 0.2 < found["label AUC"] < 0.8
    by_class = noise * 0.1 + np.array([[0.0, 10.0 * c] for c in label])
    found = measure_separability(cloud_of(by_class, site, label), 0)
    assert found["label AUC"] == 1
    assert found["site accuracy"] is not None
    assert found["site accuracy"] <= 0.6
    assert found == measure_separability(cloud_of(by_class, site, label), 0)


def test_several_classes_are_told_by_the_mean_of_each_against_the_rest() -> None:
    label = [0, 1, 2] * 10
    values = np.eye(3)[label] + np.random.default_rng(0).normal(size=(30, 3)) * 0.01
    assert measure_separability(cloud_of(values, [0, 1] * 15, label), 0)["label AUC"] == 1


def test_sites_and_classes_of_few_samples_are_left_out_and_one_alone_tells_nothing() -> None:
    values = np.random.default_rng(0).normal(size=(24, 2))
    few = measure_separability(cloud_of(values, [0] * 10 + [1] * 10 + [2] * 4, [0] * 24), 0)
    assert few["largest site"] == 0.5, "of the 20 samples that are left"
    assert few["label AUC"] is None
    alone = measure_separability(cloud_of(values, [0] * 20 + [1] * 4, [0, 1] * 12), 0)
    assert (alone["site accuracy"], alone["largest site"]) == (None, None)
    assert alone["label AUC"] is not None


def test_the_plane_is_the_same_for_the_same_seed_and_keeps_groups() -> None:
    draw = np.random.default_rng(0)
    values = np.concatenate([draw.normal(size=(12, 5)), draw.normal(size=(12, 5)) + 50])
    points = project_to_plane(values.astype(np.float32), 3)
    assert points.shape == (24, 2)
    assert np.array_equal(points, project_to_plane(values.astype(np.float32), 3))
    centres = points[:12].mean(axis=0), points[12:].mean(axis=0)
    for mine, own, other in ((points[:12], *centres), (points[12:], *centres[::-1])):
        near, far = np.linalg.norm(mine - own, axis=1), np.linalg.norm(mine - other, axis=1)
        assert (near < far).all()


@pytest.mark.parametrize("values", [np.ones((6, 3)), np.arange(6.0)[:, None]])
def test_embeddings_without_two_directions_are_drawn_too(values: Any) -> None:
    assert np.isfinite(project_to_plane(values.astype(np.float32), 0)).all()


def test_too_few_samples_are_told_of() -> None:
    with pytest.raises(DataError, match="needs at least 4 samples, but there are only 3"):
        project_to_plane(np.zeros((3, 2), dtype=np.float32), 0)


def hand_made() -> Panel:
    cloud = cloud_of([[0.0, 0.0]] * 4, [0, 0, 1, 1], [0, 1, 0, 1])
    points = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.12346]])
    return Panel(
        "run\nFedAvg", cloud, points, dict.fromkeys(("site accuracy", "largest site", "label AUC"))
    )


def test_the_document_holds_a_point_per_sample() -> None:
    found = json.loads(
        json.dumps(document(hand_made(), Selection((), "test", "embedding", None, 0)))
    )
    assert found["split"] == "test"
    assert found["dimensions"] == 2
    assert found["points"][3] == {"site": "site-1", "row": 3, "label": 1, "x": 6.0, "y": 7.1235}


def test_sites_have_colours_and_classes_markers() -> None:
    figure = draw_panels([hand_made()], "title")
    (axes,) = figure.axes
    circles, crosses = axes.collections
    assert sorted(map(tuple, np.asarray(circles.get_offsets()))) == [(0, 1), (4, 5)]
    assert len({tuple(colour) for colour in circles.get_facecolor()}) == 2
    assert {tuple(c) for c in crosses.get_facecolor()} == {
        tuple(c) for c in circles.get_facecolor()
    }
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["site-0", "site-1", "class-0", "class-1"]
    assert axes.get_title() == "run\nFedAvg"
    assert axes.get_xlabel() == "\n".join(hand_made().lines())
    assert hand_made().lines() == [
        "site: too few samples or sites",
        "class: too few samples or classes",
    ]


def _copied(finished: Path, tmp_path: Path, *runs: str) -> list[Path]:
    return [Path(shutil.copytree(finished / run, tmp_path / run)) for run in runs]


def test_the_command_draws_runs_and_writes_each_ones_points(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _copied(finished, tmp_path, "fedprox", "local", "fedavg-ft")
    table = tmp_path / "numbers.csv"
    assert main(["embeddings", *map(str, runs), "--csv", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [str(runs[0] / "embeddings.png"), str(table)]
    with table.open(newline="") as file:
        rows = {row.pop("run"): row for row in csv.DictReader(file)}
    assert list(rows) == ["fedprox", "local", "fedavg-ft"]
    assert (runs[0] / "embeddings.png").read_bytes().startswith(b"\x89PNG")
    for run in runs:
        found = json.loads((run / "embeddings.json").read_text())
        assert str(run / "embeddings.json") in lines
        assert found["own models"] == (run.name != "fedprox")
        assert [point["site"] for point in found["points"]] == [s for s in SITES for _ in range(15)]
        assert [point["row"] for point in found["points"]] == list(range(15)) * 3
        assert 0 <= found["site accuracy"] <= 1
        numbers = ("site accuracy", "largest site", "label AUC")
        assert rows[run.name] == {name: f"{found[name]:.6f}" for name in numbers}
        assert found["largest site"] == pytest.approx(1 / 3)
        assert (found["split"], found["layer"], found["seed"]) == ("test", "embedding", 0)
    assert sum("each site has its own model" in line for line in lines) == 2


def test_a_limit_takes_the_same_rows_of_every_run(finished: Path, tmp_path: Path) -> None:
    runs = _copied(finished, tmp_path, "fedavg", "vit")
    more = ["--limit", "6", "--layer", "penultimate", "--split", "train", "--seed", "5"]
    contents = []
    for _ in range(2):
        assert main(["embeddings", *map(str, runs), *more]) == 0
        contents.append([(run / "embeddings.json").read_bytes() for run in runs])
    assert contents[0] == contents[1], "the same seed, the same bytes"
    first, second = ([(p["site"], p["row"]) for p in json.loads(c)["points"]] for c in contents[0])
    assert first == second
    assert len(first) == 18
    assert len({row for site, row in first if site == "s1a"}) == 6


def test_a_table_is_embedded_too(finished: Path, tmp_path: Path) -> None:
    (run,) = _copied(finished, tmp_path, "table")
    assert main(["embeddings", str(run), "--limit", "10"]) == 0
    assert json.loads((run / "embeddings.json").read_text())["own models"] is False


def test_a_site_that_fine_tuned_is_opened_with_its_own_weights(finished: Path) -> None:
    run = finished / "fedavg-ft"
    shared, _ = load_state(run / "model.safetensors")
    for site in SITES:
        network = cast(TokenClassifier, FinishedRun.open(run).lab(site).open())
        own, _ = load_state(run / "sites" / site / "round-000002-00.safetensors")
        arrays = exchanged_arrays(network)
        assert all(torch.equal(arrays[name], torch.from_numpy(own[name])) for name in arrays)
        assert not all(torch.equal(arrays[n], torch.from_numpy(shared[n])) for n in arrays)


@pytest.mark.parametrize(
    ("runs", "more", "told"),
    [
        (["ensemble"], [], "ensemble: this model mixes 3 networks"),
        (["picsr"], [], "picsr: this model mixes 3 networks"),
        (["fedavg"], ["--limit", "0"], "--limit must be at least 1, but is 0"),
        (["fedavg"], ["--site", "s1a", "--limit", "3"], "t-SNE needs at least 4 samples"),
        (["fedavg"], ["--state-dir", "x"], "--state-dir x has the state of one site in one run"),
        (
            ["local"],
            ["--site", "s1a", "--state-dir", "x"],
            "x does not contain a model of the site",
        ),
        (["fedavg", "nowhere"], [], "nowhere does not exist: name one that does"),
    ],
)
def test_what_cannot_be_embedded_is_told_in_one_line(
    runs: list[str],
    more: list[str],
    told: str,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "none.png"
    paths = [str(finished / run) for run in runs]
    assert main(["embeddings", *paths, "--picture", str(picture), *more]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not picture.exists()
    assert not list(finished.glob("*/embeddings.json"))
