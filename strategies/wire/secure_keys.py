"""Keys and shares of secure aggregation, with Flower's SecAgg+ arithmetic.

A site has two key pairs per round. With the first it agrees on a mask with each other site. With
the second it agrees on keys that seal its shares, so that the server can pass them on but not open
them. Every key that two sites agree on is bound to a ``context``: the run, the round, and the names
and keys of all sites. A site splits its secrets into shares (Shamir 1979); any ``threshold`` of
them restore the secret.
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

from fedsilo.core.errors import SiteError
from fedsilo.strategies.wire.signatures import digest, words

_NO_KEY = (ValueError, TypeError, AttributeError, InvalidKey, UnsupportedAlgorithm)
SECURE = "secure"  # the name of the record in messages and replies
# Arrays that travel masked together with the weights
COUNTS = "secure/counts"  # the site's training samples, and 1 if it could not answer
METRICS = "secure/metrics"  # metrics times the samples behind them
MEASURED = "secure/measured"  # the samples behind each metric
OWN_ARRAYS = (COUNTS, METRICS, MEASURED)
SENT = (
    *("round", "mask-key", "seal-key", "public", "terms", "splits", "samples", "signature"),
    *("to", "sealed", "check", "of", "shares"),
)
LONGEST_KEY = 1024  # bytes of a public key in text form
LONGEST_SEALED = 4096  # bytes of two sealed shares
LONGEST_SHARE = 1024  # bytes


@dataclass(frozen=True)
class KeyPair:
    """An elliptic-curve key pair, as bytes."""

    private: bytes
    public: bytes


@dataclass(frozen=True)
class Shares:
    """One share of each of a site's two secrets, for one other site.

    The secrets are the seed of the site's own mask (``own_mask``), and the private key of the masks
    that it shares with other sites (``mask_key``).
    """

    own_mask: bytes
    mask_key: bytes


def new_key_pair() -> KeyPair:
    """Generate a key pair from the operating system's randomness."""
    private, public = generate_key_pairs()
    return KeyPair(private_key_to_bytes(private), public_key_to_bytes(public))


def public_half(private: bytes) -> bytes:
    """Return the public key that belongs to a private key.

    Both are elliptic-curve keys in PEM.

    Raises:
        SiteError: the bytes are not a private key.
    """
    try:
        return public_key_to_bytes(bytes_to_private_key(private).public_key())
    except _NO_KEY:
        raise SiteError("a received key is not a key") from None


def mask_key(private: bytes, public: bytes, context: bytes) -> bytes:
    """Derive the 32 bytes from which two sites generate one mask, which cancels in their sum.

    One of the sites adds the mask to its arrays, and the other subtracts it. Each site uses its own
    private key and the other site's public key, and both sites get the same bytes. ``context``,
    from ``bound_to``, binds them to the round and the arrays received.

    Raises:
        SiteError: ``private`` or ``public`` is not an elliptic-curve key.
    """
    return _derive(private, public, words("mask", context))


def seal_key(private: bytes, public: bytes, context: bytes) -> bytes:
    """Derive the key with which two sites encrypt shares of their secrets for each other.

    Each site uses its own private key and the other site's public key, and both get the same key.
    ``context`` binds the key to the round.

    Returns:
        The 32 bytes of the key as base64 text.

    Raises:
        SiteError: ``private`` or ``public`` is not an elliptic-curve key.
    """
    return base64.urlsafe_b64encode(_derive(private, public, words("seal", context)))


def _derive(private: bytes, public: bytes, use: bytes) -> bytes:
    """Derive a 32-byte key for one purpose from the ECDH secret of two sites.

    The key is the HMAC-SHA256 of ``use`` under this secret, so different purposes give unrelated
    keys.

    Args:
        private: this site's private key.
        public: the other site's public key.
        use: the purpose and its context, encoded as bytes.

    Raises:
        SiteError: ``private`` or ``public`` is not a key.
    """
    try:
        agreed = generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))
    except _NO_KEY:
        raise SiteError("a received key is not a key") from None
    return hmac.digest(agreed, use, "sha256")


def mask_check(own_mask: bytes) -> bytes:
    """Return a hash of a mask seed, which lets the server verify a reconstructed seed."""
    return digest("own mask", own_mask)


def refuse_invalid_key(public: bytes) -> None:
    """Check that the bytes are a public key on the curve of Flower's key pairs.

    Raises:
        SiteError: the bytes are not a public key on that curve.
    """
    mask_key(new_key_pair().private, public, b"")


