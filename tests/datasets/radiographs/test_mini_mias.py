import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.mini_mias import MINI_MIAS
from fedsilo.datasets.registry import load_silo, silo_names
from tests.support.errors import refuses

OWN = CommonSettings(dataset="mini-mias", image_size=16)
PLAIN = dataclasses.replace(OWN, intensity_profiles=False)
SITES = ["fatty", "glandular", "dense"]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return 8 images of 4 patients of each tissue; the first of each patient is malignant."""
    folder = tmp_path / "data" / "mini_mias"
    (folder / "images").mkdir(parents=True)
    lines = ["image,patient,tissue,finding,severity"]
    levels = np.linspace(0, 255, 16 * 16).reshape(16, 16)
    for number, (tissue, _) in enumerate(itertools.product("FGD", range(8))):
        picture = np.roll(levels, number % 8, axis=1).astype(np.uint8)
        Image.fromarray(picture).save(folder / "images" / f"mdb{number:03}.png")
        severity = "M" if number % 2 == 0 else "NB"[number % 4 // 2]
        lines.append(f"mdb{number:03}.png,p{number // 2},{tissue},CIRC,{severity}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return Places(tmp_path / "data", tmp_path / "cache")


def relist(places: Places, change: Callable[[str], str]) -> None:
    assert places.data is not None
    path = places.data / "mini_mias" / "labels.csv"
    path.write_text(change(path.read_text()))


def refused(places: Places, site: str = "fatty") -> str:
    with pytest.raises(DataError) as caught:
        load_silo(site, OWN, places)
    return str(caught.value)


def test_the_three_tissues_are_the_sites(places: Places) -> None:
    assert silo_names(OWN) == SITES
    for site in SITES:
        silo = load_silo(site, OWN, places)
        assert silo.classes == ("not-malignant", "malignant")
        assert (silo.shape.input_shape, silo.train.inputs.dtype) == ((1, 16, 16), torch.int16)
        assert silo.label_counts() == {"train": [3, 3], "val": [0, 0], "test": [1, 1]}
    with refuses(DataError, "basel", "3"):
        load_silo("basel", OWN, places)


def test_without_a_profile_levels_are_those_of_the_file(places: Places) -> None:
    index = MINI_MIAS.index("dense", PLAIN, places)
    assert index.names[0] == "mdb016.png"
    found = MINI_MIAS.decode(index, 16, PLAIN).images[0, 0].astype(int) + 32768
    with Image.open(index.folder / index.names[0]) as image:
        levels = np.asarray(image).astype(int)
    assert (found == levels * 257).all()


def test_each_tissue_is_rendered_in_a_way_of_its_own(places: Places) -> None:
    pictures = {}
    for site in SITES:
        index = MINI_MIAS.index(site, OWN, places)
        pictures[site] = MINI_MIAS.decode(index, 16, OWN).images[0, 0]
        again = MINI_MIAS.decode(index, 16, dataclasses.replace(OWN, seed=5)).images[0, 0]
        assert (again == pictures[site]).all(), "the same noise in every run"
    means = [float(picture.mean()) for picture in pictures.values()]
    assert means == sorted(means, reverse=True)
    assert means[0] - means[2] > 10000


def test_a_public_part_of_all_sites_is_rendered_as_at_its_sites(places: Places) -> None:
    shared = dataclasses.replace(OWN, public_share=0.5)
    public = MINI_MIAS.public(shared, places)
    own = [
        image.tobytes()
        for site in SITES
        for image in MINI_MIAS.decode(MINI_MIAS.index(site, OWN, places), 16, OWN).images
    ]
    found = [image.numpy().tobytes() for image in public.inputs]
    assert 0 < len(found) < 24
    assert set(found) <= set(own)


def test_a_missing_image_stops_the_site_or_is_left_out(places: Places) -> None:
    assert places.data is not None
    (places.data / "mini_mias" / "images" / "mdb001.png").unlink()
    assert "mini-mias, fatty: 1 of 8 images cannot be used: mdb001.png is missing" in refused(
        places
    )
    silo = load_silo("fatty", dataclasses.replace(OWN, broken_images="skip"), places)
    assert silo.dropped == 1
    assert sum(sum(counts) for counts in silo.label_counts().values()) == 7
    assert load_silo("dense", OWN, places).dropped == 0, "other sites do not miss it"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mdb001.png,p0", "../mdb001.png,p0", "line 3, column 'image': the value must be a PNG"),
        ("mdb001.png,p0", "mdb000.png,p0", "line 3: image mdb000.png is listed twice"),
        (
            "mdb001.png,p0",
            "mdb001.png,",
            "line 3, column 'patient': the value decides the split, but",
        ),
        ("p0,F,CIRC,M", "p0,X,CIRC,M", "line 2, column 'tissue': the value must be one of F, G, D"),
        (
            "p0,F,CIRC,M",
            "p0,F,CIRC,Q",
            "line 2, column 'severity': the value must be one of N, B, M",
        ),
        ("tissue", "tisue", "line 1: the columns must be image, patient, tissue, severity"),
    ],
)
def test_a_listing_that_cannot_be_is_refused(places: Places, old: str, new: str, said: str) -> None:
    relist(places, lambda text: text.replace(old, new, 1))
    assert said in refused(places)


def test_without_files_the_error_says_what_is_needed(places: Places) -> None:
    with refuses(DataError, "labels.csv"):
        load_silo("fatty", OWN, dataclasses.replace(places, data=None))
    relist(places, str)
    assert places.data is not None
    (places.data / "mini_mias" / "labels.csv").unlink()
    assert "labels.csv cannot be read: No such file" in refused(places)


def test_the_real_images_are_counted_and_split_by_patient(real_data: Path, tmp_path: Path) -> None:
    places = Places(real_data, tmp_path)
    settings = dataclasses.replace(OWN, val_folds=5)
    seen: dict[str, set[str]] = {}
    for site, images, malignant in (("fatty", 106, 19), ("glandular", 104, 17), ("dense", 112, 16)):
        index = MINI_MIAS.index(site, settings, places)
        assert (len(index), int(index.labels.sum())) == (images, malignant)
        seen[site] = set(index.groups)
        assert len(seen[site]) == images // 2
        silo = load_silo(site, settings, places)
        counts = silo.label_counts()
        assert [sum(column) for column in zip(*counts.values(), strict=True)] == [
            images - malignant,
            malignant,
        ]
        assert all(count[1] > 0 for count in counts.values())
        made = MINI_MIAS.decode(index, 16, settings).images
        patient = {p.tobytes(): g for p, g in zip(made, index.groups, strict=True)}
        sides = [{patient[p.numpy().tobytes()] for p in s.inputs} for s in silo.splits().values()]
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(sides, 2))
        assert sum(map(len, sides)) == images // 2
    assert len(set().union(*seen.values())) == 161, "no patient is at two sites"
