"""Data sets of Hugging Face, whose library is played: what is loaded, and what is refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.api import hugging_face
from fedsilo.core.errors import DataError
from tests.support.errors import refuses

INFO = SimpleNamespace(license="CC0", homepage="https://example.org")


class Rows:
    """A part of a data set: rows of a column ``x`` and a label."""

    info = INFO

    def __init__(self, labels: list[int | None], label: str = "label") -> None:
        self.labels = labels
        self.features = {"x": object(), label: object()}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, column: str) -> list[int | None]:
        assert column == "label"
        return self.labels

    def select(self, places: list[int]) -> "Rows":
        return Rows([self.labels[place] for place in places])


Play = Callable[[Any], list[str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a stand-in for the library with a loaded data set, which collects the calls' names."""

    def played(found: Any) -> list[str]:
        called: list[str] = []

        def load(kind: str, name: str) -> Any:
            called.append(f"{kind} {name}")
            if isinstance(found, Exception):
                raise found
            return found

        library = SimpleNamespace(
            load_dataset=lambda name: load("hub", name),
            load_from_disk=lambda name: load("disk", name),
            concatenate_datasets=lambda parts: [row for part in parts for row in part.labels],
        )
        monkeypatch.setattr(hugging_face, "import_module", lambda name: library)
        return called

    return played


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mapping[str, Any], str]]:
    """Write no silo, but return a list of what would be written."""
    silos: list[tuple[Mapping[str, Any], str]] = []

    def write(folder: Path, parts: Mapping[str, Any], label: str, missing: str) -> str:
        (folder / "file").touch()
        silos.append((parts, missing))
        return "images" if "train" in parts else "table"

    monkeypatch.setattr(hugging_face, "write_silos", write)
    return silos


def test_the_parts_of_a_table_become_one(play: Play, written: list[Any], tmp_path: Path) -> None:
    called = play({"train": Rows([0, 1]), "test": Rows([None, 1])})
    lines = list(hugging_face.fetch_named("hearts/clean", tmp_path))
    target = tmp_path / "hearts--clean"
    assert (target / "file").is_file()
    assert called == ["hub hearts/clean"]
    assert written == [({"data": [0, 1, 1]}, "drop")]
    assert lines[:3] == [
        "licence: CC0",
        "source: https://example.org",
        "left out: 1 sample without a label",
    ]
    assert lines[3] == f"{target}: 2 train, 1 test"
    assert f"--set dataset=table --set data.dir={target} " in f"{lines[4]} "
    with refuses(DataError, target):
        list(hugging_face.fetch_named("hearts/clean", tmp_path))


def test_parts_of_images_become_splits_and_others_are_not_guessed(
    play: Play, written: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face, "image_columns", lambda features: ["x"])
    play({"train": Rows([0, 1]), "validation": Rows([1])})
    lines = list(hugging_face.fetch_named("moles", tmp_path))
    assert list(written[0][0]) == ["train", "val"]
    assert "--set dataset=folder" in lines[-1]
    play({"train": Rows([0]), "unlabelled": Rows([1])})
    with refuses(DataError, "'unlabelled'", "train"):
        list(hugging_face.fetch_named("others", tmp_path))
    assert not (tmp_path / "others").exists()


def test_a_folder_is_read_from_the_disk_and_is_one_part(
    play: Play, written: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    called = play(Rows([0, 1], label="other"))
    assert hugging_face._load_parts(str(folder)).keys() == {"train"}
    assert called == [f"disk {folder}"]
    part = Rows([0], label="other")
    assert hugging_face._keep_labelled(part, "label") is part, "its writer names the column"


def test_what_cannot_be_loaded_is_one_line_with_the_librarys_reason(
    play: Play, tmp_path: Path
) -> None:
    play(ConnectionError("no\nnetwork"))
    with refuses(DataError, "'hearts'", "network"):
        list(hugging_face.fetch_named("hearts", tmp_path))


@pytest.mark.parametrize("found", [ImportError("datasets"), SimpleNamespace(__path__=["."])])
def test_a_missing_library_or_the_folder_of_a_checkout_is_told(
    found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(hugging_face, "import_module", load)
    with refuses(DataError, "'huggingface'"):
        list(hugging_face.fetch_named("hearts", tmp_path))