def seal_shares(shares: Shares, key: bytes, positions: tuple[int, int]) -> bytes:
    """Encrypt the shares of a site's secrets for another site.

    The positions are encrypted too, for the receiver to check.

    Args:
        shares: the shares of the sending site's secrets.
        key: the key from ``seal_key``.
        positions: the positions of the sending and the receiving site among the sorted sites.
    """
    return encrypt(key, share_keys_plaintext_concat(*positions, shares.own_mask, shares.mask_key))


def open_shares(token: bytes, key: bytes, positions: tuple[int, int]) -> Shares:
    """Decrypt the shares of a site's secrets that ``seal_shares`` encrypted.

    Args:
        token: the encrypted shares.
        key: the key from ``seal_key``.
        positions: the expected positions of the sending and the receiving site.

    Raises:
        SiteError: the shares are damaged, or were encrypted with another key or for another pair of
            sites.
    """
    try:
        source, target, own_mask, mask = share_keys_plaintext_separate(decrypt(key, token))
    except (InvalidToken, ValueError, TypeError):
        raise SiteError(
            "received shares are sealed with another key: are they from another round?"
        ) from None
    if (source, target) != positions:
        raise SiteError("received shares are from another site or for another site")
    return Shares(own_mask, mask)


def cut_secret(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Split a secret into Shamir shares, one for each of ``sites`` sites, in the sites' order.

    Any ``threshold`` of the shares restore the secret, and fewer reveal nothing about it.
    """
    return create_shares(secret, threshold, sites)


def join_shares(shares: Sequence[bytes]) -> bytes:
    """Combine Shamir shares into the secret.

    A share has 4 bytes with its number, and then blocks of 16 bytes. Too few shares, or shares of
    different secrets, can give wrong bytes without an error. The caller must verify the result.

    Raises:
        SiteError: there are no shares, their lengths differ or are not 4 more than a multiple of
            16, two shares have the same number, or the shares cannot be combined.
    """
    # A share begins with its place, 4 bytes, and the secret comes in blocks of 16
    lengths = {len(share) for share in shares}
    places = {share[:4] for share in shares}
    # A share is its place, 4 bytes, and blocks of 16 bytes; Flower's function does not check this
    if len(lengths) != 1 or len(places) != len(shares) or min(lengths) % 16 != 4:
        raise SiteError("received shares do not belong to one secret")
    try:
        return combine_shares(list(shares))
    except ValueError:
        raise SiteError(
            "received shares do not restore a secret: are they from another round?"
        ) from None


def read_texts(record: Mapping[str, Any], key: str) -> list[str]:
    """Read a list of strings, which may be empty, from a message's record for secure aggregation.

    Raises:
        SiteError: the value under ``key`` is missing, or is not a list of strings.
    """
    values = record.get(key)
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return list(values)
    raise SiteError(f"record '{SECURE}' has no list of texts '{key}'")


def read_tokens(record: Mapping[str, Any], key: str, longest: int) -> list[bytes]:
    """Read a list of bytes objects, which may be empty, from a record for secure aggregation.

    Raises:
        SiteError: the value under ``key`` is missing or is not a list, or an entry is not bytes, is
            empty, or is longer than ``longest`` bytes.
    """
    values = record.get(key)
    if not isinstance(values, list):
        values = [None]  # fails below
    for value in values:
        if not isinstance(value, bytes) or not 0 < len(value) <= longest:
            raise SiteError(
                f"record '{SECURE}' has no list '{key}' of at most {longest} bytes each"
            )
    return list(values)


def read_token(record: Mapping[str, Any], key: str, longest: int) -> bytes:
    """Read one bytes object from a message's record for secure aggregation.

    Raises:
        SiteError: the value under ``key`` is missing, is not bytes, is empty, or is longer than
            ``longest`` bytes.
    """
    return read_tokens({key: [record.get(key)]}, key, longest)[0]


def read_whole(record: Mapping[str, Any], key: str) -> int:
    """Read a whole number, which may be negative, from a message's record for secure aggregation.

    A bool or a float does not count as a whole number.

    Raises:
        SiteError: the value under ``key`` is missing, or is not a whole number.
    """
    value = record.get(key)
    if type(value) is not int:
        raise SiteError(f"record '{SECURE}' has no whole number '{key}'")
    return value
