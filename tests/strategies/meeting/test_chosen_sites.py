"""Which sites take part in a run that names them: two studies on one server are kept apart."""

import dataclasses

import pytest

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.engines.inline_engine import InlineGrid
from fedsilo.server_app.config.settings import differences, resolve
from fedsilo.server_app.run.checks import missing_silos
from fedsilo.strategies.meeting import waiting
from fedsilo.strategies.meeting.participants import meet_latecomers, meet_sites, needed_sites
from fedsilo.strategies.meeting.terms import Registry, Terms, split_sites
from tests.strategies.meeting.test_latecomers import ChangingGrid
from tests.strategies.meeting.test_participants import hello_app
from tests.support.errors import refuses

STUDIES = {"hearts": ("east", "north"), "scans": ("south", "west")}
NODES = {"east": 1001, "north": 1002, "south": 1003, "west": 1004}
REGISTERED = Terms(Registry("/srv/registry.json", NODES))
UNREGISTERED = Terms()


def _settings(*sites: str, min_sites: int = 0) -> CommonSettings:
    return CommonSettings(dataset="table", sites=", ".join(sites), min_sites=min_sites)


def _grid() -> ChangingGrid:
    return ChangingGrid(*({"site": site} for site in NODES))


@pytest.mark.parametrize("study", STUDIES)
def test_a_run_asks_and_counts_only_the_hospitals_that_it_names(study: str) -> None:
    grid, sites = _grid(), STUDIES[study]
    settings = _settings(*sites)
    met = meet_sites(grid, settings, terms=REGISTERED)
    assert tuple(met.sites()) == sites
    assert sorted(grid.asked) == [NODES[site] for site in sites]
    assert needed_sites(met, settings) == 2
    assert met.refused == ()
    # Nor are they called missing, or asked later
    assert list(missing_silos(met, settings)) == []
    assert meet_latecomers(grid, met) == (met, [])
    assert len(grid.asked) == 2


def test_without_a_registry_an_outsider_tells_who_it_is_and_is_left_out() -> None:
    grid, settings = _grid(), _settings("north", "west")
    met = meet_sites(grid, settings)
    assert met.sites() == ["north", "west"]
    assert needed_sites(met, settings) == 2
    assert met.refused == ()
    assert meet_latecomers(grid, met) == (met, [])


@pytest.mark.parametrize("terms", [REGISTERED, UNREGISTERED])
def test_a_latecomer_joins_only_the_run_that_names_it(terms: Terms) -> None:
    grid = _grid()
    everyone, grid.connected = grid.connected, [1001, 1003]
    settings = _settings("east", "west", min_sites=1)
    met = meet_sites(grid, settings, terms=terms)
    assert met.sites() == ["east"]
    grid.connected = everyone
    joined, refused = meet_latecomers(grid, met)
    assert joined.sites() == ["east", "west"]
    assert refused == []


def test_a_name_that_nobody_has_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "_JOIN_SECONDS", 0.0)
    grid, misspelt = _grid(), _settings("nort", "west")
    with refuses(SettingError, "nort", "/srv/registry.json"):
        meet_sites(grid, misspelt, terms=REGISTERED)
    assert grid.asked == [], "nobody was asked"
    with refuses(SiteError, "nort"):
        meet_sites(grid, misspelt)
    # A hospital of the study that is away is not replaced by one outside
    grid.connected = [NODES[site] for site in ("east", "north", "west")]
    with refuses(SiteError, "south", "west", "run.min-sites"):
        meet_sites(grid, _settings("south", "west"), terms=REGISTERED)


@pytest.mark.parametrize("text", ["a,,b", "a,b,", "a,a", "all", "a/b", ",", "../a"])
def test_an_impossible_list_of_sites_is_refused_before_anybody_is_asked(text: str) -> None:
    with pytest.raises(SettingError, match=r"server\.sites"):
        resolve({"method": "fedavg", "dataset": "table", "server.sites": text})


def test_the_list_is_read_with_or_without_blanks_and_may_be_empty() -> None:
    assert split_sites(" a , b,c") == ("a", "b", "c")
    assert split_sites("") == split_sites("  ") == ()


def test_a_run_cannot_name_more_sites_than_there_are_or_need_more_than_it_names() -> None:
    digits = {"method": "fedavg", "split.silos": 2}
    with refuses(SettingError, 3, 2):
        resolve({**digits, "server.sites": "a,b,c"})
    with refuses(SettingError, 2, "run.min-sites"):
        resolve({**digits, "server.sites": "s1a", "run.min-sites": 2})


def test_a_resume_must_name_the_same_sites_and_older_runs_name_none() -> None:
    before = resolve({"method": "fedavg", "server.sites": "s1a,s2a"})
    now = resolve({"method": "fedavg"})
    assert "server.sites" not in now.decisive()
    assert "server.sites" in differences(before.decisive(), now.decisive())


def test_a_simulation_takes_the_sites_that_it_names() -> None:
    configs = [{"site": site, "simulated": True} for site in NODES]
    grid = InlineGrid(hello_app, {}, configs)
    settings = dataclasses.replace(_settings("north"), silos=4)
    assert meet_sites(grid, settings, silos=4).sites() == ["north"]
