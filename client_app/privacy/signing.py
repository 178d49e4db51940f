"""A site's signing key for secret sums, and the other sites' keys that people compared.

A hospital makes its key at its first start, and the private key never leaves. The other hospitals'
public keys come with the messages of a run, and a server could replace them. So people at two
hospitals compare the code of each key by telephone, and a site accepts no other key. A simulated
site's key is made from the seed: it exercises the protocol and proves nothing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
)

from fedsilo.client_app.site.node import own_folder_of
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.files.atomic_files import read_regular, write_atomically
from fedsilo.core.files.site_names import site_name_fault
from fedsilo.core.settings_schema import Value
from fedsilo.strategies.wire.signatures import (
    is_key_code,
    is_signed,
    key_code,
    public_text,
    simulated_key,
)

# Files in the folder that a hospital keeps over all runs
KEY, KNOWN = "signing.key", "known-keys.json"
# The most keys without a comparison, because a server could invent any number of sites
_MOST_RECEIVED = 200
# Former keys of the node config, from when the server made the signing keys
_FORMER = ("signing-key", "site-registry")


@dataclass(frozen=True)
class SignedKeys:
    """A site's public keys for a round and its signature over them, as received from the server."""

    site: str  # the site's name, as sent by the server
    public: bytes  # the site's public signing key, in OpenSSH's form
    words: bytes  # the text that the site must have signed
    signature: bytes  # the signature that must fit the words


@dataclass(frozen=True)
class Signer:
    """A site's own signing key, and its rule for accepting other sites' keys."""

    private: EllipticCurvePrivateKey
    # Raises a RefusedError unless each site's key code is the one known here
    refuse_unknown: Callable[[Mapping[str, str]], None]

    def refuse_unsigned(self, received: Sequence[SignedKeys]) -> None:
        """Check that each site has signed its keys of this round with a trusted signing key.

        Sites exchange keys for secure aggregation through the server, which could replace them. So
        each site signs its keys. A hospital trusts a signing key if people at both hospitals have
        compared its code, a short hash. A simulated site trusts the signing key derived from the
        run's seed.

        Args:
            received: one entry for each site that has keys, this site included.

        Raises:
            RefusedError: a signature does not match, or a signing key is not trusted. The error
                names the site.
            SiteError: a public signing key is malformed.
            CheckpointError: the hospital's list of signing keys, which stores each received code,
                is damaged or cannot be written.
        """
        codes = {one.site: key_code(one.public) for one in received}
        for one in received:
            if not is_signed(one.public, one.words, one.signature):
                raise RefusedError(
                    f"the signature of site {one.site} does not match its keys in this run: they "
                    "were altered, belong to another round, or that site has other settings"
                )
        self.refuse_unknown(codes)


def signer_of(simulated: bool, seed: int, site: str, node_config: Mapping[str, Value]) -> Signer:
    """Return a site's signing key, and the check that it makes on the signing keys of other sites.

    A site signs its keys for secure aggregation with this key. A simulated site accepts only
    signing keys that are derived from the run's seed. A hospital accepts only signing keys whose
    codes people at the two hospitals have compared. If a hospital has no signing key yet, one is
    made and stored.

    Args:
        simulated: whether the site is simulated.
        seed: the run's seed, used only in a simulation.
        site: the site's name.
        node_config: the node's own config, used only at a hospital.

    Raises:
        RefusedError: a hospital's node config has no 'state-dir', or it has an entry of an older
            version ('signing-key' or 'site-registry'). The error also means that the key file
            cannot be used.
        CheckpointError: the lock file in the hospital's folder cannot be written.
    """
    if simulated:
        return Signer(simulated_key(seed, site), lambda codes: _refuse_other_seed(seed, codes))
    for key in _FORMER:
        if key in node_config:
            raise RefusedError(
                f"the node config has '{key}', but a hospital makes its signing key itself now: "
                "remove the entry, and compare keys by 'fedsilo hospital keys'"
            )
    folder = own_folder_of(node_config, site)
    if folder is None:
        raise RefusedError(
            "the run sums in secret, but the node config has no 'state-dir' for the signing key: "
            "name one, or leave the site out"
        )
    private = signing_key(folder)
    known = KnownKeys(folder)
    return Signer(
        private, lambda codes: known.refuse_uncompared(site, key_code(public_text(private)), codes)
    )


