"""Segmentation from the masks to the pictures: two rounds on tiny synthetic vessels."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedsilo
from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.inference.predict import mask_page
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.errors import refuses

TINY: dict[str, Value] = {
    "method": "fedavg",
    "dataset": "vessels-synthetic",
    "task": "segmentation",
    "split.sample-share": 0.15,
    "privacy.sums-min-count": 1,
    "data.image-size": 16,
    "network.width": 4,
    "rounds": 2,
    "train.local-steps": 3,
    "train.batch-size": 4,
    "train.learning-rate": 0.03,
}
FILES = ("metrics.csv", "model.safetensors", "silos.json")


def train(out: Path, engine: str = "inline", **changes: Value) -> RunDirectory:
    settings = TINY | {key.replace("_", "."): value for key, value in changes.items()}
    run = fedsilo.simulate(
        "fedavg-digits", settings=settings, engine=engine, out=out, name="run", no_pictures=True
    )
    return RunDirectory(run.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("inline"))


def test_a_run_measures_masks_by_site_and_class(run: RunDirectory) -> None:
    summary = run.read_json("summary.json")
    assert summary["task"] == "segmentation"
    assert set(summary["sites"]) == {"north", "east", "south", "west"}
    for metrics in summary["sites"].values():
        assert {"dice", "iou", "hausdorff-95", "surface-distance", "loss"} <= set(metrics)
        assert 0 <= metrics["iou"] <= metrics["dice"] <= 1
    rows = (run.path / "metrics.csv").read_text()
    assert "class.1.dice" in rows
    counts = run.read_json("silos.json")["north"]["label_counts"]
    assert counts["train"][0] == 0 < counts["train"][1], "every mask has a vessel"


@pytest.mark.soak
def test_processes_give_the_same_bytes(run: RunDirectory, tmp_path: Path) -> None:
    other = train(tmp_path, engine="processes")
    for name in FILES:
        assert (other.path / name).read_bytes() == (run.path / name).read_bytes(), name


def test_a_resumed_run_ends_with_the_same_model(run: RunDirectory, tmp_path: Path) -> None:
    begun = tmp_path / "run"
    shutil.copytree(run.path, begun)
    for path in (begun / "summary.json", begun / "model.safetensors"):
        path.unlink()
    newest = sorted((begun / "checkpoints").iterdir())[-1]
    newest.unlink()
    fedsilo.resume(begun)
    for name in ("metrics.csv", "model.safetensors"):
        assert (begun / name).read_bytes() == (run.path / name).read_bytes(), name


def test_the_best_median_and_worst_images_of_a_site_are_drawn(
    run: RunDirectory, tmp_path: Path
) -> None:
    drawn = list(fedsilo.overlays(run.path, site="north", pictures=tmp_path))
    assert drawn == [tmp_path / "overlays-north.png"]
    assert drawn[0].is_file()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"method": "fedproto"}, ("'fedproto'", "'task'")),
        ({"method": "feddbe"}, ("'feddbe'", "'task'")),
        ({"dataset": "mammography-phantom"}, ("'mammography-phantom'", "'task'")),
        ({"train.loss": "evidential"}, ("'train.loss'",)),
        ({"server.early-stopping-metric": "accuracy"}, ("'server.early-stopping-metric'",)),
        ({"network.name": "resnet22"}, ("'network.name'", "unet")),
        ({"task": "classification"}, ("'vessels-synthetic'", "'task'")),
    ],
)
def test_what_segmentation_cannot_do_is_refused(
    changes: dict[str, Value], facts: tuple[str, ...], tmp_path: Path
) -> None:
    with refuses(SettingError, *facts):
        fedsilo.simulate("fedavg-digits", settings=TINY | changes, out=tmp_path, name="run")


def test_masks_of_a_site_are_written_with_the_numbers_of_their_classes(
    run: RunDirectory, tmp_path: Path
) -> None:
    written = fedsilo.predict(run.path, site="north", split="test", out=tmp_path / "masks")
    table = written.frame()
    assert list(table) == ["file", "mask", "vessel", "fault"]
    values = np.asarray(Image.open(tmp_path / "masks" / table["mask"][0]))
    assert values.shape == (16, 16)
    assert (values == 1).mean() == pytest.approx(table["vessel"][0])


def test_a_page_has_each_image_with_the_outlines_of_its_mask(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_page, "PICTURES", 2)
    html = tmp_path / "masks.html"
    written = fedsilo.predict(
        run.path, site="north", split="test", out=tmp_path / "masks", html=html
    )
    page = html.read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert page.count("<article") == len(written.frame())
    share = written.frame()["vessel"][0]
    assert f"{share:.1%} of the pixels" in page


@pytest.mark.parametrize(
    "look",
    [
        lambda run: fedsilo.explain(run, site="north"),
        lambda run: fedsilo.calibrate(run, "north"),
        lambda run: list(fedsilo.embeddings([run])),
        lambda run: fedsilo.predict(run, split="test", site="north", out="x", coverage=0.9),
    ],
)
def test_commands_for_one_answer_per_patient_refuse_masks(
    look: Callable[[Path], object], run: RunDirectory
) -> None:
    with refuses(SettingError, str(run.path)):
        look(run.path)


def test_the_card_and_the_clinics_report_speak_of_masks(run: RunDirectory, tmp_path: Path) -> None:
    card = fedsilo.card(run.path, out=tmp_path / "card.md").read_text()
    assert "image-segmentation" in card
    assert "type: dice" in card
    (page,) = fedsilo.report(run.path, tmp_path / "clinic.html", reader="clinic")
    text = page.read_text()
    assert "Masks of test images, by class and site" in text
    assert "Dice" in text
