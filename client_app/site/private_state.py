"""A site's private state on its own disk: personal weights, codebooks and other stored arrays.

There is one file per (round, step), complete or absent. The files of the newest two rounds stay,
because a server that lost its last round continues from the round before.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.files.state_files import load_state, save_state
from fedsilo.core.messages import ROUND_KEYS, Instruction, state_key
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import ADDED, former_defaults, with_former_keys
from fedsilo.core.settings_schema import as_mapping, keys_in, keys_with

_DIGEST = "settings"
_NAME = re.compile(r"round-(\d{6})-(\d{2,})\.safetensors")


@dataclass(frozen=True)
class SiteState:
    """The stored states of one site in one run, in ``folder``.

    ``settings_digest`` (see ``settings_digest_of``) is stored with each state. A state stored under
    other settings is not opened, because settings decide which part of the network is shared.
    """

    folder: Path
    settings_digest: str = ""

    def load_before(self, instruction: Instruction) -> dict[str, Tensor] | None:
        """Load the site's newest state from before the instruction's round and step.

        The result maps names to arrays. It is None if no earlier state is stored and the server
        expects none, as in the site's first round. States of the requested step or later are
        ignored. They exist if a server resumes from an older checkpoint.

        Raises:
            CheckpointError: the state is damaged or was stored under other settings. The error also
                means that a state that the server expects is missing, or was deleted when the site
                stored newer ones.
        """
        older = self._older_keys(instruction)
        missing = self._missing_state(instruction, older)
        if missing:
            raise CheckpointError(f"{self._name}{missing}")
        if not older:  # this is the site's first round, or the method keeps nothing
            return None
        try:
            arrays, facts = load_state(self._path(*older[-1]))
        except CheckpointError as error:
            raise CheckpointError(
                f"{self._name}: {error}; remove the file to continue from the state before it"
            ) from None
        if facts.get(_DIGEST, "") != self.settings_digest:
            raise CheckpointError(
                f"{self._name} in {self.folder} was kept under other settings (method, what is "
                "shared, network or seed): choose another 'run.name'"
            )
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _missing_state(self, instruction: Instruction, older: list[tuple[int, int]]) -> str:
        """Describe which state from before ``instruction`` is missing, and how to go on.

        An earlier state was stored before the round and step of ``instruction``. The server names
        the newest state that the site has reported to it (``expects_state``), or none. The result
        is "" if the newest earlier state is at least that new. It is also "" if there is no earlier
        state and the server names none. There are three faults:

        - The site has deleted all earlier states, because it stored newer ones.
        - No earlier state is stored, for another reason.
        - The newest earlier state is older than the one that the server names.

        Args:
            instruction: the server's request.
            older: the (round, step) of each stored earlier state, sorted.
        """
        keys, newest = self._keys(), 0
        if older:
            newest = state_key(*older[-1])
        elif not instruction.expects_state:
            return ""
        elif _was_dropped(keys, instruction):
            return (
                f": round {instruction.round} is asked for, but the oldest state in {self.folder} "
                f"is from round {keys[0][0]}; resume from a newer checkpoint or start a new run"
            )
        else:
            return f" is gone from {self.folder}: bring it back, or start a new run"
        if newest < instruction.expects_state:
            expected = instruction.expects_state // ROUND_KEYS
            return (
                f", round {instruction.round}: the site kept one from round {expected}, but the "
                f"newest in {self.folder} is from round {older[-1][0]}: bring the newer one back, "
                "or start a new run"
            )
        return ""

    def is_counted(self, instruction: Instruction) -> bool:
        """Tell whether the server used the site's last reply from before ``instruction``.

        The site stores a state with each reply. A reply may be lost, refused or late. The server
        then expects an older state (``instruction.expects_state``) than the newest one stored here,
        and the result is False. If no state from before ``instruction`` is stored, the result is
        True.
        """
        older = self._older_keys(instruction)
        return not older or state_key(*older[-1]) <= instruction.expects_state

    def store(self, instruction: Instruction, arrays: dict[str, Tensor]) -> None:
        """Write the site's state after a phase, and delete states that are no longer needed.

        The states of this round and of the last stored round before it stay. States of earlier
        rounds are deleted. States of later rounds or steps are deleted too, because the server has
        gone back.

        Args:
            instruction: the request that was answered, whose round and step name the file.
            arrays: the arrays by name; may be empty. Their values are not checked.

        Raises:
            CheckpointError: the state cannot be written. All stored states then remain.
        """
        now = round_, step = instruction.round, instruction.step
        facts = {"round": round_, "step": step, _DIGEST: self.settings_digest}
        content = {name: tensor.detach().cpu().numpy() for name, tensor in arrays.items()}
        try:
            save_state(self._path(*now), content, facts, mode=0o600)
        except OSError as error:
            raise CheckpointError(
                f"{self._name} cannot be written to {self.folder}: {error.strerror}; make room or "
                "repair the disk, then resume the run"
            ) from error
        # Two rounds, because the server's own checkpoint can be one round behind its sites
        rounds = {key[0] for key in self._keys() if key <= now}
        kept = sorted(rounds)[-2:]
        for key in self._keys():
            if key > now or key[0] not in kept:
                self._path(*key).unlink(missing_ok=True)

    @property
    def _name(self) -> str:
        return f"private state of site {self.folder.name}"

    def _path(self, round_: int, step: int) -> Path:
        return self.folder / f"round-{round_:06d}-{step:02d}.safetensors"

    def _keys(self) -> list[tuple[int, int]]:
        """Return the (round, step) of each stored state, sorted, as read from the file names.

        A state's file is ``round-<round>-<step>.safetensors``. Other files are ignored. The list is
        empty if the folder does not exist.
        """
        if not self.folder.is_dir():
            return []
        keys = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                keys.append((int(match[1]), int(match[2])))
        return sorted(keys)

    def _older_keys(self, instruction: Instruction) -> list[tuple[int, int]]:
        """Return the (round, step) of each stored state from before ``instruction``, sorted.

        A step is the number of a phase in its round. States of the same or a later step are not
        listed. They exist if a server that lost its newest rounds repeats them.
        """
        now = (instruction.round, instruction.step)
        return [key for key in self._keys() if key < now]


# A hospital may change these during a run: where it computes, and its timeouts
_FREE = frozenset(
    keys_in(CommonSettings, "server", "secure", "machine", "run")
    + keys_with(CommonSettings, "own")
    + ("rounds", "plugin-settings", "privacy.sums-min-count")
)


def settings_digest_of(common: CommonSettings, own: Any) -> str:
    """Return a digest of the settings that a stored state depends on.

    A site's state can be loaded only under the digest with which it was stored. The digest is the
    SHA-256, in hexadecimal, of the settings in ``common`` and ``own`` as JSON, sorted by key. Keys
    and defaults are those of version 0.1, so states stored by version 0.1 can still be loaded. Two
    kinds of settings are left out:

    - Settings that may change during a run. These are the groups 'server', 'secure', 'machine' and
      'run', the settings that a hospital sets itself, and the single settings 'rounds',
      'plugin-settings' and 'privacy.sums-min-count'.
    - Settings that version 0.1 did not have, if they have their default.

    Args:
        common: the run's common settings.
        own: the settings of the run's method.
    """
    values = as_mapping(common) | as_mapping(own)
    defaults_of_01 = former_defaults(values)
    for key in _FREE:
        values.pop(key, None)
    for key, default in ADDED.items():
        if values.get(key) == default:
            values.pop(key, None)
    # States of 0.1 open: the digest is over its names, and over the settings that it had
    chosen = with_former_keys(values) | defaults_of_01
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _was_dropped(keys: list[tuple[int, int]], instruction: Instruction) -> bool:
    """Tell whether the site has deleted all states from before the requested round and step.

    The caller has found no such state. A site deletes old states when it stores newer ones, so a
    stored state of a later round means yes. The answer is no in three cases:

    - Round 1 is requested, because no earlier round can have stored a state.
    - All stored states are from the requested round. The site may have joined the run in that
      round, and so had no older states to delete.
    - No state is stored.

    Args:
        keys: the (round, step) of all stored states.
        instruction: the server's request.
    """
    rounds = {key[0] for key in keys}
    return instruction.round > 1 and bool(rounds) and rounds != {instruction.round}


@dataclass(frozen=True)
class _RunStates:
    """The states of one site in one run."""

    last_used: float  # seconds since 1970
    size: int  # bytes
    paths: list[Path]


def drop_old_states(home: Path, site: str, current: str, most: int) -> None:
    """Delete the states of the least recently used runs until all others fit into ``most`` bytes.

    A run was last used when its newest file was written. The current run's states are neither
    deleted nor counted.

    Args:
        home: the 'state-dir'; each run's states are in ``<run>/<site>``.
        site: the site; states of other sites in the same folder stay.
        current: the name of the run that the message belongs to.
        most: the maximum number of bytes for the states of all other runs together.
    """
    states: list[_RunStates] = []
    for run in home.glob("*"):
        if run.name == current or run.name.startswith("."):
            continue
        paths = [path for path in (run / folder_name(site)).glob("*") if _NAME.fullmatch(path.name)]
        if paths:
            found = [path.stat() for path in paths]
            last_used = max(stat.st_mtime for stat in found)
            states.append(_RunStates(last_used, sum(stat.st_size for stat in found), paths))
    total = sum(one.size for one in states)
    for one in sorted(states, key=lambda one: one.last_used):
        if total <= most:
            return
        for path in one.paths:
            path.unlink(missing_ok=True)
        total -= one.size
