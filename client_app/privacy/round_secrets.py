"""What a site knows of one round of secure aggregation: keys, shares and what it has signed.

They are in the folder of the site's state, readable by their owner alone, and are erased once the
round's sum is open.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.wire.secure_keys import seal_key
from fedsilo.strategies.wire.signatures import words

SECRETS = "secure-round.json"


@dataclass
class RoundSecrets:
    """What a site knows in one round; in the file bytes are hexadecimal text."""

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "ser_json_bytes": "hex",
        "val_json_bytes": "hex",
    }
    round: int
    masking: bytes  # private key for masks
    sealing: bytes  # private key for what travels
    public: tuple[bytes, bytes]  # both keys' public halves
    own_mask: bytes  # key of the site's own mask
    terms: bytes  # digest of the run's settings, under which the keys were signed
    # Each site's public keys, for masks and for what travels, and below it the key by which it
    # signs; known once shares are exchanged
    keys: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    publics: dict[str, bytes] = field(default_factory=dict)
    splits: list[str] = field(default_factory=list)  # those that all sites measure, to be summed
    own_shares: list[bytes] = field(default_factory=list)  # what the site keeps of its own secrets
    threshold: int = 0  # shares that give a secret back
    context: bytes = b""  # what all sites share
    partners: list[str] = field(default_factory=list)  # with which it is masked; none: not yet
    weighed: str = ""  # digest of what it masked
    received: str = ""  # digest of the arrays that it was sent with the model
    question: str = ""  # digest of all that was asked, at a hospital that declares its data
    failed: bool = False  # it could not answer, and masked 0
    answered: list[str] = field(default_factory=list)  # whose weights came, as it has signed

    @property
    def sites(self) -> list[str]:
        """All sites that have keys, sorted."""
        return sorted(self.keys)

    def seal_key_with(self, other: str) -> bytes:
        """Return the key under which shares travel between this site and another."""
        return seal_key(self.sealing, self.keys[other][1], self.context)

    def list_words(self) -> bytes:
        """Return what a site signs to say whose weights came, under the keys of the round."""
        return words("answered", self.context, self.answered)

    def write(self, folder: Path) -> None:
        """Write them down; CheckpointError where the disk does not take them."""
        _file(folder).write(self)


def read_secrets(folder: Path, round_: int) -> RoundSecrets:
    """Return what a site knows of a round.

    Raises:
        SiteError: there is nothing, or it is of another round.
        CheckpointError: the file is damaged.
    """
    secrets = _file(folder).read(None)
    if secrets is None:
        raise SiteError("it has no keys for secure aggregation: begin the round again")
    if secrets.round != round_:
        raise SiteError(
            f"its keys for secure aggregation are of round {secrets.round}, and round {round_} is "
            "asked for: begin the round again"
        )
    return secrets


def one_at_a_time(folder: Path) -> AbstractContextManager[None]:
    """Let one message at a time use the secrets: two at once would both find keys unused."""
    return _file(folder).locked()


def drop_secrets(folder: Path) -> None:
    """Erase the keys of a round: its sum is open, or the run is over."""
    (folder / SECRETS).unlink(missing_ok=True)


def _file(folder: Path) -> OwnFile[RoundSecrets | None]:
    return OwnFile(folder / SECRETS, RoundSecrets, SECRETS, "remove it and begin the round again")
