import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from fedsilo.core.files.sealed_folders import SEAL
from fedsilo.datasets.silo.retention import prune_cache
from fedsilo.datasets.silo.silos import SPLITS, Silo, Split, cached_silo, fingerprint, save_silo

SAMPLES = 1000  # of 4 bytes and a label of 8: three splits of 12 kB each, and headers


def write(folder: Path) -> None:
    split = Split(torch.arange(SAMPLES).float().reshape(-1, 1), torch.zeros(SAMPLES).long())
    save_silo(folder, dict.fromkeys(SPLITS, split), {"name": "site", "distribution": "site"})


def opened(cache: Path, site: str) -> Silo:
    return cached_silo(cache / "some-silos", site, [site], 2, write)


def folder_of(silo: Silo) -> Path:
    assert silo.folder is not None
    return silo.folder


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Return the folders of three silos, each used a day later than the one before it."""
    made = [folder_of(opened(tmp_path, site)) for site in ("one", "two", "three")]
    for place, folder in enumerate(made):
        os.utime(folder, (0, 1e9 + place * 86400))
    return made


def test_nothing_goes_within_the_bound(tmp_path: Path, folders: list[Path]) -> None:
    total = sum(map(size, folders))
    assert prune_cache(tmp_path, total) == []
    assert 3 * 36_000 < total < 3 * 40_000
    assert all(folder.is_dir() for folder in folders)


def test_the_longest_unopened_go_first_and_no_more_than_needed(
    tmp_path: Path, folders: list[Path]
) -> None:
    opened(tmp_path, "one")  # now the last used
    assert prune_cache(tmp_path, sum(map(size, folders)) - 1) == [folders[1]]
    assert sorted(path.name for path in folders[0].parent.iterdir()) == sorted(
        [folders[0].name, folders[2].name]
    )


def test_what_is_left_fills_the_bound_and_no_more(tmp_path: Path, folders: list[Path]) -> None:
    assert prune_cache(tmp_path, size(folders[2])) == folders[:2]
    assert folders[2].is_dir()


def test_a_silo_that_is_open_is_readable_after_it_was_removed(tmp_path: Path) -> None:
    silo = opened(tmp_path, "one")
    prune_cache(tmp_path, 0)
    assert not folder_of(silo).exists()
    assert fingerprint(silo.train) == silo.fingerprints["train"]
    assert len(opened(tmp_path, "one").train) == SAMPLES, "made again"


def test_what_is_no_derived_data_is_never_touched(tmp_path: Path, folders: list[Path]) -> None:
    kept = [
        tmp_path / "backbones" / "vit.safetensors",
        tmp_path / "cohort-0123456789abcdef" / "patients.csv",  # a name like a key, and no seal
        tmp_path / "runs" / SEAL,  # a seal, and no key
        tmp_path / ".ssh" / "id",
        tmp_path / ".notes-0123456789abcdef" / "x",
        tmp_path / "a" / "b" / f"deep-{'0' * 16}" / SEAL,
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10**6))
        for folder in (path, path.parent):
            os.utime(folder, (0, 0))
    elsewhere = tmp_path / "elsewhere"
    folders[2].rename(elsewhere)
    folders[2].symlink_to(elsewhere)
    assert prune_cache(tmp_path, 0) == folders[:2]
    assert all(path.is_file() for path in kept)
    assert (elsewhere / SEAL).is_file()


def test_what_a_killed_process_had_begun_goes_after_a_day(tmp_path: Path) -> None:
    made = folder_of(opened(tmp_path, "one"))
    old, new = (made.parent / f".{made.name}.{end}" for end in ("abcd_123", "0a1b2c3d"))
    for begun, age in ((old, 2 * 86400), (new, 3600)):
        (begun / "folder").mkdir(parents=True)
        (begun / "folder" / "train-inputs.npy").write_bytes(b"half")
        for path in (begun / "folder" / "train-inputs.npy", begun / "folder", begun):
            os.utime(path, (0, time.time() - age))
    prune_cache(tmp_path, 10**9)
    assert not old.exists()
    assert new.is_dir()


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert prune_cache(tmp_path / "nowhere", 0) == []


def _open_often(cache: Path, until: float) -> None:
    torch.set_num_threads(1)
    while time.monotonic() < until:
        silo = opened(cache, "one")
        assert fingerprint(silo.train) == silo.fingerprints["train"]


def test_readers_and_removers_at_once_get_whole_silos(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    until = time.monotonic() + 1.5
    readers = [context.Process(target=_open_often, args=(tmp_path, until)) for _ in range(2)]
    for reader in readers:
        reader.start()
    removed = 0
    while time.monotonic() < until:
        removed += len(prune_cache(tmp_path, 0))
        time.sleep(0.02)  # a reader that never gets to open what it has made gives up, rightly
    for reader in readers:
        reader.join(30)
    assert [reader.exitcode for reader in readers] == [0, 0]
    assert removed > 2
