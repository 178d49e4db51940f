"""Writes the server's checkpoint after each round, and resumes from the newest intact one."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.state_files import load_state, save_state
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.removed import current_settings
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import differences
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State

KEPT = 2  # checkpoints; sites keep the same number of states, so any kept round can be resumed


class CheckpointHook(Hook):
    """Writes one file per round with the states of round and hooks; keeps the newest two files.

    A resumed run must have equal ``settings``. Only hooks that have a name are stored.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Value],
        hooks: Sequence[Hook],
        state_class: type[State] = State,
    ) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self.hooks = {hook.name: hook for hook in hooks if hook.name}
        self.state_class = state_class

    def round_ended(self, state: State) -> None:
        """Write this round's checkpoint and remove the oldest."""
        facts = {
            **state.facts(),
            "settings": self.settings,
            "hooks": {name: hook.state() for name, hook in self.hooks.items()},
        }
        save_state(self.folder / f"round-{state.round:06d}.safetensors", state.arrays, facts)
        # Removed only after the new one is written, so that one intact checkpoint always exists
        for old in sorted(self.folder.glob("round-*.safetensors"))[:-KEPT]:
            old.unlink()

    def resume(self) -> State | None:
        """Load the newest intact checkpoint and restore the hooks.

        Returns:
            The state of the checkpoint, or None if the folder has no checkpoint.

        Raises:
            CheckpointError: the checkpoint belongs to other settings or another version, or no
                checkpoint is intact.
        """
        files = sorted(self.folder.glob("round-*.safetensors"))
        for path in reversed(files):
            # Only a damaged file is skipped: one of other settings must not lead to an older state
            try:
                arrays, facts = load_state(path)
            except CheckpointError as error:
                logging.getLogger("flwr").warning("%s: trying the one before it", error)
                continue
            try:
                self._refuse_other_settings(facts["settings"], path)
                for name, hook in self.hooks.items():
                    hook.restore(facts["hooks"][name])
                state = self.state_class.restored(arrays, facts)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{path} was written by another version of fedsilo ({type(error).__name__}: "
                    f"{one_line(error, 100)}): start a new run"
                ) from None
            if path.stem != f"round-{state.round:06d}":
                raise CheckpointError(f"{path} holds round {state.round}: start a new run")
            return state
        if files:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is intact "
                f"({', '.join(path.name for path in files)}): start a new run"
            )
        return None

    def _refuse_other_settings(self, recorded: Mapping[str, Value], path: Path) -> None:
        """Raise a CheckpointError if a checkpoint's settings are not those of this run."""
        before = current_settings(recorded, str(path), quietly=True)
        fault = ""
        # The removed setting made sites add rounding errors to their next update
        if recorded.get("wire-feedback") and before["server.wire-precision"] == "bf16":
            fault = (
                "belongs to a run with 'wire-feedback', but this version has no such setting: "
                "start a new run"
            )
        other = differences(before, self.settings)
        if other and not fault:
            fault = (
                f"belongs to a run with other settings: {other}; resume with the same settings, or "
                "choose another 'run.name'"
            )
        if fault:
            raise CheckpointError(f"{path} {fault}")
