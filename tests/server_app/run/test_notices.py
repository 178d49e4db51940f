from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.server_app.run.checks import missing_silos
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.meeting.terms import Registry, Terms

LEFT_OUT = "no image of vidir_modern, rosendahl, msk4, vienna_dias is here; left out"


@pytest.fixture
def isic(tmp_path: Path) -> CommonSettings:
    """Return the settings of a machine that holds an image each of two centres."""
    folder = tmp_path / "isic2019"
    (folder / "images").mkdir(parents=True)
    rows = []
    for centre in range(2):
        rows += [f"I{centre},1,{centre}\n"]
        Image.new("RGB", (16, 16)).save(folder / "images" / f"I{centre}.jpg")
    (folder / "train_test_split").write_text("image,target,center\n" + "".join(rows))
    (folder / "HAM10000_metadata").write_text("lesion_id,image_id\nL0,I0\nL1,I1\n")
    return CommonSettings(dataset="isic2019", data_dir=str(tmp_path))


@pytest.fixture
def said(isic: CommonSettings) -> Callable[..., str]:
    """Return a function that tells what is said of sites: name to whether it is simulated."""

    def say(
        common: CommonSettings = isic, registry: Registry | None = None, **simulated: bool
    ) -> str:
        facts = {
            site: SiteFacts(site, site, (3, 16, 16), 2, {"train": [1, 1]}, {}, simulated=simulated)
            for site, simulated in simulated.items()
        }
        nodes = {site: index for index, site in enumerate(facts)}
        participants = Participants(facts, nodes, terms=Terms(registry))
        return "\n".join(missing_silos(participants, common))

    return say


def test_a_simulation_names_the_centres_that_its_files_lack_and_those_without_a_node(
    said: Callable[..., str],
) -> None:
    assert said(bcn=True, vidir_molemax=True).splitlines() == [f"isic2019: {LEFT_OUT}"]
    assert said(bcn=True).splitlines() == [
        f"isic2019: {LEFT_OUT}",
        "1 of 2 silos take part: bcn; no SuperNode for vidir_molemax",
    ]


@pytest.mark.parametrize("other", [True, False])
def test_a_servers_own_images_say_nothing_of_real_hospitals(
    said: Callable[..., str], other: bool
) -> None:
    assert said(rosendahl=False, bcn=other) == ""


def test_of_other_data_sets_real_sites_that_are_missing_are_named(
    said: Callable[..., str],
) -> None:
    heart = CommonSettings(dataset="heart-synthetic")
    missing = "2 of 4 silos take part: cleveland, va; no SuperNode for hungary, switzerland"
    assert said(heart, va=False, cleveland=False) == missing


def test_a_registered_hospital_that_is_away_is_named_though_only_it_knows_its_data(
    said: Callable[..., str],
) -> None:
    registry = Registry("registry.json", {"north": 1, "south": 2, "west": 3})
    missing = "2 of 3 silos take part: north, south; no SuperNode for west"
    assert said(CommonSettings(dataset="table"), registry, north=False, south=False) == missing


def test_of_data_that_only_the_sites_know_nobody_is_missing(
    said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    for name in ("table", "images", "isic2019"):
        for simulated in (True, False):
            assert said(CommonSettings(dataset=name), north=simulated) == ""
