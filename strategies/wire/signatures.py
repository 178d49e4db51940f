"""Who says it: signatures by the keys with which hospitals are registered, and what is signed.

The server knows a hospital by the fingerprint of its SuperNode's public key (OpenSSH form), as
``ssh-keygen -l`` prints it. Hospitals know each other by the code of the key that signs in secure
sums. What is signed or hashed begins with its purpose: a signature for one purpose is none for
another.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    derive_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
    ssh_key_fingerprint,
)

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.wire.records import NDArray

LONGEST_SIGNATURE = 256  # bytes
_KEY_CODE = re.compile(r"[0-9a-f]{4}(-[0-9a-f]{4}){7}")


def words(purpose: str, *parts: object) -> bytes:
    """Return what is signed or hashed for ``purpose``: parts that cannot run into each other."""
    return json.dumps(["fedsilo secure sum", purpose, *parts], default=bytes.hex).encode()


def digest(purpose: str, *parts: object) -> bytes:
    """Return the SHA-256 of ``words``, 32 bytes."""
    return hashlib.sha256(words(purpose, *parts)).digest()


def key_words(
    run: str, round_: int, site: str, keys: tuple[bytes, bytes], terms: bytes, splits: str
) -> bytes:
    """Build the text that a site signs to vouch for its two public keys of a round."""
    return words("keys", run, round_, site, *keys, terms, splits)


def common_splits(said: Iterable[str]) -> list[str]:
    """Return the splits that all sites measure, of what each has said, sorted."""
    measured = [set(filter(None, splits.split(","))) for splits in said]
    return sorted(set.intersection(*measured)) if measured else []


def context_of(
    run: str, round_: int, keys: Mapping[str, tuple[bytes, bytes]], threshold: int
) -> bytes:
    """Digest all that the sites of a round must share, names and keys among it, to 32 bytes."""
    listed = [[site, *keys[site]] for site in sorted(keys)]
    return digest("round", run, round_, threshold, listed)


def arrays_digest(arrays: Mapping[str, NDArray]) -> bytes:
    """Return the SHA-256 of arrays with their names, types and shapes, 32 bytes."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(words("array", name, array.dtype.str, list(arrays[name].shape)))
        total.update(array.data)
    return total.digest()


def bound_to(context: bytes, received: Mapping[str, NDArray], masked: Iterable[str]) -> bytes:
    """Return to what the masks between sites are bound, 32 bytes.

    The masks of sites that are sent other arrays, or mask other ones, do not cancel.

    Args:
        context: of the round.
        received: all arrays that a site is sent, by record and name.
        masked: names of the arrays and metrics that it masks.
    """
    return digest("bound", context, arrays_digest(received), sorted(masked))


def public_text(private: EllipticCurvePrivateKey) -> bytes:
    """Return the public half of a key in OpenSSH's form."""
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a public key in OpenSSH's form, as ``ssh-keygen -l`` prints it.

    Raises:
        SiteError: it is no such key.
    """
    return f"SHA256:{base64.b64encode(_fingerprint_bytes(public)).decode().rstrip('=')}"


def _fingerprint_bytes(public: bytes) -> bytes:
    try:
        return ssh_key_fingerprint(load_ssh_public_key(public), SHA256())
    except (ValueError, UnsupportedAlgorithm):
        raise SiteError("a received public key is not one of OpenSSH's form") from None


def key_code(public: bytes) -> str:
    """Return the code of a public key, for people to read to one another: 128 bits of its SHA-256.

    It is eight groups of four hexadecimal digits. Capital letters, of which fingerprints have
    many, would not survive a telephone.

    Raises:
        SiteError: it is no key of OpenSSH's form.
    """
    digits = _fingerprint_bytes(public).hex()
    return "-".join(digits[at : at + 4] for at in range(0, 32, 4))


def is_key_code(text: str) -> bool:
    """Tell whether a text has the form of a key's code."""
    return bool(_KEY_CODE.fullmatch(text))


def signed(private: EllipticCurvePrivateKey, text: bytes) -> bytes:
    """Return the signature of ``text``, ECDSA with SHA-256."""
    return private.sign(text, ECDSA(SHA256()))


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` of ``text`` is by the holder of an OpenSSH public key."""
    try:
        key = load_ssh_public_key(public)
        if not isinstance(key, EllipticCurvePublicKey):
            return False
        key.verify(signature, text, ECDSA(SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def simulated_key(seed: int, site: str) -> EllipticCurvePrivateKey:
    """Return the key of a simulated site: anybody who knows the seed has it."""
    number = int.from_bytes(digest("simulated key", seed, site)) >> 1 | 1  # below the curve's order
    return derive_private_key(number, SECP256R1())
