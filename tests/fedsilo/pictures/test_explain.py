"""``fedsilo explain`` and ``attention``: what is printed, written and drawn, what is refused."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from fedsilo.cli.main import main
from fedsilo.client_app.training.initial_network import set_prior
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.tiny import VIT

SITES = ["cleveland", "hungary", "switzerland", "va"]
HEART: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "rounds": 2,
    "train.local-steps": 2,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
    "seed": 7,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of picsr, one whose router bends, of fedavg and of local."""
    out = tmp_path_factory.mktemp("runs")
    picsr: dict[str, Value] = {"method": "picsr", "picsr.expert-rounds": 1}
    for name, values in {
        "picsr": picsr,
        "declared": picsr | {"data.standardise": "declared"},
        "fedavg": {"method": "fedavg"},
        "local": {"method": "local"},
    }.items():
        run_inline(resolve(HEART | values | {"run.name": name, "run.out": str(out)}), 4)
    return out


def _explain(run: Path, site: str = "va", row: int = 3, *more: str) -> int:
    return main(["explain", str(run), "--site", site, "--row", str(row), *more])


LINE = re.compile(
    r"  (\w+) +weight +([\d.]+) %  probability +([\d.]+) %  differs most from its patients in (.*)",
    re.ASCII,
)


def test_a_patient_is_explained_by_a_line_per_hospital(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "told.json"
    assert _explain(runs / "picsr", "va", 3, "--json-file", str(path)) == 0
    capsys.readouterr()
    document = json.loads(path.read_text())
    path.unlink()
    before = sorted(path.name for path in (runs / "picsr").iterdir())
    assert _explain(runs / "picsr") == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("va, test row 3: truth ")
    assert "probability of 'disease' is " in title
    read = [found.groups() for line in lines[1:] if (found := LINE.fullmatch(line))]
    told = zip(
        *(SITES, document["weights"], document["answers"], document["contributions"]), strict=True
    )
    expected = []
    for site, weight, answer, parts in sorted(told, key=lambda one: -one[1]):
        by_feature = dict(zip(document["features"], parts, strict=True))
        ranked = sorted(by_feature, key=lambda feature: -abs(by_feature[feature]))
        expected.append((site, f"{100 * weight:.1f}", f"{100 * answer:.1f}", ", ".join(ranked[:3])))
    assert read == expected
    assert sorted(path.name for path in (runs / "picsr").iterdir()) == before


@pytest.mark.parametrize(("run", "near"), [("picsr", 1e-3), ("declared", 0.05)])
def test_the_document_adds_up_and_a_picture_is_drawn(run: str, near: float, runs: Path) -> None:
    document, picture = runs / f"{run}.json", runs / f"{run}.png"
    assert (
        _explain(runs / run, "va", 3, "--json-file", str(document), "--picture", str(picture)) == 0
    )
    found = json.loads(document.read_text())
    assert found["experts"] == SITES
    assert found["features"][:3] == ["age", "sex", "trestbps"]
    assert sum(found["weights"]) == pytest.approx(1, abs=1e-5)
    assert [len(scores) for scores in found["scores"]] == [5, 5, 5, 5], "four distances and a bias"
    voices = [math.exp(sum(scores)) for scores in found["scores"]]
    assert found["weights"] == pytest.approx([voice / sum(voices) for voice in voices], abs=1e-5)
    for distance, parts in zip(found["distances"], found["contributions"], strict=True):
        assert len(parts) == len(found["features"])
        assert sum(parts) == pytest.approx(distance, rel=near, abs=1e-4)
    mixed = sum(w * a for w, a in zip(found["weights"], found["answers"], strict=True))
    assert f"is {100 * mixed:.1f} %" in found["title"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_splits_and_rows_are_other_patients(runs: Path) -> None:
    documents = []
    for more in (("--row", "3"), ("--row", "4"), ("--row", "3", "--split", "train")):
        path = runs / "one.json"
        assert _explain(runs / "picsr", "va", 3, *more, "--json-file", str(path)) == 0
        documents.append(json.loads(path.read_text())["distances"])
    assert documents[0] != documents[1]
    assert documents[0] != documents[2]


def test_the_weights_are_those_that_the_run_measured(runs: Path) -> None:
    test = RunDirectory(runs / "picsr").read_json("silos.json")["switzerland"]["sizes"]["test"]
    weights = []
    for row in range(test):
        path = runs / "one.json"
        assert _explain(runs / "picsr", "switzerland", row, "--json-file", str(path)) == 0
        weights.append(json.loads(path.read_text())["weights"])
    told = RunDirectory(runs / "picsr").read_json("routing.json")["sites"]["switzerland"]
    for index, site in enumerate(SITES):
        mean = sum(row[index] for row in weights) / test
        assert told[site]["mean"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("run", ["fedavg", "local"])
def test_a_table_is_explained_by_its_columns_for_methods_without_a_router(
    run: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "columns.json"
    assert _explain(runs / run, "va", 3, "--json-file", str(path)) == 0
    found = json.loads(path.read_text())
    assert found["columns"][:2] == ["age", "sex"]
    total = found["probability"] - found["mean_probability"]
    assert sum(found["contributions"]) == pytest.approx(total, abs=1e-6)
    assert "Shapley values" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["picsr", "fedavg"])
def test_a_new_row_is_explained_by_its_place_and_a_refused_one_is_told(
    run: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "new.csv"
    rows = ["54,1,4,130,240,0,0,140,0,1.0", "250,1,4,130,240,0,0,140,0,1.0"]
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak"
    table.write_text("\n".join([names, *rows]))
    for row, code, told in (
        (0, 0, "va, new.csv, row 0; "),
        (1, 1, "line 3: column 'age': 250 is impossible"),
        (2, 1, "has 2 rows, counted from 0: there is no row 2"),
    ):
        assert _explain(runs / run, "va", row, "--table", str(table)) == code
        captured = capsys.readouterr()
        assert told in captured.out + captured.err


def test_a_new_image_is_explained_by_its_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain", str(finished / "fedavg"), "--site", "s1a", "--image"]
    Image.fromarray(np.eye(16, dtype=np.uint8) * 200).save(tmp_path / "new.png")
    assert main([*words, str(tmp_path / "new.png")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("s1a, new.png\n")
    assert "Grad-CAM" in said
    assert main([*words, str(tmp_path / "nowhere.png")]) == 1
    assert "nowhere.png is missing" in capsys.readouterr().err
    assert main([*words, "x.png", "--table", "y.csv"]) == 1
    assert "an explanation is for one case" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "site", "row", "told"),
    [
        ("picsr", "basel", 0, "there is no silo 'basel': 4 silos are cleveland, hungary,"),
        ("picsr", "va", 45, "site va has 45 test rows, counted from 0, but no row 45"),
        ("picsr", "va", -1, "site va has 45 test rows, counted from 0, but no row -1"),
        ("nowhere", "va", 0, "nowhere does not exist: name one that does"),
    ],
)
def test_what_cannot_be_explained_is_told_in_one_line(
    run: str, site: str, row: int, told: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "refused.json"
    assert _explain(runs / run, site, row, "--json-file", str(path)) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error")
    assert told in error
    assert error.count("\n") == 1
    assert not path.exists()


def test_a_run_that_has_not_ended_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("config.toml", "model.safetensors"):
        (cut / name).write_bytes((runs / "picsr" / name).read_bytes())
    assert _explain(cut) == 1
    assert "cut has not ended" in capsys.readouterr().err


CENTRES = ["bcn", "msk4", "rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias"]
SKIN: dict[str, Value] = VIT | {
    "dataset": "dermoscopy-phantom",
    "data.image-size": 32,
    "split.sample-share": 0.003,
    "vit.backbone-patch": 8,
    "vit.prompt-length": 2,
    "rounds": 2,
    "train.local-epochs": 1,
    "train.batch-size": 8,
    "train.learning-rate": 0.05,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
    "seed": 7,
}
PROMPTED: dict[str, Value] = {"method": "fedevprompt", "fedevprompt.distillation-weight": 1.0}


@pytest.fixture(scope="module")
def skin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs of fedevprompt and local on six centres' made-up lesions."""
    out = tmp_path_factory.mktemp("skin")
    runs: dict[str, dict[str, Value]] = {
        "fedevprompt": PROMPTED,
        "local": {"method": "local", "rounds": 1},
    }
    for name, values in runs.items():
        run_inline(resolve(SKIN | values | {"run.name": name, "run.out": str(out)}), 6)
    return out


def _document(run: Path, site: str, row: int, *more: str) -> dict[str, Any]:
    path = run.parent / "told.json"
    assert _explain(run, site, row, "--json-file", str(path), *more) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


@pytest.mark.parametrize("run", ["fedevprompt", "local"])
def test_an_image_is_explained_by_truth_probabilities_beliefs_and_vacuity(
    run: str, skin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = skin / f"{run}.png"
    found = _document(skin / run, "bcn", 2, "--picture", str(picture))
    truth = load_silo("bcn", resolve(SKIN | {"method": "local"}).common).test.labels[2]
    assert found["classes"] == ["other", "nevus"]
    assert found["title"] == f"bcn, test row 2: truth {found['classes'][int(truth)]}"
    assert sum(found["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert sum(found["beliefs"]) + found["vacuity"] == pytest.approx(1, abs=1e-5)
    assert min(found["beliefs"]) >= 0
    assert 0 < found["vacuity"] <= 1
    assert [len(row) for row in found["rollout"]] == [4, 4, 4, 4]
    assert sum(map(sum, found["rollout"])) == pytest.approx(1, abs=1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == found["title"]
    told = zip(found["classes"], found["probabilities"], found["beliefs"], strict=True)
    assert lines[:2] == [f"{name}: probability {p:.3f}, belief {b:.3f}" for name, p, b in told]
    assert lines[2].startswith(f"vacuity {found['vacuity']:.3f} ")
    cells = {value: (r, c) for r, row in enumerate(found["rollout"]) for c, value in enumerate(row)}
    row, column = cells[max(cells)]
    assert lines[3:] == [f"looked most at row {row + 1}, column {column + 1} of 4 x 4 patches"]


@pytest.mark.parametrize("site", ["bcn", "vienna_dias"])
def test_a_site_explains_with_the_prompts_head_and_prior_of_its_own(site: str, skin: Path) -> None:
    run = skin / "fedevprompt"
    common = resolve(SKIN | PROMPTED).common
    silo = load_silo(site, common)
    arrays, _ = load_state(run / "sites" / site / "round-000002-00.safetensors")
    own = {
        name.removeprefix("network/"): torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith("network/")
    }
    network = cast(PromptedViT, build_classifier(common, silo.shape))
    load_exchanged(network, own)
    set_prior(network, silo.train.labels)
    with torch.no_grad():
        alpha = network.eval()(float_inputs(silo.test.inputs[:1]))[0].exp()
    found = _document(run, site, 0)
    assert found["probabilities"] == pytest.approx((alpha / alpha.sum()).tolist(), abs=1e-5)
    assert found["vacuity"] == pytest.approx(2 / alpha.sum().item(), abs=1e-5)
    other = "bcn" if site != "bcn" else "msk4"
    foreign = exchanged_arrays(cast(PromptedViT, FinishedRun.open(run).lab(other).open()))
    assert foreign.keys() == own.keys()
    assert not torch.equal(foreign["prompts.t"], own["prompts.t"])


def test_a_state_that_lies_elsewhere_is_named_by_an_option(skin: Path, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "hospital"
    shutil.copytree(skin / "fedevprompt", run)
    shutil.move(run / "sites" / "bcn", elsewhere)
    found = _document(run, "bcn", 0, "--state-dir", str(elsewhere))
    assert found == _document(skin / "fedevprompt", "bcn", 0)


@pytest.mark.parametrize(
    ("site", "row", "split", "told"),
    [
        ("bcn", 9, "test", "site bcn has 9 test rows, counted from 0, but no row 9"),
        ("bcn", -1, "test", "site bcn has 9 test rows, counted from 0, but no row -1"),
        ("bcn", 0, "val", "site bcn has 0 val rows"),
        ("basel", 0, "test", "there is no silo 'basel'"),
    ],
)
def test_an_image_that_is_not_there_is_told_in_one_line(
    site: str, row: int, split: str, told: str, skin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _explain(skin / "fedevprompt", site, row, "--split", split) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_run_that_shares_nothing_without_the_sites_state_is_told_of(
    skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(skin / "local", run)
    shutil.rmtree(run / "sites" / "bcn")
    assert _explain(run, "bcn", 0) == 1
    assert (
        f"{run / 'sites' / 'bcn'} does not contain a model of the site" in capsys.readouterr().err
    )
    assert _explain(run, "msk4", 0) == 0


def _attention(run: Path, *more: str) -> int:
    return main(["attention", str(run), *more])


def _is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_attention_is_drawn_once_per_site(
    skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in (skin / "fedevprompt").iterdir())
    out = tmp_path / "new" / "folder"
    assert _attention(skin / "fedevprompt", "--images", "1", "--pictures", str(out)) == 0
    pictures = [out / f"attention-{site}.png" for site in CENTRES]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in pictures]
    assert sorted(out.iterdir()) == pictures
    assert all(_is_picture(path) for path in pictures)
    assert len({path.read_bytes() for path in pictures}) == 6
    assert sorted(path.name for path in (skin / "fedevprompt").iterdir()) == before


def test_attention_of_one_site_lies_in_the_run_directory(
    skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(skin / "local", run)
    # msk4 has one test image, of one class
    assert _attention(run, "--site", "msk4", "--images", "2") == 0
    assert capsys.readouterr().out == f"{run / 'attention-msk4.png'}\n"
    assert _is_picture(run / "attention-msk4.png")
    assert [path.name for path in run.glob("attention-*")] == ["attention-msk4.png"]


def test_a_site_without_images_of_the_split_is_told_of_and_no_picture_drawn(
    skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--site", "bcn", "--split", "val", "--pictures", str(tmp_path / "out"))
    assert _attention(skin / "fedevprompt", *more) == 0
    assert capsys.readouterr().out == "site bcn has no val images\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("images", ["0", "-3"])
def test_no_images_are_no_picture(
    images: str, skin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _attention(skin / "fedevprompt", f"--images={images}") == 1
    told = f"fedsilo: error[setting]: --images must be at least 1, but is {images}\n"
    assert capsys.readouterr().err == told


def test_a_run_without_a_vit_has_no_attention(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _attention(runs / "fedavg") == 1
    error = capsys.readouterr().err
    assert "has network 'auto', but only a ViT has attention to draw" in error
    assert error.count("\n") == 1
    assert not list((runs / "fedavg").glob("attention-*"))


@pytest.mark.parametrize("command", ["explain", "attention"])
def test_a_site_that_is_not_in_the_run_has_no_picture(
    command: str, skin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ["--row", "0"] if command == "explain" else []
    assert main([command, str(skin / "fedevprompt"), "--site", "basel", *row]) == 1
    assert "there is no silo 'basel'" in capsys.readouterr().err


def test_a_site_whose_state_is_gone_is_not_explained_by_untrained_prompts(
    skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = str(tmp_path / "bcn")
    assert _explain(skin / "fedevprompt", "bcn", 0, "--state-dir", empty) == 1
    assert "private state of site bcn is gone" in capsys.readouterr().err


def test_a_run_is_not_explained_by_another_backbone(
    skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "fedevprompt"
    shutil.copytree(skin / "fedevprompt", run)
    silos = json.loads((run / "silos.json").read_text())
    silos["bcn"]["backbone"] = "vit_small_patch16_224, timm"
    (run / "silos.json").write_text(json.dumps(silos))
    assert _explain(run, "bcn", 0) == 1
    assert "are not those of the run" in capsys.readouterr().err
