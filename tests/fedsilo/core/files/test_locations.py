from pathlib import Path

import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, find_places, weight_paths
from fedsilo.datasets.downloads.public_files import public_data

MNIST = public_data()["mnist"]
TEST_LABELS = "t10k-labels-idx1-ubyte.gz"


def test_settings_name_the_folders_before_the_environment_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDSILO_DATA", "/of/all")
    monkeypatch.setenv("FEDSILO_CACHE", "/of/all/cache")
    assert find_places("", "") == Places(Path("/of/all"), Path("/of/all/cache"))
    assert find_places("/own", "~/c") == Places(Path("/own"), Path.home() / "c")


def test_without_any_name_there_is_a_cache_at_home_and_no_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    monkeypatch.delenv("FEDSILO_CACHE", raising=False)
    assert find_places("", "") == Places(None, Path.home() / ".cache" / "fedsilo")


def test_weights_lie_in_the_cache_or_the_data_directory_unless_their_path_is_whole() -> None:
    places = Places(Path("/data"), Path("/cache"))
    in_cache, in_data = Path("/cache/backbones/vit.pt"), Path("/data/vit.pt")
    assert weight_paths("vit.pt", places) == [in_cache, in_data]
    assert weight_paths("vit.pt", Places(None, Path("/cache"))) == [in_cache]
    assert weight_paths("/run/model.safetensors", places) == [Path("/run/model.safetensors")]


def test_a_missing_file_is_named_with_its_folder_and_its_public_source(
    small_places: Places,
) -> None:
    assert small_places.data is not None
    folder = small_places.data / "mnist"
    assert MNIST.find(small_places) == folder
    (folder / TEST_LABELS).unlink()
    with pytest.raises(DataError) as caught:
        MNIST.find(small_places)
    message = str(caught.value)
    assert f"{TEST_LABELS} is missing in {folder}" in message
    assert MNIST.url in message
    assert "fedsilo fetch mnist" in message
