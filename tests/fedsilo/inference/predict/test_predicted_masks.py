"""Masks of new images by a network that was fine-tuned for segmentation."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsilo.cli.main import main
from fedsilo.client_app.training.compute import Compute
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.synthetic.phantoms import phantom_frame
from fedsilo.finetuning.tasks import predicted_masks
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.build_segmentation import build_segmentation


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a segmentation network and a classifier, both barely trained."""
    folder = tmp_path_factory.mktemp("tuned")
    words = ["--weights", "scratch", "--dataset", "angiogram-phantom", "--seeds", "1"]
    words += ["--epochs", "1", "--device", "cpu", "--site", "human", "--site", "animal"]
    for change in ("split.sample-share=0.03", "data.image-size=32", "width=4", "split.val-folds=2"):
        words += ["--set", change]
    for task in ("segmentation", "classification"):
        assert main(["finetune", "--task", task, "--out", str(folder / task), *words]) == 0
    return folder


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """Return a folder with three frames, one below, and a broken file."""
    (tmp_path / "new" / "more").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.png", "more/c.png")):
        Image.fromarray(phantom_frame("human", number, 32)[0]).save(tmp_path / "new" / name)
    (tmp_path / "new" / "broken.jpg").write_text("no image")
    return tmp_path / "new"


def test_masks_lie_in_their_folder_whatever_the_images_paths_say(
    tuned: Path, frames: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lists").mkdir()
    manifest, out = tmp_path / "lists" / "list.csv", tmp_path / "out" / "masks"
    out.parent.mkdir()
    before = {path: path.read_bytes() for path in frames.rglob("*.png")}
    (frames / "=1+1.png").write_bytes((frames / "a.png").read_bytes())
    listed = [str(frames / "a.png"), "../new/b.png", "../new/=1+1.png"]
    manifest.write_text("\n".join(["path", *listed]) + "\n")
    words = ["predict", str(tuned / "segmentation"), "--manifest", str(manifest)]
    assert main([*words, "--out", str(out)]) == 0
    assert {path: path.read_bytes() for path in before} == before, "no image is written over"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lists", "new", "out"]
    assert [path.name for path in out.parent.iterdir()] == ["masks"]
    with (out / "masks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all((out / row["mask"]).is_file() for row in rows)
    assert len({row["mask"] for row in rows}) == 3
    manifest.write_text("path\n../new/b.png\nnew/b.png\n")
    (tmp_path / "lists" / "new").symlink_to(frames)
    assert main([*words, "--out", str(tmp_path / "again")]) == 1
    assert "would be one file: rename one" in capsys.readouterr().err


def test_files_are_called_what_no_spreadsheet_computes(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    Image.fromarray(phantom_frame("human", 0, 32)[0]).save(tmp_path / "new" / "=1+1.png")
    words = ["predict", str(tuned / "segmentation"), "--images", str(tmp_path / "new")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "masks.csv").read_text().splitlines()[1].startswith("./=1+1.png,")
    (tmp_path / "new" / "a\x1b[2J.png").touch()
    assert main([*words, "--out", str(tmp_path / "other")]) == 1
    assert "holds 1 files whose names cannot be printed" in capsys.readouterr().err


def test_each_image_has_a_mask_of_its_own(
    tuned: Path, frames: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "masks"
    words = ["predict", str(tuned / "segmentation"), "--images", str(frames), "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 3
    assert "1 without a mask" in capsys.readouterr().out
    names = ["a.png", "b.png", "more/c.png"]
    images = torch.stack([torch.from_numpy(np.array(Image.open(frames / n))) for n in names])
    document = json.loads((tuned / "segmentation" / "finetune.json").read_text())
    settings = build(CommonSettings, document["settings"])
    network = build_segmentation("unet", settings, NetworkShape((1, 32, 32), 2))
    arrays, _ = load_state(tuned / "segmentation" / "model.safetensors")
    network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    wanted = predicted_masks(network, images[:, None], Compute(torch.device("cpu"), bf16=False))
    with (out / "masks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["a.png", "b.png", "broken.jpg", "more/c.png"]
    assert "is not an image" in rows[2]["fault"]
    for name, mask in zip(names, wanted, strict=True):
        written = np.array(Image.open(out / name))
        assert np.array_equal(written, mask.numpy() * 255)
        (row,) = (row for row in rows if row["file"] == name)
        assert float(row["catheter"]) == (mask == 1).double().mean().item()
    assert json.loads((out / "masks.json").read_text())["network"] == "unet"


@pytest.mark.parametrize(
    ("task", "words", "told"),
    [
        ("classification", ["--images", "new"], "has a fine-tuned classifier"),
        ("segmentation", ["--split", "test"], "no images are named: give --images"),
        ("segmentation", ["--images", "new/more/none"], "is not a folder"),
        (
            "segmentation",
            ["--images", "new", "--html", "p.html"],
            "--html does not apply to the masks",
        ),
        ("segmentation", ["--images", "new", "--coverage", "0.9"], "--coverage does not apply"),
        ("segmentation", ["--images", "new", "--best"], "--best does not apply"),
    ],
)
def test_what_has_no_masks_is_told_in_a_line(
    task: str,
    words: list[str],
    told: str,
    tuned: Path,
    frames: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(tuned / task), *words, "--out", "masks"]) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "masks").exists()


def test_a_setting_that_this_version_does_not_have_is_refused(
    tuned: Path, frames: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tuned / "segmentation", tmp_path / "other")
    document = json.loads((folder / "finetune.json").read_text())
    document["settings"]["network.widht"] = 5
    (folder / "finetune.json").write_text(json.dumps(document))
    words = ["predict", str(folder), "--images", str(frames), "--out", str(tmp_path / "masks")]
    assert main(words) == 1
    assert "unknown setting 'network.widht'" in capsys.readouterr().err
