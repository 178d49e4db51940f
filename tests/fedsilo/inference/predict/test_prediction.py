"""``fedsilo predict``: what is written, whose model answers, what is refused."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsilo import embeddings, explain, predict
from fedsilo.cli.main import main
from fedsilo.core.errors import DataError, RunDirectoryError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import image_reader
from fedsilo.inference.predict.inputs import choose_source
from fedsilo.models.tasks.task import task_of
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.fedsilo.inference.predict.test_data_sets import run_of
from tests.support.data_folders import save_picture, write_images, write_tables

Refused = Callable[..., str]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data and a run of two hospitals' tables, standardised by site."""
    folder = tmp_path_factory.mktemp("tables")
    data = str(write_tables(folder / "data"))
    run_of("table", folder, data, dropout=0.0)
    run_of("table", folder, data, method="local", standardise="pooled", **{"run.name": "local"})
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    run_of("images", folder, str(write_images(folder / "data", "images.yaml")))
    return folder


def test_a_file_of_a_split_holds_numbers_with_all_their_digits(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "out.csv"
    run = finished / "picsr"
    assert main(["predict", str(run), "--site", "s2a", "--split", "test", "--out", str(out)]) == 0
    rows, document = rows_of(out), json.loads((tmp_path / "made" / "out.csv.json").read_text())
    columns = ["row", "predicted", *(f"p.{n}" for n in range(10)), "entropy"]
    columns += [f"weight.{site}" for site in ("s1a", "s2a", "s3a")]
    assert list(rows[0]) == [*columns, "truth", "fault"]
    probabilities = torch.tensor(
        [[float(row[f"p.{n}"]) for n in range(10)] for row in rows], dtype=torch.float64
    )
    truth = torch.tensor([int(row["truth"]) for row in rows])
    metrics = csv.DictReader((run / "metrics.csv").open())
    told = {
        row["metric"]: float(row["value"])
        for row in metrics
        if (row["round"], row["site"], row["split"]) == ("2", "s2a", "test")
    }
    again = task_of(CommonSettings()).metrics(probabilities, truth)
    assert {name: again[name] for name in again} == {name: told[name] for name in again}
    assert document["figures"] == again
    weights = [sum(float(row[f"weight.{s}"]) for s in ("s1a", "s2a", "s3a")) for row in rows]
    assert weights == pytest.approx([1.0] * len(rows), abs=1e-5)
    entropies = [float(row["entropy"]) for row in rows]
    assert np.mean(entropies) == pytest.approx(told["entropy"], rel=1e-12)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("15 predicted: ")
    assert printed[-1] == str(out)


def test_the_document_says_what_answered(finished: Path) -> None:
    document = predict(finished / "fedavg", split="val").document
    assert (document["run"], document["method"], document["site"]) == ("fedavg", "fedavg", "s1a")
    assert document["model"] == "of all sites"
    assert document["source"] == {"split": "val"}
    assert document["settings"]["network.width"] == 4
    assert not {"data.dir", "run.out", "run.name"} & document["settings"].keys()
    assert {"fedsilo", "torch"} <= document["software"].keys()
    own = predict(finished / "local", site="s1a", split="val").document
    assert own["model"] == "the site's own"
    assert own["weights"] != document["weights"]


def test_the_digest_is_of_the_weights_and_of_nothing_else(finished: Path) -> None:
    first, second = (FinishedRun.open(finished / "fedavg").model(site) for site in ("s1a", "s2a"))
    assert first.weights_digest() == second.weights_digest()
    with torch.no_grad():
        next(first.network.parameters()).view(-1)[0] += 1e-6
    assert first.weights_digest() != second.weights_digest()


def test_rows_of_a_new_table_are_those_of_the_split_that_they_were(tables: Path) -> None:
    """All rows of north as new ones: each of its split is among them, with the same answer."""
    north = tables / "data" / "north.csv"
    new = predict(tables / "table", site="north", table=north)
    assert new.frame().columns[0] == "line"
    assert new.inputs.names == [str(line) for line in range(2, 32)]
    split = predict(tables / "table", site="north", split="train")
    mine, theirs = (one.own.round(decimals=6).tolist() for one in (new, split))
    assert all(row in mine for row in theirs)


def test_a_local_model_of_a_table_has_the_pooled_figures(tables: Path) -> None:
    """No model is shared that could hold them: they lie by themselves."""
    assert json.loads((tables / "local" / "standardisation.json").read_text()).keys() == {
        "mean",
        "std",
    }
    found = predict(tables / "local", site="south", split="test")
    assert math.isfinite(found.document["figures"]["loss"])


def test_images_that_cannot_be_read_are_rows_with_their_reason(
    pictures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    (folder / "more").mkdir(parents=True)
    rng = np.random.default_rng(5)
    for name in ("b.png", "a.png", "more/c.png"):
        save_picture(folder / name, rng)
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:60])
    (folder / ".hidden.png").write_text("x")
    (folder / "more" / "DICOMDIR").write_text("the index of a DICOM folder")
    Image.fromarray(np.full((40, 40), 40000, np.uint16)).save(folder / "deep.png")
    out = tmp_path / "out.csv"
    told = []
    found = predict(
        pictures / "images",
        images=folder,
        out=out,
        watch=lambda done, total: told.append((done, total)),
    )
    rows = rows_of(out)
    assert [row["file"] for row in rows] == [
        "a.png",
        "b.png",
        "broken.png",
        "deep.png",
        "more/c.png",
    ]
    assert [bool(row["predicted"]) for row in rows] == [True, True, False, False, True]
    assert "damaged" in rows[2]["fault"]
    assert "more than 8 bits per channel" in rows[3]["fault"]
    assert found.own.shape == (3, 2)
    assert any(line.startswith("  file broken.png: ") for line in found.lines())
    assert told[-1] == (5, 5)


