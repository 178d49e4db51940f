"""A site's secrets for one round of secure aggregation: its keys, shares and signed lists.

They are in the folder of the site's state, readable only by their owner, and are erased once the
round's sum is unmasked.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.strategies.wire.secure_keys import (
    Shares,
    cut_secret,
    mask_key,
    open_shares,
    seal_key,
    seal_shares,
)
from fedsilo.strategies.wire.signatures import list_words

SECRETS = "secure-round.json"


@dataclass
class RoundSecrets:
    """A site's secrets and choices in one round; the file has bytes as hexadecimal text."""

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "ser_json_bytes": "hex",
        "val_json_bytes": "hex",
    }
    round: int
    masking: bytes  # the private key for masks
    sealing: bytes  # the private key that seals shares
    public: tuple[bytes, bytes]  # the public halves of both keys
    own_mask: bytes  # the seed of the site's own mask
    terms: bytes  # the digest of the run's settings when the keys were signed
    # Each site's public keys, for masks and for sealing, and each site's
    # public signing key. They are known once shares are exchanged
    keys: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    publics: dict[str, bytes] = field(default_factory=dict)
    # The splits that all sites measure, so that their metrics may be summed
    splits: list[str] = field(default_factory=list)
    # This site's shares of its own secrets: of its own mask, and of its masking key
    own_shares: list[bytes] = field(default_factory=list)
    threshold: int = 0  # the number of shares that reconstruct a secret
    context: bytes = b""  # binds masks and signatures to run, round, names, keys and threshold
    partners: list[str] = field(default_factory=list)  # the sites to mask with; empty before that
    weighed: str = ""  # the digest of the numbers that the site masked
    received: str = ""  # the digest of the arrays that came with the model
    question: str = ""  # the digest of the request, at a hospital that declares its data
    failed: bool = False  # whether the site could not answer, and masked 0
    # The sites whose weights arrived, in the list that this site has signed
    answered: list[str] = field(default_factory=list)
    # If the method proves its sums: the seal of this site's masked part, and those of all parts.
    # Their order is that of ``answered``
    seal: str = ""
    seals: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[str]:
        """All sites that have keys, sorted."""
        return sorted(self.keys)

    def seal_key_with(self, other: str) -> bytes:
        """Return the symmetric key that seals shares between this site and another."""
        return seal_key(self.sealing, self.keys[other][1], self.context)

    def masks(self, site: str, bound: bytes) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of the masks that ``site`` adds, and the keys of those that it subtracts.

        Each pair of sites shares one mask. The site whose name sorts first adds this mask, and its
        partner subtracts it, so that the mask cancels in the sum. The first key to add is that of
        the site's own mask, which no other site shares.

        Args:
            site: this site.
            bound: a digest of the received model and the names of the masked arrays. Shared masks
                depend on it.
        """
        added, subtracted = [self.own_mask], []
        for other in self.partners:
            if other == site:
                continue
            key = mask_key(self.masking, self.keys[other][0], bound)
            if site < other:
                added.append(key)
            else:
                subtracted.append(key)
        return added, subtracted

    def seal_shares(self, site: str) -> dict[str, bytes]:
        """Split this site's two secrets into shares, and encrypt a pair of shares per other site.

        The secrets are the seed of this site's own mask and its masking key. Each pair has one
        share of either secret. Any ``threshold`` shares of a secret reconstruct it, and fewer
        reveal nothing. The pair that this site holds itself is put into ``own_shares``. The caller
        writes the file.

        Returns:
            The encrypted pairs, by the site that can open them.
        """
        sites, place = self.sites, self.sites.index(site)
        # Shamir shares: any ``threshold`` of them reconstruct a secret, fewer reveal nothing
        own_masks = cut_secret(self.own_mask, self.threshold, len(sites))
        mask_keys = cut_secret(self.masking, self.threshold, len(sites))
        self.own_shares = [own_masks[place], mask_keys[place]]
        sealed_shares = {}
        for number, other in enumerate(sites):
            if number != place:
                shares = Shares(own_masks[number], mask_keys[number])
                positions = (
                    place,
                    number,
                )  # sender and receiver, so that no share can be redirected
                sealed_shares[other] = seal_shares(shares, self.seal_key_with(other), positions)
        return sealed_shares

    def open_shares(self, site: str, received: Mapping[str, bytes]) -> dict[str, Shares]:
        """Open the shares that the other sites in the sum have encrypted for ``site``.

        A share is a part of a site's secret, and enough shares together reconstruct the secret. If
        a pair of shares is missing or cannot be opened, its site is left out of the result.

        Args:
            site: this site.
            received: the encrypted shares, by the site that made them.

        Returns:
            The shares, by the site whose secrets they belong to. They include the shares of its own
            secrets that ``site`` holds.
        """
        sites, place = self.sites, self.sites.index(site)
        shares = {site: Shares(*self.own_shares)}
        for other in self.partners:
            if other == site or other not in received:
                continue
            positions = (sites.index(other), place)
            with suppress(SiteError):
                shares[other] = open_shares(received[other], self.seal_key_with(other), positions)
        return shares

    def list_words(self) -> bytes:
        """Encode the list of sites whose weights arrived, with keys and seals, for signing."""
        return list_words(self.context, self.answered, self.seals)

    def refuse_few(self, site: str, sites: list[str], what: str) -> None:
        """Check that the server's list of sites has the right form and enough sites.

        The list must be sorted, with each site once, only sites that have keys, and ``site`` among
        them. It needs at least ``threshold`` sites ('secure.threshold'), because a sum over fewer
        would reveal individual updates.

        Args:
            site: this site.
            sites: the server's list.
            what: the words after the number of sites in the error's text, such as "have sent their
                weights".

        Raises:
            SiteError: the list has another form, or this object has no keys of the sites yet.
            RefusedError: the list has fewer sites than the threshold.
        """
        if not self.keys:
            raise SiteError("the keys of this round were not shared with this site yet")
        refuse_list(site, sites, self.keys, what)
        if len(sites) < self.threshold:
            raise RefusedError(
                f"{len(sites)} sites {what}, but {self.threshold} are needed "
                "('secure.threshold'): a sum over fewer would reveal individual updates"
            )

    def write(self, folder: Path) -> None:
        """Write the secrets to their file in ``folder``, replacing the secrets of any other round.

        Raises:
            CheckpointError: the file cannot be written.
        """
        _file(folder).write(self)


def refuse_list(
    site: str, sites: list[str], known: Iterable[str], what: str, with_own: bool = True
) -> None:
    """Check that a list of sites is sorted, without duplicates, and has only known sites.

    Signatures cover the list as text, so every site must write the list in the same way.

    Args:
        site: this site.
        sites: the server's list.
        known: the sites that the list may have, such as those with keys.
        what: the words after "sites that" in the error's text, such as "make keys".
        with_own: whether this site must be in the list.

    Raises:
        SiteError: the list breaks one of these rules.
    """
    must = "be sorted, with each site once and only known sites"
    if with_own:
        must += ", and include this site"
    is_sorted = sites == sorted(set(sites) & set(known))
    if not is_sorted or (with_own and site not in sites):
        raise SiteError(f"the server's list of sites that {what} must {must}")


def read_secrets(folder: Path, round_: int) -> RoundSecrets:
    """Read this site's secrets (its keys, shares and signed list) for a round from ``folder``.

    Raises:
        SiteError: the folder has no file of secrets, or the secrets are for another round.
        CheckpointError: the file is damaged.
    """
    secrets = _file(folder).read(None)
    if secrets is None:
        raise SiteError("it has no keys for secure aggregation: begin the round again")
    if secrets.round != round_:
        raise SiteError(
            f"its keys for secure aggregation are for round {secrets.round}, but round {round_} is "
            "asked for: begin the round again"
        )
    return secrets


def lock_secrets(folder: Path) -> AbstractContextManager[None]:
    """Return a context manager that locks the secrets, so two messages cannot use the same keys."""
    return _file(folder).lock()


def drop_secrets(folder: Path) -> None:
    """Delete the secrets file, because the round's sum is unmasked or the run is over."""
    (folder / SECRETS).unlink(missing_ok=True)


def _file(folder: Path) -> OwnFile[RoundSecrets | None]:
    return OwnFile(folder / SECRETS, RoundSecrets, SECRETS, "remove it and begin the round again")
