"""A caller's own data from Python: in every form a run, and all that a run can be asked."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from torch import from_numpy, ones, tensor
from torch.utils.data import Dataset, TensorDataset

from fedsilo import Run, doctor_run, predict, resume, simulate, survey
from fedsilo.api import hugging_face
from fedsilo.api.own_silos import write_to_cache
from fedsilo.core.errors import DataError, FedsiloError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.images.decoding import decode_image
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.server_app.records.checkpoints import CheckpointHook
from tests.support.data_folders import write_sorted

SMALL: dict[str, Value] = {
    "rounds": 2,
    "train.local-epochs": 1,
    "network.width": 4,
    "train.mc-passes": 2,
    "machine.device": "cpu",
    "server.evaluate-every": 0,
}


def frame(rows: int = 40, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    ill = np.arange(rows) % 2
    ages = rng.normal(50 + 10 * ill, 5)
    return pd.DataFrame({"age": ages, "kind": rng.choice(["x", "y"], rows), "ill": ill})


def frames() -> dict[str, pd.DataFrame]:
    return {"north": frame(), "south": frame(60, 1)}


def images(count: int, *form: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images of noise, brighter for label 1, and the labels."""
    labels = np.arange(count) % 2
    noise = np.random.default_rng(count).integers(0, 100, (count, *form))
    return (noise + 100 * labels.reshape(-1, *(1 for _ in form))).astype(np.uint8), labels


class Pictures(Dataset[tuple[Image.Image, int]]):
    """Pictures of different sizes, as torchvision's data sets give them."""

    classes = ("cat", "dog")

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        return Image.new("L", (20 + place % 3, 24), 5 * (place + self.first)), place % 2


