"""A deployment whose server is not started: Flower's command line is replaced by a list."""

from pathlib import Path
from typing import Any

import pytest

from fedsilo.deployment import flower_commands as flower
from fedsilo.deployment import joining
from fedsilo.deployment.commands import make_secrets, plan_deployment, prepare
from fedsilo.deployment.deployment import Deployment


class FakeSuperLink:
    """Answers ``flwr supernode`` as a SuperLink does, and remembers keys by node."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.answers = True

    def flwr(self, deployment: Deployment, *words: str, say: object = None) -> dict[str, Any]:
        if words[1] == "register":
            node = str(100 + len(self.keys))
            self.keys[node] = Path(words[2]).read_bytes()
            return {"node-id": node}
        if words[1] == "unregister":
            del self.keys[words[2]]
            return {}
        return {"nodes": [{"node-id": node, "status": "online"} for node in self.keys]}


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> FakeSuperLink:
    """Put a SuperLink in the place of Flower's."""
    fake = FakeSuperLink()
    for module in (joining, flower):
        monkeypatch.setattr(module, "flwr", fake.flwr)
    monkeypatch.setattr(joining, "is_healthy", lambda _: fake.answers)
    return fake


@pytest.fixture
def deployment(superlink: FakeSuperLink, tmp_path: Path) -> Deployment:
    """Return a deployment for hospitals of other machines, which it does not have yet."""
    made = plan_deployment(tmp_path / "server", "fedavg-digits", {"host": "fl.example.org:443"})
    prepare(made)
    make_secrets(made)
    return made


@pytest.fixture
def kit(deployment: Deployment) -> Path:
    """Return the kit of north, who joined with south."""
    first, _ = joining.add(deployment.folder, ["north", "south"], print)
    return first.path
