"""What a run decides once it knows its sites: how their weights become one."""

import importlib
from importlib.metadata import version
from pathlib import Path

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SiteFacts
from fedsilo.core.versions import FEDSILO, processor
from fedsilo.engines.inline_engine import InlineGrid, flower_identity
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory, config_document
from fedsilo.server_app.run.changed_software import changed_software
from fedsilo.server_app.run.runner import chosen_aggregation, run
from fedsilo.strategies.meeting.participants import Participants
from tests.support.tiny import TINY, VIT

APP = importlib.import_module("fedsilo.client_app.app")
AUTO: dict[str, Value] = {**TINY, "server.aggregation": "auto"}
SECAGG: dict[str, Value] = {"secure.aggregation": "secagg", "secure.clip-norm": 1.0}
OWN_PROMPTS: dict[str, Value] = {**VIT, "fedevprompt.shared-prompts": "none"}


@pytest.mark.parametrize(
    ("method", "changes", "simulated", "chosen"),
    [
        ("fedavg", {}, False, "norm-clip"),
        ("fedavg", {}, True, "mean"),
        ("fedavg", {"server.aggregation": "mean"}, False, "mean"),
        ("fedavg", {"server.aggregation": "median"}, True, "median"),
        ("fedavg", SECAGG, False, "mean"),
        ("local", {}, False, "mean"),
        ("fedevprompt", {**VIT, "fedevprompt.shared-prompts": "all"}, False, "norm-clip"),
        ("fedevprompt", OWN_PROMPTS, False, "mean"),
    ],
)
def test_updates_are_clipped_at_real_sites_alone_where_they_are_averaged_in_the_open(
    method: str, changes: dict[str, Value], simulated: bool, chosen: str
) -> None:
    settings = resolve({**AUTO, "method": method, **changes})
    facts = SiteFacts("a", "a", (1, 16, 16), 10, {"train": [4] * 10}, {}, simulated=simulated)
    assert chosen_aggregation(settings, Participants({"a": facts}, {"a": 1})) == chosen


def test_a_run_of_real_sites_says_that_it_clips_and_goes_on_from_its_own_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes: list[dict[str, Value]] = [
        {"site": site, "state-dir": str(tmp_path / site), "trust": "server", "minimum-batch": 1}
        for site in ("s1a", "s2a", "s3a")
    ]
    values = {**AUTO, "method": "fedavg", "rounds": 1, "run.out": str(tmp_path), "run.name": "run"}
    for more in ({}, {"run.resume": True}):
        settings = resolve({**values, **more})
        with flower_identity():
            found = run(InlineGrid(APP.app, settings.as_mapping(), nodes), settings)
        assert found.read_json("summary.json")["aggregation"] == "norm-clip"
        said = capsys.readouterr().out
        assert "aggregation: norm-clip, because the sites are real and the run sets none" in said
        # A hospital that installed a release meanwhile is named, and goes on
        assert ("fedsilo 0.0.9 is now" in said) == bool(more)
        (found.path / "summary.json").unlink()
        silos = found.read_json("silos.json")
        silos["s2a"]["software"]["fedsilo"] = "0.0.9"
        found.write_json("silos.json", silos)


def test_a_run_resumed_with_another_version_or_on_another_processor_names_it(
    tmp_path: Path,
) -> None:
    settings = resolve({**AUTO, "method": "fedavg"})
    document = config_document(settings, {})
    (tmp_path / "config.toml").write_text(document)
    assert changed_software(RunDirectory(tmp_path)) == ""
    assert document.count(f'"{processor()}"') == 1
    other = document.replace(processor(), "Old Chip (SSE)").replace(version("torch"), "1.0")
    other = other.replace(f'fedsilo-version = "{FEDSILO}"', 'fedsilo-version = "0.0.9"')
    (tmp_path / "config.toml").write_text(other)
    line = changed_software(RunDirectory(tmp_path))
    assert f"the processor Old Chip (SSE) is now {processor()}" in line
    assert f"torch 1.0 is now {version('torch')}"[:40] in line
    assert f"fedsilo 0.0.9 is now {FEDSILO}" in line
