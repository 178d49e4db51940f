"""The key by which a site signs in secure sums, and the registry that says whose keys others are.

A hospital signs by its SuperNode's key (node config ``signing-key``) and knows the others by a file
on its own disk (``site-registry``), which no server can change. A simulated site's key is made from
the seed: it shows the way of the messages and proves nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedsilo.models.contract.errors import RefusedError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.strategies.wire.signatures import fingerprint, is_signed, public_text, simulated_key

KEY, REGISTRY = "signing-key", "site-registry"  # of the node config


@dataclass(frozen=True)
class Signer:
    """A site's key and what it knows of the others'."""

    private: EllipticCurvePrivateKey  # the site's own
    # Returns the registered fingerprint of a site, None if it is not registered
    fingerprint_of: Callable[[str], str | None]

    def refuse_unsigned(self, site: str, public: bytes, keys: bytes, signature: bytes) -> None:
        """Refuse a round's keys of ``site`` that its registered key has not signed.

        Args:
            site: whose they are said to be.
            public: the key by which it signs, as it came.
            keys: what it must have signed.
            signature: of that.

        Raises:
            RefusedError: names the site and what to compare.
        """
        known, received = self.fingerprint_of(site), fingerprint(public)
        if known != received:
            raise RefusedError(
                f"site {site} signs by key {received}, and this site's '{REGISTRY}' has "
                f"{known or 'no line for it'}: ask that hospital, not the server, and correct the "
                "file or leave one of the two out"
            )
        if not is_signed(public, keys, signature):
            raise RefusedError(
                f"the signature of site {site} does not fit its keys in this run: they were "
                "altered, are of another round, or the run's settings are others there"
            )


def signer_of(simulated: bool, seed: int, site: str, node_config: Mapping[str, Value]) -> Signer:
    """Return the signer of a site.

    Raises:
        RefusedError: a hospital's node config names no key or registry, or one cannot be used.
    """
    if simulated:
        return Signer(
            simulated_key(seed, site),
            lambda other: fingerprint(public_text(simulated_key(seed, other))),
        )
    for key in (KEY, REGISTRY):
        if not node_config.get(key):
            raise RefusedError(
                f"the run sums in secret and the node config has no '{key}': without it a server "
                "could invent the other sites; name the file, or leave the site out"
            )
    return Signer(_key(str(node_config[KEY])), _registry(str(node_config[REGISTRY])).get)


def _key(path: str) -> EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(Path(path).read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _unusable(KEY, error) from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise _unusable(KEY, TypeError("no EC key"))
    return key


def _registry(path: str) -> dict[str, str]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return {str(site): str(entry["key"]) for site, entry in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(REGISTRY, error) from None


def _unusable(key: str, error: Exception) -> RefusedError:
    return RefusedError(
        f"the node config's '{key}' cannot be used ({type(error).__name__}): repair the file"
    )