def _refuse_other_seed(seed: int, codes: Mapping[str, str]) -> None:
    """Check that each simulated site signs with the key that is derived from the seed and its name.

    Args:
        seed: the run's seed.
        codes: the code (a short hash) of each site's public signing key, by site.

    Raises:
        RefusedError: a site signs with another key. The error names the first such site in
            ``codes`` and the code of its key.
    """
    for site, code in codes.items():
        if code != key_code(public_text(simulated_key(seed, site))):
            raise RefusedError(
                f"site {site} signs with key {code}, which is not from this run's seed: ask that "
                "hospital, not the server"
            )


def signing_key(folder: Path) -> EllipticCurvePrivateKey:
    """Return the hospital's private signing key in ``folder``; the first call makes and stores it.

    A lock file keeps two messages from each making a key.

    Raises:
        RefusedError: the key file cannot be read or written, or its key is not an elliptic-curve
            key.
        CheckpointError: the folder's lock file cannot be written.
    """
    path = folder / KEY
    # Without the lock two messages could each make a key
    with KnownKeys(folder).file.lock():
        try:
            if not os.path.lexists(path):
                write_atomically(path, _new_key(), mode=0o600)
            key = load_ssh_private_key(read_regular(path), None)
            fault = "it is not an elliptic-curve key"
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            key, fault = None, type(error).__name__
    if isinstance(key, EllipticCurvePrivateKey):
        return key
    raise RefusedError(
        f"the hospital's {KEY} cannot be used ({fault}): bring it back; if it is removed a new key "
        "is made, which the other hospitals must compare again"
    )


