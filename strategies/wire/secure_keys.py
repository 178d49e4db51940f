"""Keys and shares of secure aggregation, by Flower's SecAgg+ arithmetic.

A site has two key pairs a round: by one it agrees on masks with each other site, by the other on
keys under which shares travel through the server, who cannot open them. What two sites agree on is
bound to a ``context``: run, round, names and keys of all. A site's secrets are cut into shares
(Shamir 1979) of which any ``threshold`` give them back.
"""

import base64
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidKey, UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.wire.signatures import digest, words

_NO_KEY = (ValueError, TypeError, AttributeError, InvalidKey, UnsupportedAlgorithm)
SECURE = "secure"  # the record's name, in messages and replies
# Arrays that are masked with the weights and as they are
COUNTS = "secure/counts"  # training samples that the site adds, and 1 if it could not answer
METRICS = "secure/metrics"  # measurements times the samples behind them
MEASURED = "secure/measured"  # the samples behind each measurement
OWN_ARRAYS = (COUNTS, METRICS, MEASURED)
SENT = (  # keys of replies
    *("round", "mask-key", "seal-key", "public", "terms", "splits", "samples", "signature"),
    *("to", "sealed", "check", "of", "shares"),
)
LONGEST_KEY = 1024  # bytes of a public key as text
LONGEST_SEALED = 4096  # bytes of two shares, sealed
LONGEST_SHARE = 1024  # bytes


@dataclass(frozen=True)
class KeyPair:
    """A key pair of elliptic curves, as bytes."""

    private: bytes
    public: bytes


@dataclass(frozen=True)
class Shares:
    """What a site gives another to keep: a share of its own mask's key, one of its private key."""

    own_mask: bytes
    mask_key: bytes


def new_key_pair() -> KeyPair:
    """Return a key pair that the operating system's randomness made."""
    private, public = generate_key_pairs()
    return KeyPair(private_key_to_bytes(private), public_key_to_bytes(public))


def public_half(private: bytes) -> bytes:
    """Return the public half of a key pair.

    Raises:
        SiteError: it is not a private key.
    """
    try:
        return public_key_to_bytes(bytes_to_private_key(private).public_key())
    except _NO_KEY:
        raise SiteError("a received key is not a key") from None


def mask_key(private: bytes, public: bytes, context: bytes) -> bytes:
    """Return the 32 bytes from which two sites draw the mask between them.

    Raises:
        SiteError: one is not a key.
    """
    return _derived(private, public, words("mask", context))


def seal_key(private: bytes, public: bytes, context: bytes) -> bytes:
    """Return the key, text of 32 bytes, under which one site's shares travel to another.

    Raises:
        SiteError: one is not a key.
    """
    return base64.urlsafe_b64encode(_derived(private, public, words("seal", context)))


def _derived(private: bytes, public: bytes, use: bytes) -> bytes:
    """Return what both holders of a private key derive for one use: HMAC-SHA256 under ECDH."""
    try:
        agreed = generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))
    except _NO_KEY:
        raise SiteError("a received key is not a key") from None
    return hmac.digest(agreed, use, "sha256")


def mask_check(own_mask: bytes) -> bytes:
    """Return by what a server knows a site's own mask key again once it is put together."""
    return digest("own mask", own_mask)


def refuse_no_key(public: bytes) -> None:
    """Refuse what is not a public key of the curve that all sites use.

    Raises:
        SiteError: it is none.
    """
    mask_key(new_key_pair().private, public, b"")


def sealed(shares: Shares, key: bytes, way: tuple[int, int]) -> bytes:
    """Return shares as only ``key`` opens them; ``way``: from which site to which, by place."""
    return encrypt(key, share_keys_plaintext_concat(*way, shares.own_mask, shares.mask_key))


def opened(token: bytes, key: bytes, way: tuple[int, int]) -> Shares:
    """Return what ``sealed`` closed.

    Raises:
        SiteError: it was closed by another key, or for another way.
    """
    try:
        source, target, own_mask, mask = share_keys_plaintext_separate(decrypt(key, token))
    except (InvalidToken, ValueError, TypeError):
        raise SiteError("received shares are sealed by another key: of another round?") from None
    if (source, target) != way:
        raise SiteError("received shares are of another site or for another one")
    return Shares(own_mask, mask)


def cut(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Return a share for each of ``sites``; any ``threshold`` of them give the secret back."""
    return create_shares(secret, threshold, sites)


def joined(shares: Sequence[bytes]) -> bytes:
    """Return the secret of which these are shares.

    Raises:
        SiteError: they are not of one secret, or too few.
    """
    lengths = {len(share) for share in shares}
    places = {share[:4] for share in shares}
    if len(lengths) != 1 or len(places) != len(shares) or min(lengths) % 16 != 4:
        raise SiteError("received shares are not of one secret")
    try:
        return combine_shares(list(shares))
    except ValueError:
        raise SiteError("received shares do not give a secret: of another round?") from None


def texts(record: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names of a record.

    Raises:
        SiteError: there is none.
    """
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise SiteError(f"record '{SECURE}' has no list of texts '{key}'")
    return list(values)


def tokens(record: Mapping[str, Any], key: str, longest: int) -> list[bytes]:
    """Return a list of bytes of a record, each of at most ``longest``.

    Raises:
        SiteError: there is none, or one is longer.
    """
    values = record.get(key)
    if not isinstance(values, list) or not all(
        isinstance(value, bytes) and 0 < len(value) <= longest for value in values
    ):
        raise SiteError(f"record '{SECURE}' has no list '{key}' of at most {longest} bytes each")
    return list(values)


def token(record: Mapping[str, Any], key: str, longest: int) -> bytes:
    """Return bytes of a record, at most ``longest`` of them.

    Raises:
        SiteError: there are none, or more.
    """
    return tokens({key: [record.get(key)]}, key, longest)[0]


def whole(record: Mapping[str, Any], key: str) -> int:
    """Return a whole number of a record.

    Raises:
        SiteError: there is none.
    """
    value = record.get(key)
    if type(value) is not int:
        raise SiteError(f"record '{SECURE}' has no whole number '{key}'")
    return value
