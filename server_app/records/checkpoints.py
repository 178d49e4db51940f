"""The server's checkpoint after each round, and going on from the newest whole one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.state_files import load_state, save_state
from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import differences
from fedsilo.server_app.records.forms import HOOKS, STATE
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.state import RoundState

KEPT = 2  # as many as a site keeps states of


class CheckpointHook(Hook):
    """Stores the round state and the other hooks' states, one file a round, the newest two kept."""

    name = "checkpoint"

    def __init__(self, folder: Path, settings: Mapping[str, Value], hooks: Sequence[Hook]) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self.hooks = list(hooks)

    def round_ended(self, state: RoundState) -> None:
        """Write this round's checkpoint and drop the oldest."""
        facts = {
            "round": state.round,
            "extras": dict(state.extras),
            "keepers": list(state.stateful_sites),
            "settings": self.settings,
            "hooks": {hook.name: hook.state() for hook in self.hooks if hook.name},
        }
        save_state(self.folder / f"round-{state.round:06d}.safetensors", state.arrays, facts)
        for old in _files(self.folder)[:-KEPT]:
            old.unlink()

    def resume(self) -> RoundState | None:
        """Return the newest whole checkpoint and restore the hooks; None if none was written yet.

        Raises:
            CheckpointError: it belongs to another config, or no checkpoint is whole.
        """
        files = _files(self.folder)
        for path in reversed(files):
            try:
                arrays, facts = load_state(path)
            except CheckpointError as error:
                logging.getLogger("flwr").warning("%s: looking for the one before it", error)
                continue
            self._check_form(path, facts)
            if other := differences(facts["settings"], self.settings):
                raise CheckpointError(
                    f"{path} belongs to another config: {other}; resume with the same settings "
                    "or choose another 'run-name'"
                )
            for hook in self.hooks:
                if hook.name:
                    hook.restore(facts["hooks"].get(hook.name))
            stateful_sites = tuple(facts["keepers"])
            return RoundState(facts["round"], arrays, facts["extras"], stateful_sites)
        if files:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is whole "
                f"({', '.join(path.name for path in files)}): start a new run"
            )
        return None

    def _check_form(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Refuse facts of another form, and a checkpoint of another round than its name says.

        Raises:
            CheckpointError: so they are.
        """
        lacking = {"round", "extras", "keepers", "settings", "hooks"} - facts.keys()
        fault = f"it lacks '{min(lacking)}'" if lacking else STATE(facts) or HOOKS(facts["hooks"])
        if fault or path.stem != f"round-{facts['round']:06d}":
            raise CheckpointError(
                f"{path} is of another form: {one_line(fault or 'it is of another round')}; start "
                "a new run"
            )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors")) if folder.is_dir() else []