def _new_key() -> bytes:
    key = generate_private_key(SECP384R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


@dataclass
class KnownKey:
    """Another hospital's signing key, by codes; an unknown code is empty."""

    compared: str = ""  # the code that people at both hospitals have compared
    day: str = ""  # date when the keys were compared, ISO 8601
    received: str = ""  # the code of the site's latest signing key
    shown: str = ""  # the code that 'fedsilo hospital keys' has listed last for somebody to read


@dataclass(frozen=True)
class KnownKeys:
    """The list of other hospitals' signing keys, in the folder that a hospital has for all runs."""

    folder: Path

    @property
    def file(self) -> OwnFile[dict[str, KnownKey]]:
        """The JSON file that lists the signing keys of other hospitals, with its lock.

        The file need not exist.
        """
        return OwnFile(
            self.folder / KNOWN,
            dict[str, KnownKey],
            f"the hospital's list of keys {KNOWN}",
            "bring it back; if it is removed all keys must be compared again",
        )

    def read(self) -> dict[str, KnownKey]:
        """Read the list of other hospitals' signing keys: an entry for each site.

        An entry has three codes, which are short hashes of a public key: ``compared`` is the code
        that people compared, ``received`` the code that came last, and ``shown`` the code that a
        person at this hospital last saw. A code is "" if there is none. ``day`` is the day of the
        comparison. If the list does not exist, the result is empty.

        Raises:
            CheckpointError: the list is damaged.
        """
        return self.file.read({})

    def show(self) -> dict[str, KnownKey]:
        """Return the known signing keys by site, and record that a person now sees their codes.

        For each site, the code (a short hash) of the key that it sent last becomes the code that
        was shown. A person can later confirm a key without typing its code only if that code was
        shown.

        Raises:
            CheckpointError: the list is damaged, or cannot be written.
        """
        with self.file.lock():
            known = self.read()
            if any(key.shown != key.received for key in known.values()):
                for key in known.values():
                    key.shown = key.received
                self.file.write(known)
        return known

    def refuse_uncompared(self, own: str, own_code: str, codes: Mapping[str, str]) -> None:
        """Store the other sites' received key codes, and check that people have compared each code.

        A code is a short hash of a public signing key. The codes are stored before any refusal, so
        that people can look them up.

        Args:
            own: this site's name.
            own_code: the code of this site's own signing key.
            codes: the codes of all received signing keys by site, including this site's.

        Raises:
            RefusedError: ``codes`` has another code for this site than ``own_code``, a key has
                changed since it was compared, or a key was never compared. The error gives the
                first of these faults in this order, with all sites that have it.
            CheckpointError: the list is damaged, or cannot be written.
        """
        others = {site: code for site, code in codes.items() if site != own}
        # Stored before any refusal, so that people can look up the codes and compare them
        known = self._note(others)
        changed = []
        new = []
        for site, code in sorted(others.items()):
            compared = known[site].compared if site in known else ""
            if not compared:
                new.append(site)
            elif compared != code:
                changed.append(f"site {site} signs with key {code}, but {compared} was compared")
        fault = ""
        if codes.get(own, own_code) != own_code:
            fault = "the signing key under this site's name is not its own"
        elif changed:
            fault = (
                f"{'; '.join(changed)}: ask that hospital by telephone, not the server, and mark "
                "its key by 'fedsilo hospital keys', or leave it out"
            )
        elif new:
            fault = (
                f"the signing keys of {', '.join(new)} have not been compared: 'fedsilo hospital "
                "keys' shows their codes here; compare them by telephone, and mark them"
            )
        if fault:
            raise RefusedError(fault)

    def _note(self, codes: Mapping[str, str]) -> dict[str, KnownKey]:
        """Store the codes of the keys received from other sites, and return all known keys by site.

        ``codes`` maps each other site to the code (a short hash) of its key, which replaces the
        code received earlier. A new site is left out if its name is not a valid site name. It is
        also left out once the list has 200 sites, because a server could invent any number of
        sites.

        Raises:
            CheckpointError: the list is damaged, or cannot be written.
        """
        with self.file.lock():
            known = self.read()
            before = {site: key.received for site, key in known.items()}
            for site, code in sorted(codes.items()):
                has_room = len(known) < _MOST_RECEIVED and not site_name_fault(site)
                if site in known or has_room:
                    known.setdefault(site, KnownKey()).received = code
            if before != {site: key.received for site, key in known.items()}:
                self.file.write(known)
        return known

    def mark(self, site: str, code: str = "") -> str:
        """Record that a person compared another site's key today, and return the key's code.

        The code is a short hash of the public key. Without ``code``, the key received last counts
        as compared. That key must be the one that was last shown to a person here. Otherwise a
        server could replace the key after the person saw it, and have the replacement recorded.

        Args:
            site: the site that has the key.
            code: the code that the other hospital read out, in upper or lower case. A given code is
                stored whichever key was received. "" for the key received last.

        Raises:
            SettingError: the site's name or the code is malformed. Without ``code``, the error also
                means that no key was received, or that the received key has changed since it was
                shown.
            CheckpointError: the list is damaged, or cannot be written.
        """
        with self.file.lock():
            known = self.read()
            key = known.get(site, KnownKey())
            was_listed = key.shown == key.received
            named = code.strip().lower()
            code = named or key.received
            fault = site_name_fault(site)
            if not fault and not code:
                fault = (
                    f"no key of {site} was received yet: give the code that {site} reads out, as "
                    f"{site}=CODE"
                )
            elif not fault and not named and not was_listed:
                fault = (
                    f"the key of {site} has arrived or changed since the keys were listed here: "
                    f"list them again and compare, or give the code that {site} reads out, as "
                    f"{site}=CODE"
                )
            elif not fault and not is_key_code(code):
                fault = (
                    f"'{code}' is not a key's code: eight groups of four of 0-9 and a-f, with '-' "
                    "between them"
                )
            if fault:
                raise SettingError(fault)
            key.compared, key.day = code, datetime.now(UTC).date().isoformat()
            self.file.write({**known, site: key})
        return code

    def forget(self, site: str) -> None:
        """Remove a site from the list of known keys, so that its key must be compared again.

        Raises:
            SettingError: the list does not contain the site.
            CheckpointError: the list is damaged, or cannot be written.
        """
        with self.file.lock():
            known = self.read()
            if site not in known:
                raise SettingError(f"no key of '{site}' is known: {', '.join(sorted(known))} are")
            del known[site]
            self.file.write(known)


def own_code(folder: Path) -> str:
    """Return the code of the hospital's signing key in ``folder``; "" if there is no key.

    The code is a short hash of the public key, which people at two hospitals compare by telephone.
    A missing key is not made.

    Raises:
        RefusedError: the key file cannot be read, or its key is not an elliptic-curve key.
        CheckpointError: the folder's lock file cannot be written.
    """
    if not os.path.lexists(folder / KEY):
        return ""
    return key_code(public_text(signing_key(folder)))
