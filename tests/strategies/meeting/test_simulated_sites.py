"""Simulated sites that share SuperNodes: who answers, and what a hospital does with a message."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.client_app.site.node import context_of_simulated_site
from fedsilo.core.messages import CONFIG, HELLO, SIMULATED_SITE
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SiteFacts
from fedsilo.core.versions import own_versions
from fedsilo.engines.inline_engine import InlineGrid, inline_grid, run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.runner import run
from fedsilo.strategies.meeting.simulated_sites import SimulatedSites, with_all_sites

NINE: dict[str, Value] = {
    "method": "fedavg",
    "split.silos": 9,
    "split.silo-train-size": 20,
    "split.silo-test-size": 10,
    "rounds": 2,
    "train.local-steps": 1,
    "train.batch-size": 8,
    "network.width": 4,
    "train.mc-passes": 0,
    "network.dropout": 0.0,
    "machine.device": "cpu",
    "seed": 7,
    "run.name": "run",
}


def numbers(directory: RunDirectory) -> list[bytes]:
    names = ("metrics.csv", "model.safetensors", "silos.json")
    return [(directory.path / name).read_bytes() for name in names]


@pytest.fixture(scope="module")
def by_nine(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    out = str(tmp_path_factory.mktemp("nine"))
    return numbers(run_inline(resolve(NINE | {"out": out}), 9))


@pytest.mark.parametrize("supernodes", [1, 2, 4, 9, 20])
def test_any_number_of_supernodes_trains_all_nine_sites_with_the_same_bits(
    supernodes: int, by_nine: list[bytes], tmp_path: Path
) -> None:
    settings = resolve(NINE | {"out": str(tmp_path)})
    with inline_grid(settings, supernodes) as grid:
        directory = run(SimulatedSites(grid, 9), settings)
    assert len(directory.read_json("summary.json")["sites"]) == 9
    assert numbers(directory) == by_nine


def test_only_the_grid_of_flowers_simulation_gets_a_node_for_each_silo() -> None:
    settings = resolve(NINE)
    with inline_grid(settings, 2) as grid:
        assert with_all_sites(grid, settings.common) is grid, "a deployment's node is one hospital"

        class InMemoryGrid(InlineGrid):  # as Flower's is called
            pass

        simulation = InMemoryGrid(app, settings.as_mapping(), [{}, {}])
        assert len(list(with_all_sites(simulation, settings.common).get_node_ids())) == 9
        nobody = InMemoryGrid(app, settings.as_mapping(), [])
        assert list(with_all_sites(nobody, settings.common).get_node_ids()) == []


def hello(partition: int) -> Message:
    named = ConfigRecord({"partition-id": partition, "num-partitions": 9})
    asks = ConfigRecord({"hello": True, **own_versions()})
    return Message(RecordDict({CONFIG: asks, SIMULATED_SITE: named}), 1001, HELLO)


def context(node_config: dict[str, Any]) -> Context:
    return Context(1, 1001, node_config, RecordDict(), dict(resolve(NINE).as_mapping()))


def said(reply: Message) -> str:
    assert not reply.has_error(), reply.error
    return SiteFacts.from_config(reply.content.config_records[CONFIG]).site


def test_a_supernode_answers_as_the_site_that_each_message_names_and_keeps_its_own_context() -> (
    None
):
    with inline_grid(resolve(NINE), 1):
        shared = context({"partition-id": 0, "num-partitions": 1})
        before = dict(shared.node_config)
        assert [said(app(hello(number), shared)) for number in (8, 0, 8)] == ["s3c", "s1a", "s3c"]
        assert shared.node_config == before
        assert not shared.state


def test_two_messages_at_one_supernode_have_contexts_of_their_own() -> None:
    with inline_grid(resolve(NINE), 1):
        shared = context({"partition-id": 0, "num-partitions": 1})
        first, second = (context_of_simulated_site(hello(number), shared) for number in (3, 4))
    assert first.node_config["partition-id"] == 3, "the second message has not changed it"
    assert second.node_config["partition-id"] == 4
    first.state["mine"] = ConfigRecord({"round": 1})
    assert "mine" not in second.state
    assert "mine" not in shared.state


@pytest.mark.parametrize("own", ["site", "state-dir", "site-file", "trust"])
def test_a_hospital_stays_who_its_node_config_says(own: str, tmp_path: Path) -> None:
    with inline_grid(resolve(NINE), 1):
        hospital = context({"partition-id": 2, own: str(tmp_path)})
        asked = hello(5)
        assert context_of_simulated_site(asked, hospital) is hospital
        assert SIMULATED_SITE in asked.content, "what it makes of other records is its own affair"


def test_a_hospital_answers_in_its_own_name_though_a_message_names_another() -> None:
    with inline_grid(resolve(NINE), 1):
        reply = app(hello(5), context({"site": "s1a", "trust": "server"}))
        assert said(reply) == "s1a"
