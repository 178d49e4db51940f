"""No run names a path at a hospital: where it writes, what it opens, what its errors tell."""

import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from PIL import Image

from fedsilo.client_app.site.identity import site_name, site_settings
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import HELLO, TRAIN
from tests.support.errors import refuses
from tests.support.hospital import Hospital, files_below

Make = Callable[..., Hospital]


def test_nothing_is_written_where_a_run_says(
    hospital: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_CACHE")
    theirs = tmp_path / "theirs"
    site = hospital(cache_dir=str(theirs), data_dir=str(tmp_path))
    assert site.send(HELLO) is not None
    assert not files_below(theirs)
    assert files_below(site.home / ".own" / "cache")


def test_what_a_hospital_keeps_is_its_owners_alone_under_any_umask(
    hospital: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_CACHE")
    rules = tmp_path / "site.yaml"
    rules.write_text(
        "{methods: ['*'], datasets: ['*'], records: ['*'], max-epsilon: 9.0, trust: server}"
    )
    private = {"sample_clip_norm": 1.0, "noise_multiplier": 6.0, "standardise": "declared"}
    site = hospital(node={"site-file": str(rules)}, method="local", **private)
    before = os.umask(0)
    try:
        assert site.send(HELLO) is not None
        assert site.send(TRAIN) is not None
        assert site.send(TRAIN, run_name="../up") is None  # in the audit log too
        assert os.umask(0) == 0, "a message leaves the process's own as it was"
    finally:
        os.umask(before)
    below = [site.home, *site.home.rglob("*")]
    kept = {path.name for path in below}
    assert {"seed", "runs.json", "privacy-ledger.json", "audit.jsonl", "told-counts.json"} <= kept
    assert {path.suffix for path in below} >= {".npy", ".safetensors"}
    modes = {path: oct(stat.S_IMODE(path.stat().st_mode)) for path in below}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {"0o700"}
    assert {mode for path, mode in modes.items() if path.is_file()} == {"0o600"}


@pytest.mark.parametrize("layout", ["another site", "other classes", "no image", "arrays"])
def test_an_error_names_no_file_that_was_found(hospital: Make, tmp_path: Path, layout: str) -> None:
    """A server may name data sets that read whatever folders and files there are."""
    data, dataset = tmp_path / "data", "arrays" if layout == "arrays" else "folder"
    site = hospital(node={"data-dir": str(data)}, unchecked={"dataset": dataset, "network": "conv"})
    for patient, scans in {"smith": ("ct", "mr"), "doe": ("ct", "mr")}.items():
        for scan in (*scans, *(("pet",) if (patient, layout) == ("doe", "other classes") else ())):
            save_image(data / patient / scan / "1.png")
    if layout == "no image":
        (data / "doe" / "mr" / "1.png").unlink()
    (data / "smith.npz").write_bytes(b"")
    assert site.send(HELLO) is None
    assert "the site's own log says why" in site.refusals[0]
    assert not [name for name in ("smith", "doe", "pet", "mr") if name in site.refusals[0]]


def test_folders_of_patients_are_no_classes_without_consent(hospital: Make, tmp_path: Path) -> None:
    """Prepared for another data set, a hospital's folders may be called after patients."""
    for patient in ("smith", "doe"):
        for number in range(12):
            save_image(tmp_path / "data" / "cleveland" / patient / f"{number}.png")
    run = {"dataset": "folder", "network.name": "conv", "data.image-size": 32}
    site = hospital(node={"data-dir": str(tmp_path / "data")}, unchecked=run)
    assert site.send(HELLO) is None
    assert "set 'allow-folder-names=true' in the node config" in site.refusals[0]
    assert "smith" not in site.refusals[0]
    site.node["allow-folder-names"] = True
    assert site.send(HELLO) is not None


def test_a_site_without_a_name_tells_no_file_either(hospital: Make, tmp_path: Path) -> None:
    (tmp_path / "smith.npz").write_bytes(b"")
    site = hospital(node={"data-dir": str(tmp_path)}, unchecked={"dataset": "arrays"})
    own, run = site.context().node_config, site.context().run_config
    nameless = Context(1, 1001, {k: own[k] for k in own if k != "site"}, RecordDict(), run)
    with refuses(SiteError, "site"):
        site_name(nameless, site_settings(nameless))


def save_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    level = zlib.crc32(path.name.encode()) % 256  # files of other names differ
    Image.new("L", (20, 24), level).save(path)


@pytest.mark.parametrize("folder", ["gone", "there"])
def test_an_error_is_no_oracle_of_paths(hospital: Make, tmp_path: Path, folder: str) -> None:
    (tmp_path / "there" / "heart_disease").mkdir(parents=True)
    site = hospital(dataset="heart", data_dir=str(tmp_path / folder))
    assert site.send(HELLO) is None
    assert str(tmp_path) not in site.refusals[0]
    named = hospital(node={"data-dir": str(tmp_path / folder)}, dataset="heart")
    named.refusals.clear()
    assert named.send(HELLO) is None
    assert "(data-dir)/heart_disease" in named.refusals[0]
    assert str(tmp_path) not in named.refusals[0]


def test_both_answers_to_a_path_are_the_same(hospital: Make, tmp_path: Path) -> None:
    told = []
    for folder in ("gone", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        site = hospital(dataset="table", data_dir=str(tmp_path / folder))
        site.refusals.clear()
        assert site.send(HELLO) is None
        told += site.refusals
    assert told[0] == told[1]


def test_no_digest_of_a_file_that_a_run_points_at(hospital: Make, tmp_path: Path) -> None:
    (tmp_path / "backbones").mkdir()
    (tmp_path / "backbones" / "vit.safetensors").write_bytes(b"a patient's file")
    site = hospital(
        dataset="digits",
        site="s1a",
        network="vit",
        standardise="pooled",
        cache_dir=str(tmp_path),
        backbone_weights="vit.safetensors",
    )
    assert site.send(HELLO) is None
    assert "there is no" in site.refusals[0]


def test_no_cell_of_a_file_is_quoted(hospital: Make, tmp_path: Path) -> None:
    secret = tmp_path / "patients.csv"
    secret.write_text("site,neighbour\nMrs Miller,HIV positive\n")
    site = hospital(
        "s1a",
        {"allow-folds": True},
        {"split.silo-set": str(secret)},
        dataset="digits",
        standardise="pooled",
        network="conv",
        partition="unseen",
        method="fedefm",
    )
    assert site.send(HELLO) is None
    assert site.send(TRAIN) is None
    for refusal in site.refusals:
        assert "Miller" not in refusal
        assert "HIV" not in refusal
        assert "'split.silo-set' is a file" in refusal
