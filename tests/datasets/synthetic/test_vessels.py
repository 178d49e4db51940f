"""The synthetic vessels: bright where their masks are, and the same in every cache."""

from pathlib import Path

import pytest
import torch

from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.synthetic.vessels import VESSELS_SYNTHETIC

FEW = CommonSettings(dataset="vessels-synthetic", sample_share=0.1, image_size=32)


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Silo]:
    places = Places(None, tmp_path_factory.mktemp("cache"))
    names = VESSELS_SYNTHETIC.silo_names(FEW, places)
    return {name: VESSELS_SYNTHETIC.load(name, FEW, places) for name in names}


def test_vessels_are_brighter_than_the_rest_at_every_site(silos: dict[str, Silo]) -> None:
    assert list(silos) == ["north", "east", "south", "west"]
    for silo in silos.values():
        image, mask = silo.train.inputs.squeeze(1).float(), silo.train.labels.bool()
        assert image[mask].mean() > image[~mask].mean() + 20
        assert 0.05 < mask.double().mean() < 0.5
        assert silo.classes == ("background", "vessel")


def test_sites_differ_in_thickness_and_a_new_cache_holds_the_same(
    silos: dict[str, Silo], tmp_path: Path
) -> None:
    share = {name: silo.train.labels.double().mean() for name, silo in silos.items()}
    assert share["south"] < share["west"]
    again = VESSELS_SYNTHETIC.load("south", FEW, Places(None, tmp_path))
    assert torch.equal(again.train.inputs, silos["south"].train.inputs)
