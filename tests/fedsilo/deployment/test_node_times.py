"""What the server's database says of a hospital's connections, in Flower's own tables."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flwr.supercore.state.schema.linkstate_models import LinkStateBase, Node
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from fedsilo.cli.main import main
from fedsilo.deployment import flower_commands, member_status
from fedsilo.deployment.commands import prepare
from fedsilo.deployment.deployment import SERVER, Deployment, plan
from fedsilo.deployment.doctor.site import CHECKS
from fedsilo.deployment.member_status import status
from fedsilo.deployment.node_times import FAULTS, fault_of, interval_for, read_node_times

CAME, LEFT = "2026-03-03T09:41:07+00:00", "2026-03-03T09:45:00+00:00"
# A node's number is of 64 bits without a sign, which SQLite stores with one
LARGE = 2**64 - 5


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """Return a deployment with five hospitals elsewhere, whose server has met four of them."""
    made = plan(tmp_path / "server", [], [8000, 9092], {}, "fl.example.org:9092")
    prepare(made)
    nodes = {"north": str(LARGE), "south": "2", "east": "3", "west": "4", "new": "5"}
    made = replace(made, nodes=nodes)
    made.write()
    database = made.home(SERVER) / "superlink.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{database}")
    LinkStateBase.metadata.create_all(engine)
    with Session(engine) as session:
        for row in (
            {"node_id": -5, "last_activated_at": CAME, "heartbeat_interval": 30.0},
            {"node_id": 2, "last_activated_at": CAME, "last_deactivated_at": LEFT},
            {
                "node_id": 3,
                "last_activated_at": CAME,
                "last_deactivated_at": CAME,
                "heartbeat_interval": interval_for("data folder"),
            },
            # Connected again since, and then the server ended
            {"node_id": 4, "last_activated_at": LEFT, "last_deactivated_at": CAME},
            {"node_id": 5},
        ):
            session.add(Node(**row))
        session.commit()
    engine.dispose()
    return made


def test_status_says_since_when_and_why_a_hospital_is_missing(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flower_commands, "is_healthy", lambda deployment: True)
    monkeypatch.setattr(member_status, "list_online_sites", lambda deployment: ["north"])
    seen = {member.member: member.last_seen for member in status(deployment.folder)}
    assert seen == {
        SERVER: "",
        "north": "online since 2026-03-03 09:41:07 UTC",
        "south": "offline since 2026-03-03 09:45:00 UTC",
        "east": "cannot start: data folder (2026-03-03 09:41:07 UTC)",
        "west": "offline",
        "new": "never connected",
    }
    assert main(["deploy", "status", "--json", "--deployment", str(deployment.folder)]) == 0
    assert '"fault": "data folder"' in capsys.readouterr().out


def test_times_are_read_by_node_and_a_database_in_another_form_has_none(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = read_node_times(deployment)
    assert times[str(LARGE)].connected == datetime(2026, 3, 3, 9, 41, 7, tzinfo=UTC)
    assert times[str(LARGE)].left is None
    with closing(sqlite3.connect(deployment.home(SERVER) / "superlink.db")) as database:
        database.execute("ALTER TABLE node RENAME TO nodes")
    assert read_node_times(deployment) == {}
    (deployment.home(SERVER) / "superlink.db").unlink()
    assert read_node_times(deployment) == {}
    monkeypatch.setattr(flower_commands, "is_healthy", lambda deployment: False)
    assert {member.last_seen for member in status(deployment.folder)} == {"", "offline"}


def test_a_failed_check_is_one_number_and_a_running_node_stands_for_none() -> None:
    assert [fault_of(interval_for(check)) for check in FAULTS] == list(FAULTS)
    assert fault_of(interval_for("a check of a newer version")) == "start"
    assert [fault_of(number) for number in (None, 0.0, 30.0, 999.0, 1000.5, 1800.0)] == [""] * 6
    # What can be told is every check that a start makes before it reaches the server or after
    untold = {"authority", "key", "server", "clock", "admission", "data", "requests"}
    assert {check.name for check in CHECKS} - untold == set(FAULTS) - {"start"}
