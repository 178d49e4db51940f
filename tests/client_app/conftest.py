"""Sites without a grid: contexts, messages, and methods opened by hand."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsilo.client_app import session
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import finished_session
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.core.messages import ARRAYS, CONFIG, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.strategies.wire.records import to_record
from tests.support.identity import flower_names  # noqa: F401


@pytest.fixture
def resolved(tiny: Callable[..., dict[str, Any]]) -> Callable[..., RunSettings]:
    """Return a builder of small settings: method, changes."""
    return lambda method="fedavg", **changes: resolve(tiny(method, **changes))


@pytest.fixture
def common(resolved: Callable[..., RunSettings]) -> CommonSettings:
    return resolved().common


@pytest.fixture
def silo(common: CommonSettings) -> Silo:
    return load_silo("s1a", common)


@pytest.fixture
def context(resolved: Callable[..., RunSettings]) -> Callable[..., Context]:
    """Return a builder of a node's Context: node config, then method and changes."""

    def make(node: Mapping[str, Any], method: str = "fedavg", **changes: Any) -> Context:
        run_config = resolved(method, **changes).as_mapping()
        return Context(1, 1001, dict(node), RecordDict(), dict(run_config))

    return make


@pytest.fixture
def weights(common: CommonSettings, silo: Silo) -> dict[str, Any]:
    """Return the initial weights of the seed, as arrays."""
    network = build_classifier(common, silo.shape)
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}


def content_of(instruction: Instruction, arrays: Mapping[str, Any] | None) -> RecordDict:
    content = RecordDict({CONFIG: ConfigRecord(dict(instruction.to_config()))})
    if arrays is not None:
        content[ARRAYS] = to_record(arrays)
    return content


@pytest.fixture
def message(tmp_path: Path) -> Callable[..., Message]:
    """Return a builder of a message: kind, arrays, instruction's fields."""

    def make(kind: str, arrays: Mapping[str, Any] | None = None, **fields: Any) -> Message:
        known = {"round": 1, "phase": kind, "run_name": "run", "run_dir": str(tmp_path)}
        instruction = Instruction(**{**known, **fields})
        return Message(content_of(instruction, arrays), 1001, kind, group_id="1")

    return make


@pytest.fixture
def opened(resolved: Callable[..., RunSettings], tmp_path: Path) -> Callable[..., Lab]:
    """Return a function that opens a message at a site: method, arrays, instruction's fields."""

    def make(
        method: str,
        arrays: Mapping[str, Any] | None = None,
        site: str = "s1a",
        own: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Lab:
        instruction = Instruction(**{"round": 1, "phase": "train", "run_name": "run", **fields})
        settings = resolved(method, **(own or {}))
        opened = finished_session(settings.common, settings.own, load_silo(site, settings.common))
        opened = dataclasses.replace(opened, simulated=bool(instruction.run_dir))
        files = SiteState(tmp_path / "sites" / site)
        return Lab(opened, content_of(instruction, arrays), instruction, files)

    return make


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Let no test meet another's session."""
    session._sessions.clear()
    yield
    session._sessions.clear()
