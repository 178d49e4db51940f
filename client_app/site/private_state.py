"""A site's private state on its own disk: personal weights, codebooks, whatever a method keeps.

One file per (round, step), whole or absent. Those of the newest two rounds are kept, so that a
server that lost its last round can continue from the one that it knows.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsilo.datasets.io.state_files import load_state, save_state
from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.messages import ROUND_KEYS, Instruction, state_key
from fedsilo.models.contract.plugs import PINS
from fedsilo.models.contract.removed import former_defaults
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, keys_with

_DIGEST = "settings"
_NAME = re.compile(r"round-(\d{6})-(\d{2,})\.safetensors")


@dataclass(frozen=True)
class SiteState:
    """The states of one site in one run, in ``folder``.

    ``settings_digest`` (see ``settings_digest_of``) is stored with each: what was kept under some
    settings, which decide what of it is shared, is not opened under others.
    """

    folder: Path
    settings_digest: str = ""

    def before(self, instruction: Instruction) -> dict[str, Tensor] | None:
        """Return the newest state older than ``instruction``; None if there is none.

        Later states belong to rounds that the server lost, and are not looked at.

        Raises:
            CheckpointError: the state is gone, cut short or altered, the newest that the server
                knows of is missing, or the server goes back further than this site remembers.
        """
        keys = self._keys()
        # A server that resumed may ask again for a round that this site has already finished
        older = [key for key in keys if key < (instruction.round, instruction.step)]
        if not older and _forgotten(keys, instruction):
            raise CheckpointError(
                f"{self._name}: round {instruction.round} is asked for and the oldest state in "
                f"{self.folder} is of round {keys[0][0]}; resume from a newer checkpoint or start "
                "a new run"
            )
        if not older and instruction.expects_state:
            raise CheckpointError(
                f"{self._name} is gone from {self.folder}: bring it back, or start a new run"
            )
        if not older:  # the site's first round, or a method that keeps nothing
            return None
        if state_key(*older[-1]) < instruction.expects_state:
            expected = instruction.expects_state // ROUND_KEYS
            raise CheckpointError(
                f"{self._name}, round {instruction.round}: the site kept one of round {expected} "
                f"and the newest in {self.folder} is of round {older[-1][0]}: bring the newer one "
                "back, or start a new run"
            )
        try:
            arrays, facts = load_state(self._path(*older[-1]))
        except CheckpointError as error:
            raise CheckpointError(
                f"{self._name}: {error}; remove the file to continue from the state before it"
            ) from None
        if facts.get(_DIGEST, "") != self.settings_digest:
            raise CheckpointError(
                f"{self._name} in {self.folder} was kept under other settings (method, what is "
                "shared, network or seed): choose another 'run-name'"
            )
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def is_counted(self, instruction: Instruction) -> bool:
        """Tell whether the server has made use of the reply with which ``before``'s was stored."""
        older = [key for key in self._keys() if key < (instruction.round, instruction.step)]
        return not older or state_key(*older[-1]) <= instruction.expects_state

    def store(self, instruction: Instruction, arrays: dict[str, Tensor]) -> None:
        """Store the state that ``instruction`` led to, and drop those of older rounds.

        Later states are of an attempt that the server lost: they are dropped too.

        Raises:
            CheckpointError: it cannot be written; what was stored before is still there.
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
        kept = sorted({key[0] for key in self._keys() if key <= now})[-2:]
        for key in self._keys():
            if key > now or key[0] not in kept:
                self._path(*key).unlink(missing_ok=True)

    @property
    def _name(self) -> str:
        return f"private state of site {self.folder.name}"

    def _path(self, round_: int, step: int) -> Path:
        return self.folder / f"round-{round_:06d}-{step:02d}.safetensors"

    def _keys(self) -> list[tuple[int, int]]:
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]), int(match[2])) for match in matches if match)


# Where a site computes and with how much patience; a hospital may change them during a run
_FREE = frozenset(
    keys_with(CommonSettings, "circumstance", "machine", "own", "course", "combining", "floor")
    + keys_with(CommonSettings, "wire")
)


def settings_digest_of(common: CommonSettings, own: Any) -> str:
    """Return a digest of all settings that decide what a state means and what of it is shared."""
    values = as_mapping(common) | as_mapping(own)
    values |= former_defaults(values)
    # Empty pins are left out: states of before plugs have the same digest
    chosen = {k: v for k, v in values.items() if k not in _FREE and (v or k != PINS)}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _forgotten(keys: list[tuple[int, int]], instruction: Instruction) -> bool:
    """Tell whether a state before ``instruction`` was there once and has been dropped.

    A single round on disk, the one that is asked for again, is this site's first: nothing was.
    """
    rounds = {key[0] for key in keys}
    return instruction.round > 1 and bool(rounds) and rounds != {instruction.round}


def drop_old_states(home: Path, site: str, current: str, most: int) -> None:
    """Remove the states of the runs that were asked for longest ago, until ``most`` bytes are left.

    Args:
        home: the 'state-dir', with a run's states in ``<run>/<site>``.
        site: whose they are; another site's in the same folder are left alone.
        current: the run that is asked for now: its states stay.
        most: bytes of all runs together.
    """
    others = (run for run in home.glob("*") if run.name != current and not run.name.startswith("."))
    states = [
        [(path, path.stat()) for path in (run / site).glob("*") if _NAME.fullmatch(path.name)]
        for run in others
    ]
    total = sum(stat.st_size for run in states for _, stat in run)
    for run in sorted(filter(None, states), key=lambda run: max(stat.st_mtime for _, stat in run)):
        if total <= most:
            return
        for path, stat in run:
            path.unlink(missing_ok=True)
            total -= stat.st_size