def test_a_manifest_names_files_from_its_own_folder(pictures: Path) -> None:
    north = pictures / "data" / "north"
    listed = predict(pictures / "images", manifest=north / "list.csv")
    assert listed.inputs.names == [f"{number}.png" for number in range(16)]
    assert not listed.inputs.faults


def test_many_files_are_batched_as_a_split_is(pictures: Path) -> None:
    """The site's whole test split, by its files: the same draws, so the same digits."""
    model = FinishedRun.open(pictures / "images").model("north")
    read = {
        bytes(image): path
        for path in sorted((pictures / "data" / "north").glob("*.png"))
        for image in [image_reader(model.site, model.common)(path)]
    }
    manifest = pictures / "data" / "north" / "test.csv"
    paths = [read[bytes(image.numpy())].name for image in model.silo.test.inputs]
    manifest.write_text("path\n" + "".join(f"{name}\n" for name in paths))
    new = predict(pictures / "images", site="north", manifest=manifest)
    manifest.unlink()
    own = predict(pictures / "images", site="north", split="test")
    assert torch.equal(new.own, own.own)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a runner of ``predict`` that is refused in one line, and leaves no file."""

    def run(directory: Path, *words: str) -> str:
        out = tmp_path / "refused.csv"
        assert main(["predict", str(directory), *words, "--out", str(out)]) == 1
        assert not out.exists()
        assert not out.with_name("refused.csv.json").exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return run


@pytest.mark.parametrize(
    ("run", "words", "told"),
    [
        ("fedavg", "", "nothing is named to predict: give one of --images"),
        ("fedavg", "--split test --table x.csv", "--table and --split is named"),
        (
            "fedavg",
            "--split test --coverage 1.2",
            "--coverage is 1.2; it must be above 0 and below 1",
        ),
        ("fedavg", "--split test --coverage 0", "--coverage is 0.0; it must be"),
        (
            "fedavg",
            "--split test --coverage 0.9",
            "calibration-s1a.json does not exist: run 'fed",
        ),
        ("fedavg", "--split test --site nobody", "has no site 'nobody'"),
        ("fedavg", "--split test --id patient", "--id 'patient' is a column of a table: give"),
        ("fedavg", "--images nowhere", "nowhere is not a folder"),
        ("fedavg", "--table x.csv", "data set 'digits' is images: give files by --images"),
        ("table", "--images .", "data set 'heart-synthetic' is a table: give rows by --table"),
        ("table", "--table nowhere.csv", "nowhere.csv cannot be read"),
        ("local", "--split test", "each site has a model of its own: name one by --site (s1a, s2a"),
        ("fedavg-ft", "--split test", "each site has a model of its own: name one by --site"),
        ("vit", "--split test", "each site has a model of its own"),
        (
            "fedavg",
            "--split test --state-dir x",
            "--state-dir x is one site's state: name the site",
        ),
        ("fedavg/checkpoints", "--split test", "has not ended"),
        (
            "fedavg/checkpoints/round-000002.safetensors",
            "--split test",
            "is a file: name the run's",
        ),
        ("nowhere", "--split test", "nowhere does not exist: name one that does"),
    ],
)
def test_what_cannot_be_predicted_is_told_in_a_line(
    run: str, words: str, told: str, finished: Path, refused: Refused
) -> None:
    assert told in refused(finished / run, *words.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "record,age,kind\np,40,z\n",
            "line 2, column 'kind': this is not one of the declared levels",
        ),
        ("record,age\np,40\n", "lacks the columns 'kind'"),
        ("record,age,kind\np,old,a\n", "line 2, column 'age': this is not a number"),
    ],
)
def test_a_table_of_another_schema_is_told_by_its_line(
    text: str, told: str, tables: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "new.csv").write_text(text)
    assert told in refused(
        tables / "table", "--site", "north", "--table", str(tmp_path / "new.csv")
    )


def test_bad_rows_are_listed_by_id_the_others_are_predicted_and_the_exit_status_is_3(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    new.write_text("kind,age,patient\na,50,=p1\nz,50,p2\nb,,p3\n")
    words = ["--site", "north", "--table", str(new), "--id", "patient", "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        main(["predict", str(tables / "table"), *words])
    assert end.value.code == 3
    rows = rows_of(out)
    assert [row["id"] for row in rows] == ["./=p1", "p2", "p3"]
    assert [bool(row["predicted"]) for row in rows] == [True, False, True]
    printed = capsys.readouterr().out
    assert "1 without a prediction" in printed
    assert "line 3 (id p2): column 'kind': this is not one of" in printed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("file\na.png\n", "missing ['path'], 1 unknown"),
        ("path,price\na.png,3\n", "missing [], 1 unknown"),
        ("path\n", "lists no files"),
        ("path\na.png\na.png\n", "line 3, column 'path': the file is listed twice"),
        (
            "path\nnowhere.png\n",
            "none of 1 files can be read as the run's images",
        ),
    ],
)
def test_a_manifest_of_another_schema_is_told_by_its_line(
    text: str, told: str, pictures: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "list.csv").write_text(text)
    assert told in refused(pictures / "images", "--manifest", str(tmp_path / "list.csv"))


def test_a_file_that_is_there_is_left_alone(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("out.csv", "out.csv.json"):
        (tmp_path / name).write_text("mine")
        words = ["--split", "test", "--out", str(tmp_path / "out.csv")]
        assert main(["predict", str(finished / "fedavg"), *words]) == 1
        assert f"{name} already exists" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_no_command_shows_another_patient_under_a_row_of_the_run(tmp_path: Path) -> None:
    data = write_tables(tmp_path / "data")
    directory = run_of("table", tmp_path, str(data))
    south = data / "south.csv"
    header, *rows = south.read_text().splitlines()
    south.write_text("\n".join([header, *reversed(rows)]) + "\n")
    with pytest.raises(DataError) as explained:
        explain(directory.path, site="south")
    assert explained.value.code == "data"
    with pytest.raises(DataError) as drawn:
        embeddings([directory.path], site="south")
    assert drawn.value.code == "data"
    assert explain(directory.path, site="north").document()


def test_data_that_were_altered_since_are_refused(tmp_path: Path) -> None:
    data = write_tables(tmp_path / "data")
    directory = run_of("table", tmp_path, str(data))
    south = data / "south.csv"
    south.write_text(south.read_text().replace(",a,", ",b,"))
    with pytest.raises(DataError, match="the test rows of site south are not those of the run"):
        predict(directory.path, site="south", split="test")
    schema = data / "schema.yaml"
    schema.write_text(schema.read_text().replace("[a, b, c]", "[a, b, c, d]"))
    with pytest.raises(DataError, match="have another schema"):
        predict(directory.path, site="north", split="test")


def test_a_run_that_has_not_ended_is_refused(
    inline_run: Callable[..., RunDirectory], tiny: Callable[..., dict[str, Value]]
) -> None:
    directory = inline_run(tiny("fedavg", rounds=1))
    (directory.path / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match="has not ended: continue it by 'fedsilo resume"):
        predict(directory.path, split="test")


def test_a_request_names_one_source() -> None:
    with pytest.raises(SettingError, match="nothing is named"):
        choose_source(None, images=None, split=None)
    with pytest.raises(SettingError, match="--images and --split is named"):
        choose_source(None, images=Path("x"), split="test")
    with pytest.raises(SettingError, match="is a column of a table"):
        choose_source("id", images=Path("x"), split=None)
    source = choose_source("id", table=Path("x.csv"), split=None)
    assert (source.kind, source.path, source.id_column) == ("table", Path("x.csv"), "id")