class Pairs(Dataset[Any]):
    """What a data set of PyTorch gives, one pair after the other."""

    def __init__(self, *pairs: tuple[Any, Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self.pairs[place]


class Hub:
    """A ``datasets.Dataset`` as far as it is used: rows, and columns of which some have names."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        kind = "Image" if rows and isinstance(rows[0].get("picture"), Image.Image) else "Value"
        self.info = Mock(license="", homepage="")
        self.features: dict[str, Any] = {"picture": type(kind, (), {})()}
        self.features["ill"] = Mock(names=["cat", "dog"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows]

    def select(self, places: list[int]) -> "Hub":
        return Hub([self.rows[place] for place in places])

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)


EMPTY = Hub([{"picture": Image.new("L", (9, 9)), "ill": 0}]).select([])
EMPTY.features["picture"] = type("Image", (), {})()


def run_of(folder: Path, silos: object, method: str = "fedavg", **more: Any) -> Run:
    settings = SMALL | {"cache-dir": str(folder / "cache")} | more.pop("settings", {})
    more = {"name": "own", "out": folder / "runs"} | more
    return simulate(method, silos=silos, settings=settings, **more)


def read(folder: Path, silos: object, label: str = "ill", missing: str = "drop") -> list[Silo]:
    """Return silos as a run has them, without a run."""
    dataset, data = write_to_cache(silos, label, missing, folder / "cache")
    settings = CommonSettings(
        dataset=dataset,
        data_dir=str(data),
        cache_dir=str(folder / "cache"),
        image_size=16 if dataset == "images" else 0,
    )
    return [load_silo(name, settings) for name in silo_names(settings)]


def sizes(run: Run) -> dict[str, int]:
    parts = run.sites.set_index("site")[["train", "val", "test"]]
    return {str(site): int(count) for site, count in parts.sum(axis=1).items()}


@pytest.mark.parametrize(
    ("make", "dataset"),
    [
        (frame, "table"),
        (lambda rows: (frame(rows)[["age"]], frame(rows)["ill"]), "table"),
        (
            lambda rows: (np.random.default_rng(0).normal(size=(rows, 3)), np.arange(rows) % 2),
            "table",
        ),
        (lambda rows: images(rows, 16, 16), "arrays"),
        (lambda rows: images(rows, 16, 16, 3), "arrays"),
        (lambda rows: TensorDataset(*map(from_numpy, images(rows, 1, 16, 16))), "arrays"),
        (Pictures, "images"),
    ],
    ids=["frame", "frame and labels", "rows", "grey", "colour", "tensors", "pictures"],
)
def test_own_data_of_each_form_are_silos_of_the_names_that_they_are_given(
    make: Callable[[int], object], dataset: str, tmp_path: Path
) -> None:
    label = "ill" if make is frame else "label"
    silos = read(tmp_path, {"north": make(40), "south": make(50)}, label)
    assert {silo.name: sum(map(len, silo.splits().values())) for silo in silos} == {
        "north": 40,
        "south": 50,
    }
    assert {str(silo.folder and silo.folder.parent.name) for silo in silos} == {f"{dataset}-silos"}


def test_the_same_data_are_written_once_for_their_owner_alone(tmp_path: Path) -> None:
    first, again, other = (
        write_to_cache(silos, "ill", "drop", tmp_path)[1]
        for silos in (frames(), frames(), {"north": frame(seed=9), "south": frame()})
    )
    assert first == again != other
    assert first.parent == tmp_path / "own-silos"
    assert sorted(path.name for path in first.iterdir()) == [
        "north.csv",
        "schema.yaml",
        "south.csv",
    ]
    assert first.stat().st_mode & 0o077 == 0
    assert sorted(first.parent.iterdir()) == sorted([first, other]), "nothing is left beside them"


def test_data_of_no_site_are_cut_by_a_partition(tmp_path: Path) -> None:
    settings: dict[str, Value] = {"partition": "dirichlet", "silos": 2, "concentration": 100.0}
    run = run_of(tmp_path, images(120, 16, 16), "fedprox", network="conv", settings=settings)
    assert sum(sizes(run).values()) == 120
    assert list(sizes(run)) == ["silo-1", "silo-2"]
    assert (run.summary["method"], run.settings["network.name"]) == ("fedprox", "conv")


def test_pictures_in_parts_keep_them(tmp_path: Path) -> None:
    (silo,) = read(tmp_path, {"train": Pictures(40), "test": Pictures(10, first=40)})
    assert {part: len(own) for part, own in silo.splits().items()} == {
        "train": 40,
        "val": 0,
        "test": 10,
    }


def test_a_run_on_frames_that_dies_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_of(tmp_path, frames(), label="ill", name="whole")
    kept = CheckpointHook.round_ended

    def die(self: Any, *given: Any) -> None:
        kept(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointHook, "round_ended", die)
        with pytest.raises(KeyboardInterrupt):
            run_of(tmp_path, frames(), label="ill", name="cut")
    cut = resume(tmp_path / "runs" / "cut")
    for file in ("metrics.csv", "model.safetensors", "silos.json"):
        assert (cut.path / file).read_bytes() == (whole.path / file).read_bytes()


@pytest.mark.parametrize("none", [-1, None])
def test_a_label_of_the_hub_that_stands_for_none_is_no_class(
    none: int | None, tmp_path: Path
) -> None:
    labels = [0, 1] * 8 + [none] * 3
    (silo,) = read(tmp_path, Hub([{"picture": float(i), "ill": y} for i, y in enumerate(labels)]))
    assert silo.classes == ("cat", "dog")
    assert (np.sum([*silo.label_counts().values()], axis=0).tolist(), silo.dropped) == ([8, 8], 3)
    pictures = Hub(
        [{"picture": Image.new("L", (20, 20), i), "ill": y} for i, y in enumerate(labels)]
    )
    with pytest.raises(
        DataError,
        match=r"^silo 'data', sample 16 must have a label of one class: leave the sample out$",
    ):
        read(tmp_path, pictures)


def test_a_part_of_the_hub_without_labels_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        part: Hub(
            [{"picture": Image.new("L", (20, 20), i), "ill": y} for i, y in enumerate(labels)]
        )
        for part, labels in {"train": [0, 1, None, 0, 1], "test": [-1, -1]}.items()
    }
    monkeypatch.setattr(hugging_face, "_load_parts", lambda name: parts)
    lines = [*hugging_face.fetch_named("some/set", tmp_path, "ill")]
    assert "left out: 3 samples without a label" in lines
    assert f"{tmp_path}/some--set: 4 train" in lines
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    folder = "some--set/train"
    assert found == [
        f"{folder}/{c}/{i:06}.png"
        for c, i in zip(["cat"] * 2 + ["dog"] * 2, (0, 2, 1, 3), strict=True)
    ]
    monkeypatch.setattr(hugging_face, "_load_parts", lambda name: {"test": parts["test"]})
    with pytest.raises(DataError, match="data set 'other' has no sample with a label"):
        list(hugging_face.fetch_named("other", tmp_path, "ill"))


@pytest.mark.parametrize("kind", [tensor, lambda one: np.array([one]), np.int64])
def test_labels_of_pictures_are_classes_whatever_number_they_are(
    kind: Callable[[int], Any], tmp_path: Path
) -> None:
    pairs = [(Image.new("L", (20, 20), i), kind(i % 2)) for i in range(12)]
    (silo,) = read(tmp_path, {"north": Pairs(*pairs)})
    assert silo.classes == ("0", "1")


def test_a_picture_is_turned_as_its_file_would_be(tmp_path: Path) -> None:
    left = np.zeros((16, 16), np.uint8)
    left[:, :8] = 255
    others = [Image.new("L", (16, 16), 10 * number) for number in range(1, 8)]
    exif = Image.Exif()
    exif[0x112] = 6  # a quarter clockwise
    Image.fromarray(left).save(tmp_path / "a.jpg", exif=exif)
    picture = Image.open(tmp_path / "a.jpg")
    pairs = [(one, i % 2) for i, one in enumerate([picture, *others])]
    (silo,) = read(tmp_path, {"north": Pairs(*pairs)})
    upright = decode_image(tmp_path / "a.jpg", 16)
    assert upright[0, 0].min() > 200 > 50 > upright[0, 15].max()
    assert np.array_equal(silo.train.inputs[0].numpy(), upright)


@pytest.mark.parametrize("form", ["frame", "folder"])
def test_own_data_are_surveyed_examined_and_predicted_as_any(form: str, tmp_path: Path) -> None:
    if form == "frame":
        run = run_of(tmp_path, frames(), label="ill")
    else:
        data: dict[str, Value] = {"dataset": "folder", "data.image-size": 16}
        data |= {"data.dir": str(write_sorted(tmp_path / "data", 16))}
        run = run_of(tmp_path, None, settings=data)
    own: dict[str, Value] = {
        key: run.settings[key]
        for key in ("dataset", "data.dir", "data.cache-dir", "data.image-size")
    }
    page = survey("fedavg", settings=own, out=tmp_path / "runs", name="survey")
    document = json.loads((page.parent / "survey.json").read_text())
    counts = {"train": 26, "test": 14} if form == "frame" else {"train": 24, "test": None}
    assert document["sites"]["north"]["samples"] == counts, "8 are below the floor"
    findings = doctor_run("fedavg", settings=own)
    assert not [finding for finding in findings if "FAILED" in str(finding)]
    new = {"images": tmp_path / "data" / "north" / "a"}
    if form == "frame":
        frame(5, 7).drop(columns="ill").to_csv(tmp_path / "new.csv", index=False)
        new = {"table": tmp_path / "new.csv"}
    predicted = predict(run, site="north", **new).frame()  # type: ignore[union-attr]
    assert len(predicted) == (5 if form == "frame" else 16)


@pytest.mark.parametrize(
    ("silos", "said"),
    [
        (
            {"a": frame().drop(columns="ill")},
            "silo 'a' has no column 'ill' of labels, but age, kind",
        ),
        ({"a": "patients.csv"}, "silo 'a' is of type str: give a DataFrame, a pair"),
        ({}, "silos is empty: give at least one silo, each a DataFrame"),
        ({"a/b": frame()}, "'a/b' cannot be a site's name"),
        ({"a": frame(), "b": images(4, 16, 16)}, "silo 'a' is tables and 'b' is arrays"),
        ({"a": (np.zeros((4, 16, 16)), [0, 1])}, r"samples \(4, 16, 16\) and labels \(2,\)"),
        ({"a": (np.zeros((4, 16, 16), int), [0, 1, 0, 1])}, "silo 'a': x must be .*, but is int64"),
        (
            {"train": frame(), "test": frame()},
            "named train, test, but these are parts of a data set",
        ),
        ({"a": (np.zeros((4, 2)), None)}, r"silo 'a' has samples \(4, 2\) and labels \(1,\)"),
        ({"a": ([[1, 2], [3]], [0, 1])}, "silo 'a' is not an array .*inhomogeneous"),
        (
            {"a": (images(2, 16, 16)[0], [0, np.nan])},
            "silo 'a', sample 1 must have a label of one cl",
        ),
        (
            {"a": (images(2, 16, 16)[0], [None, "x"])},
            "silo 'a', sample 0 must have a label of one cl",
        ),
        ({"a": Pairs((Image.new("I;16", (9, 9)), 0))}, "sample 0 is not a picture of 8 bits"),
        (
            {"a": Pairs((Image.new("L", (9, 9)), 0), (None, 1))},
            "sample 1 is not a picture of 8 bits",
        ),
        ({"a": Pairs((Image.new("L", (9, 9)), [0, 1]))}, "sample 0 must have a label of one class"),
        ({"a": frame().rename(columns={"age": "age>=5"})}, "^column 'age>=5' has '=' in its name"),
        (
            {"a": frame()[["ill"]]},
            "^no column is 'numeric' or 'categorical': declare at least one$",
        ),
        ({1: frame(), "1": frame()}, "silos has a name twice, as a number and as a text"),
        (
            {"a": (images(4, 16, 16)[0].astype(object), [0, 1, 0, 1])},
            r"^silo 'a': x must be 8-bit numbers or floats .*, but is object \(4, 16, 16\)",
        ),
        (
            {"a": Pairs(*[(ones(3, requires_grad=True), 0)] * 2)},
            "silo 'a' is not an array .*detach",
        ),
        ({"a": Pairs(*[(Image.new("L", (9, 9)), "é" * 128)] * 2)}, "that can be seen: rename"),
        ({"a": Pairs(*[(Image.new("L", (9, 9)), "x\ny")] * 2)}, "that can be seen: rename"),
        ({"a": Pairs(*[(Image.new("L", (9, 9)), "x")] * 2)}, "^silos have one class, 'x': a clas"),
        ({"a": EMPTY, "b": Pictures(8)}, "^silo 'a' is empty: leave it out$"),
        ({"a": Pictures(0)}, "silo 'a' is empty"),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_a_line_before_a_run_begins(
    silos: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsiloError, match=said) as refused:
        run_of(tmp_path, silos, label="ill")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "cache").glob("own-silos/*"))


def test_a_network_that_sites_cannot_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="network must be a name, or a function or class"):
        run_of(tmp_path, frames(), label="ill", network=lambda: None)
    of_script = type("Net", (), {"__module__": "__main__"})
    with pytest.raises(SettingError, match=r"network 'Net' is defined in the running script"):
        run_of(tmp_path, frames(), label="ill", network=of_script)


def test_what_is_missing_is_left_out_or_imputed_as_is_said(tmp_path: Path) -> None:
    gaps = frame().assign(age=lambda one: one["age"].where(one.index % 4 > 0))
    for missing, rows in (("drop", 30), ("impute", 40)):
        (silo,) = read(tmp_path, {"north": gaps}, missing=missing)
        assert sum(map(len, silo.splits().values())) == rows
    with pytest.raises(SettingError, match="missing must be 'drop' or 'impute', but is 'zero'"):
        read(tmp_path, {"north": gaps}, missing="zero")
