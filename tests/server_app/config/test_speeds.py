import json
import math
from pathlib import Path

import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.server_app.config.speeds import seconds_of, site_speeds, written_out
from fedsilo.strategies.meeting.participants import Participants

SITES = ["a", "b", "c"]


def speeds(text: str, seed: int = 7) -> dict[str, float]:
    return site_speeds(CommonSettings(speeds=text, seed=seed), SITES)


def test_speeds_of_a_distribution_depend_on_the_seed_and_the_site_alone() -> None:
    found = speeds("lognormal:0.5")
    assert found == speeds("lognormal:0.5")
    assert found != speeds("lognormal:0.5", seed=8)
    wider = speeds("lognormal:1.0")
    assert wider == pytest.approx({s: math.exp(2 * math.log(v)) for s, v in found.items()})
    alone = site_speeds(CommonSettings(speeds="lognormal:0.5", seed=7), ["b"])
    assert alone == {"b": found["b"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{b: 0.1}", {"a": 1.0, "b": 0.1, "c": 1.0}),
        ("[1, 2, 0.5]", {"a": 1.0, "b": 2.0, "c": 0.5}),
        ("", {"a": 1.0, "b": 1.0, "c": 1.0}),
    ],
)
def test_speeds_are_by_site_or_in_the_order_of_names(text: str, expected: dict[str, float]) -> None:
    assert speeds(text) == expected


def test_a_file_of_speeds_is_written_out(tmp_path: Path) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text("c: 0.25\n")
    assert json.loads(written_out(str(file))) == {"c": 0.25}
    assert speeds(str(file))["c"] == 0.25


@pytest.mark.parametrize("content", [None, "a: [", "\x00"])
def test_an_unreadable_file_of_speeds_is_refused_in_one_line(
    content: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "speeds.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingError, match=r"speeds\.yaml") as caught:
        speeds(str(file))
    assert "\n" not in str(caught.value)


def participants(simulated: bool) -> Participants:
    facts = SiteFacts("a", "D", (1,), 2, {"train": [30, 6]}, {}, simulated=simulated)
    return Participants({"a": facts}, {"a": 1001})


def test_seconds_of_a_round_are_its_steps_over_the_speed() -> None:
    common = CommonSettings(speeds="{a: 0.5}", local_epochs=1, batch_size=16)
    assert seconds_of(common, participants(simulated=True)) == {"a": 6.0}


def test_real_sites_have_no_virtual_clock() -> None:
    assert seconds_of(CommonSettings(), participants(simulated=False)) == {}
    with pytest.raises(SettingError, match="'speeds' is of simulated sites"):
        seconds_of(CommonSettings(speeds="[1]"), participants(simulated=False))
