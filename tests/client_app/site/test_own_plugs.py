"""A hospital executes the plugs that it chose to have, and no others, whatever a server names."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context

from fedsilo.client_app.site.identity import site_settings
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.plugins import digest_plugins, load_plugins, locate_plugin
from tests.support.setting_keys import as_keys

_TEXT = "executed = True\n\n\ndef build(input_shape, classes): ...\n"


@pytest.fixture
def own_file(tmp_path: Path) -> Iterator[Path]:
    """Return a hospital's own file of plugs."""
    path = tmp_path / "ward_nets.py"
    path.write_text(_TEXT)
    yield path
    sys.modules.pop("ward_nets", None)


@pytest.fixture
def node(context: Callable[..., Context], own_file: Path) -> Callable[..., Context]:
    """Return a builder of a real site's context: its plugins, and what the run says."""

    def make(named_here: str, **run: Any) -> Context:
        own = {"site": "s1a", "state-dir": "/own", "trust": "server"}
        made = context(own | ({"plugin": named_here} if named_here else {}))
        made.run_config.update(as_keys(run))
        return made

    return make


def _pins(path: Path) -> str:
    load_plugins(str(path), ())
    digest = digest_plugins([locate_plugin("network", "ward_nets:build", ())])["ward_nets"]
    return f"ward_nets={digest}"


def test_a_plug_of_the_same_bytes_is_taken_from_the_hospitals_own_file(
    node: Callable[..., Context], own_file: Path
) -> None:
    run = {"network": "ward_nets:build", "plugin_digests": _pins(own_file)}
    settings = site_settings(node(str(own_file), plugin="/of/the/server.py", **run))
    assert settings.plugin == str(own_file)


def test_a_plug_of_other_bytes_is_refused(node: Callable[..., Context], own_file: Path) -> None:
    pins = _pins(own_file)
    own_file.write_text(_TEXT + "# changed\n")
    with pytest.raises(RefusedError, match="plugin ward_nets is not this hospital's version"):
        site_settings(node(str(own_file), network="ward_nets:build", plugin_digests=pins))


def test_a_run_that_does_not_say_which_bytes_is_refused(
    node: Callable[..., Context], own_file: Path
) -> None:
    with pytest.raises(RefusedError, match="does not name the version of its plugins"):
        site_settings(node(str(own_file), network="ward_nets:build"))


@pytest.mark.parametrize(
    "run",
    [
        {"network": "ward_nets:build"},
        {"method": "ward_nets.sub"},
        {"partition": "ward_nets:build"},
        {"dataset": "ward_nets:build"},
    ],
    ids=str,
)
def test_a_module_that_only_the_server_names_is_not_executed(
    node: Callable[..., Context], own_file: Path, run: dict[str, str]
) -> None:
    sys.modules.pop("ward_nets", None)
    with pytest.raises(
        RefusedError, match=r"'ward_nets.*', but this hospital has not installed it"
    ):
        site_settings(node("", plugin=str(own_file), **run))
    assert "ward_nets" not in sys.modules


@pytest.mark.parametrize("key", ["method", "dataset", "partition"])
def test_timm_is_a_plug_where_it_is_no_network(node: Callable[..., Context], key: str) -> None:
    with pytest.raises(RefusedError, match="needs plugin 'timm', but this hospital has not"):
        site_settings(node("", **{key: "timm:create_model"}))


def test_a_method_by_a_bare_name_of_a_module_is_unknown(node: Callable[..., Context]) -> None:
    with pytest.raises(SettingError, match="unknown method 'antigravity'"):
        site_settings(node("", method="antigravity"))


def test_a_hospital_that_has_plugs_takes_runs_without_any(
    node: Callable[..., Context], own_file: Path
) -> None:
    assert site_settings(node(str(own_file))).network == "auto"
