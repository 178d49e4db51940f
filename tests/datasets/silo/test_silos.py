import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import seal
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import (
    SPLITS,
    Split,
    cached_silo,
    fingerprint,
    open_silo,
    save_silo,
)

FACTS = [3, "site", {"data.image-size": 16}]
# These silos' folders, whose keys change only if the silos' arrays or their schema do
FOLDERS = [
    ({"dataset": "heart-synthetic"}, "cleveland", "heart-synthetic-silos", "a62f7e3346d6ea5c"),
    ({"dataset": "digits"}, "s1a", "digits-71cbcd25e452961c-silos", "915963f55b5e753f"),
    (
        {"dataset": "digits", "partition": "unseen", "silos": 4},
        "silo-1",
        "digits-unseen-silos",
        "0387cb25469ee816",
    ),
]


def write_silo(folder: Path, samples: int = 3) -> None:
    split = Split(torch.zeros(samples, 1, 2, 2), torch.zeros(samples, dtype=torch.int64))
    save_silo(folder, dict.fromkeys(SPLITS, split), {"name": "site", "distribution": "site"})


def test_a_silo_is_made_once_for_equal_facts_and_again_for_others(tmp_path: Path) -> None:
    made: list[Path] = []

    def fill(folder: Path) -> None:
        made.append(folder)
        write_silo(folder)

    silos = [cached_silo(tmp_path, "site", facts, 2, fill) for facts in (FACTS, [*FACTS])]
    assert len(made) == 1
    assert [(silo.name, len(silo.train), silo.shape.outputs) for silo in silos] == [
        ("site", 3, 2)
    ] * 2
    cached_silo(tmp_path, "site", [*FACTS, "other"], 2, fill)
    assert len(made) == 2
    key = hashlib.sha256(json.dumps(FACTS).encode()).hexdigest()[:16]
    assert (tmp_path / f"site-{key}" / "silo.json").is_file()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_arrays_are_read_and_large_ones_mapped(tmp_path: Path) -> None:
    write_silo(tmp_path, samples=5000)  # 80,128 bytes of inputs and 40,128 of labels
    silo = open_silo(tmp_path, classes=2)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert {p.name for p in tmp_path.glob("*.npy") if str(p) in mapped} == {
        f"{name}-inputs.npy" for name in SPLITS
    }
    assert all(len(split) == 5000 for split in silo.splits().values())


def test_a_silo_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        write_silo(folder)
        raise DataError("too few rows")

    with pytest.raises(DataError, match="too few rows"):
        cached_silo(tmp_path / "silos", "site", FACTS, 2, fill)
    assert list((tmp_path / "silos").iterdir()) == []


@pytest.mark.parametrize(("values", "site", "folder", "key"), FOLDERS)
def test_folder_of_equal_facts_keeps_its_key(
    tmp_path: Path, values: dict[str, Any], site: str, folder: str, key: str
) -> None:
    old = tmp_path / folder / f"{site}-{key}"
    old.mkdir(parents=True)
    write_silo(old, samples=5)
    seal(old, old.name)
    silo = load_silo(site, CommonSettings(**values), Places(None, tmp_path))
    assert len(silo.train) == 5
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_pneumoniamnists_folder_of_an_earlier_version_is_used(tmp_path: Path) -> None:
    file = tmp_path / "data" / "pneumoniamnist" / "pneumoniamnist.npz"
    file.parent.mkdir(parents=True)
    np.savez(file, nothing=np.zeros(1))
    read = {
        "data.image-size": 0,
        "data.intensity-profiles": False,
        "split.fold-seed": 0,
        "split.sample-share": 0.5,
        "split.use-test": True,
    }
    stamp = file.stat()
    facts = [1, "vendor-b", str(file.resolve()), stamp.st_size, stamp.st_mtime_ns, read]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    old = tmp_path / "cache" / "pneumoniamnist-silos" / f"vendor-b-{key}"
    old.mkdir(parents=True)
    write_silo(old, samples=5)
    seal(old, old.name)
    settings = CommonSettings(dataset="pneumoniamnist")
    settings = dataclasses.replace(settings, sample_share=0.5, intensity_profiles=False)
    silo = load_silo("vendor-b", settings, Places(tmp_path / "data", tmp_path / "cache"))
    assert len(silo.train) == 5


def _write_drawn(folder: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    splits = {
        part: Split(torch.randn(n, 4, generator=draw), torch.arange(n) % 2)
        for part, n in zip(SPLITS, (6, 0, 2), strict=True)
    }
    save_silo(folder, splits, {"name": "site", "distribution": "site", "classes": ["well", "ill"]})


@budget(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_altered_data_never_come_under_the_old_fingerprint(
    tmp_path: Path, data: st.DataObject
) -> None:
    before = cached_silo(tmp_path, "site", FACTS, 2, _write_drawn)
    assert before.folder is not None
    files = sorted(path.name for path in before.folder.iterdir())
    path = before.folder / data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["bit", "byte", "cut", "exchange"])):
        case "bit":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
        case "byte":
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case _:
            other = before.folder / data.draw(st.sampled_from(files))
            content, theirs = bytearray(other.read_bytes()), content
            other.write_bytes(theirs)
    path.write_bytes(content)
    after = cached_silo(tmp_path, "site", FACTS, 2, _write_drawn)
    assert (after.name, after.classes, after.shape) == ("site", ("well", "ill"), before.shape)
    assert after.fingerprints == before.fingerprints
    assert {name: fingerprint(split) for name, split in after.splits().items()} == (
        before.fingerprints
    )
    assert [split.inputs.shape for split in after.splits().values()] == [(6, 4), (0, 4), (2, 4)]
