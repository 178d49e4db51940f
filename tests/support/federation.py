"""Real hospitals and a server in one process: each with a node config and a disk of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from fedsilo.client_app.app import app
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, flower_identity
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.runner import run
from tests.support.keys import compare_keys
from tests.support.setting_keys import as_keys

SITES = ("cleveland", "hungary", "switzerland", "va")  # of 'heart-synthetic'
_USUAL: Mapping[str, Value] = {
    "method": "fedavg",
    "dataset": "heart-synthetic",
    "network.name": "logistic",
    "data.standardise": "site",
    "train.mc-passes": 0,
    "rounds": 1,
    "train.local-steps": 2,
    "machine.device": "cpu",
}


@dataclass
class Federation:
    """Hospitals of made-up heart patients, which keep what they keep from run to run.

    Attributes:
        home: where server and hospitals have their folders.
        nodes: what a hospital's node config says beside its name and 'state-dir', by site.
    """

    home: Path
    nodes: dict[str, dict[str, Value]] = field(default_factory=dict)
    _new: Iterator[int] = field(default_factory=count)

    def run(
        self, values: Mapping[str, Value], sites: tuple[str, ...] = SITES, out: str = ""
    ) -> RunDirectory:
        """Run ``values`` with the hospitals ``sites``; what is not named is new: server and name.

        Raises:
            FedsiloError: the run failed.
        """
        new = f"new-{next(self._new)}"
        named = {"run.out": str(self.home / (out or new)), "run.name": new}
        settings = resolve(as_keys({**_USUAL, **named, **values}))
        with flower_identity():
            return run(
                InlineGrid(app, settings.as_mapping(), [self._node(site) for site in sites]),
                settings,
            )

    def kept(self, site: str, name: str, run_name: str) -> Path:
        """Return a file that a hospital keeps of a run."""
        return self._disk(site) / run_name / site / name

    def _disk(self, site: str) -> Path:
        return self.home / "hospitals" / site

    def _node(self, site: str) -> dict[str, Value]:
        own = {"site": site, "state-dir": str(self._disk(site)), "trust": "server"}
        compare_keys({name: self._disk(name) for name in SITES})
        return own | self.nodes.get(site, {})
