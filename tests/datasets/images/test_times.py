"""Images with a time and an event, in manifests and in arrays."""

from pathlib import Path

import numpy as np
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import SURVIVAL
from fedsilo.datasets.images.arrays import ARRAYS
from fedsilo.datasets.images.declaration import Declaration
from fedsilo.datasets.images.manifests import IMAGES
from fedsilo.datasets.silo.declared_silos import read_declared
from tests.support.data_folders import save_picture
from tests.support.errors import refuses

LABELS = ["2.5,1", "0,0", "7,1", "3,0", "4,1", "9,0"]
DECLARED = "sites: {north: north.csv}\ntask: survival\nevent: death\nimage-size: 16\n"


def manifest(folder: Path, labels: list[str]) -> Places:
    """Write a site's images of 16 x 16 pixels with ``labels``, each a time and an event."""
    rng = np.random.default_rng(0)
    lines = ["path,time,event"]
    for number, label in enumerate(labels):
        save_picture(folder / f"{number}.png", rng)
        lines.append(f"{number}.png,{label}")
    (folder / "north.csv").write_text("\n".join(lines) + "\n")
    (folder / "images.yaml").write_text(DECLARED)
    return Places(folder, folder / "cache")


def test_a_manifest_has_a_time_and_an_event_for_each_image(tmp_path: Path) -> None:
    silo = IMAGES.load(
        "north", CommonSettings(dataset="images", task=SURVIVAL), manifest(tmp_path, LABELS)
    )
    rows = [*silo.train.labels.tolist(), *silo.test.labels.tolist()]
    assert sorted(rows) == [[0, 0], [2.5, 1], [3, 0], [4, 1], [7, 1], [9, 0]]
    assert (silo.task, silo.classes, silo.shape.outputs) == (SURVIVAL, ("death",), 1)
    counts = silo.label_counts()
    assert [sum(pair) for pair in zip(counts["train"], counts["test"], strict=True)] == [3, 3]


@pytest.mark.parametrize(
    ("label", "column"),
    [("-1,1", "time"), ("inf,0", "time"), (",1", "time"), ("1,2", "event"), ("1,", "event")],
)
def test_a_time_or_an_event_that_cannot_be_is_refused_with_its_line_and_column(
    tmp_path: Path, label: str, column: str
) -> None:
    places = manifest(tmp_path, [LABELS[0], label])
    with refuses(DataError, "line 3", f"column '{column}'"):
        IMAGES.load("north", CommonSettings(dataset="images", task=SURVIVAL), places)


@pytest.mark.parametrize(
    ("change", "key"),
    [("event: death\n", "event"), ("task: survival\n", "classes"), ("x", "unit")],
)
def test_a_declaration_of_times_names_the_event(tmp_path: Path, change: str, key: str) -> None:
    path = tmp_path / "images.yaml"
    path.write_text(DECLARED.replace(change, "") + ("unit: months\n" if change == "x" else ""))
    with refuses(DataError, f"'{key}'"):
        read_declared(path, Declaration)


@pytest.mark.parametrize(
    ("y", "names", "fault"),
    [
        ([[1, 0], [2, 1]] * 3, ["death"], ""),
        ([[1, 0], [-2, 1]] * 3, ["death"], "time"),
        ([[1, 0], [2, 3]] * 3, ["death"], "event"),
        ([[1, 0], [2, 1]] * 3, ["death", "alive"], "classes"),
        ([1, 2] * 3, ["death"], "y"),
    ],
)
def test_arrays_have_times_and_events(
    tmp_path: Path, y: list[object], names: list[str], fault: str
) -> None:
    x = np.arange(6 * 256, dtype=np.float32).reshape(6, 1, 16, 16)
    np.savez(tmp_path / "north.npz", x=x, y=np.asarray(y), classes=np.array(names))
    common, places = CommonSettings(dataset="arrays", task=SURVIVAL), Places(tmp_path, tmp_path)
    if fault:
        with refuses(DataError, fault):
            ARRAYS.load("north", common, places)
        return
    assert ARRAYS.load("north", common, places).train.labels.shape[1] == 2
