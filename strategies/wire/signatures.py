"""Signatures made with the hospitals' registered keys, and the texts that they sign.

The server knows a hospital by the fingerprint of its SuperNode's public key (OpenSSH form), as
``ssh-keygen -l`` prints it. Hospitals know each other by the code of the key that signs in secure
sums. Every signed or hashed text begins with its purpose, so a signature for one purpose is invalid
for any other.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

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

from fedsilo.core.errors import SiteError
from fedsilo.strategies.wire.records import NDArray

LONGEST_SIGNATURE = 256  # bytes
_KEY_CODE = re.compile(r"[0-9a-f]{4}(-[0-9a-f]{4}){7}")


def words(purpose: str, *parts: object) -> bytes:
    """Encode a purpose and values as unambiguous JSON, for signing or hashing.

    Bytes become hexadecimal strings. For one purpose, callers must therefore pass each value always
    as bytes or always as a string.

    Args:
        purpose: the name of the use, so that no text is valid for another use.
        parts: strings, numbers, lists and bytes.
    """
    # JSON quotes every part, so no two different lists give the same text
    return json.dumps(["fedsilo secure sum", purpose, *parts], default=bytes.hex).encode()


def digest(purpose: str, *parts: object) -> bytes:
    """Return the SHA-256 of ``words``, 32 bytes."""
    return hashlib.sha256(words(purpose, *parts)).digest()


def key_words(
    run: str, round_: int, site: str, keys: tuple[bytes, bytes], terms: bytes, splits: str
) -> bytes:
    """Build the bytes that a site signs to confirm its two public keys of a round.

    Other sites check the signature, so a server cannot replace the keys unnoticed.

    Args:
        run: the name of the run.
        round_: the round.
        site: the name of the site.
        keys: the site's public keys for masks and for sealing shares.
        terms: the digest of the settings that must be equal at all sites.
        splits: the data splits on which the site measures, joined by commas, such as "test,val".
    """
    return words("keys", run, round_, site, *keys, terms, splits)


def list_words(context: bytes, sites: Sequence[str], seals: Sequence[str] = ()) -> bytes:
    """Build the text that a site signs to confirm the list of sites in a secure sum.

    Args:
        context: the context of the round, from ``context_of``.
        sites: the sites whose masked arrays arrived, sorted.
        seals: for each of these sites, in order, the seal of its masked arrays, a hash from
            ``part_seal``. Empty if the method does not prove its sums.
    """
    if seals:
        return words("answered", context, list(sites), list(seals))
    return words("answered", context, list(sites))


def common_splits(listed: Iterable[str]) -> list[str]:
    """Return the data splits on which all sites measure, sorted.

    The list is empty if there are no sites, or if a site measures on no split. Names are not
    checked.

    Args:
        listed: for each site, its splits joined by commas, such as "test,val".
    """
    common: set[str] | None = None  # None before the first site
    for splits in listed:
        measured = set(splits.split(",")) - {""}
        if common is None:
            common = measured
        common &= measured
    return sorted(common or ())


def context_of(
    run: str, round_: int, keys: Mapping[str, tuple[bytes, bytes]], threshold: int
) -> bytes:
    """Return a 32-byte hash of the values that the sites of a round must agree on.

    Args:
        run: the name of the run.
        round_: the round.
        keys: site -> its two public keys, for masks and for sealing shares.
        threshold: the number of shares that restore a site's secret.
    """
    listed = [[site, *keys[site]] for site in sorted(keys)]
    return digest("round", run, round_, threshold, listed)


def arrays_digest(arrays: Mapping[str, NDArray]) -> bytes:
    """Return the SHA-256 of arrays with their names, types and shapes, as 32 bytes.

    The order of the mapping and the arrays' memory order do not matter.
    """
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(words("array", name, array.dtype.str, list(arrays[name].shape)))
        total.update(array.data)
    return total.digest()


def bound_to(context: bytes, received: Mapping[str, NDArray], masked: Iterable[str]) -> bytes:
    """Return a 32-byte hash of the values that two sites must share for their masks to cancel.

    The sites derive their masks with this hash. The masks cancel only if both sites received the
    same arrays and mask arrays and metrics of the same names. The order of arrays and names does
    not matter.

    Args:
        context: the context of the round, from ``context_of``.
        received: all arrays that the site received, named ``<record>/<array>``.
        masked: the names of the arrays and metrics that the site masks.
    """
    return digest("bound", context, arrays_digest(received), sorted(masked))


def public_text(private: EllipticCurvePrivateKey) -> bytes:
    """Return the public half of a key in OpenSSH's form."""
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a public key, ``SHA256:...``, as ``ssh-keygen -l`` prints it.

    Raises:
        SiteError: the bytes are not a public key in OpenSSH's form.
    """
    return f"SHA256:{base64.b64encode(_fingerprint_bytes(public)).decode().rstrip('=')}"


def _fingerprint_bytes(public: bytes) -> bytes:
    try:
        return ssh_key_fingerprint(load_ssh_public_key(public), SHA256())
    except (ValueError, UnsupportedAlgorithm):
        raise SiteError("a received public key is not in OpenSSH's form") from None


def key_code(public: bytes) -> str:
    """Return a code of a public key that people can read aloud: 128 bits of its SHA-256.

    These are the first bits, as eight groups of four hexadecimal digits, joined by hyphens. All
    letters are lower-case, because people cannot hear the case on the telephone.

    Raises:
        SiteError: the bytes are not a public key in OpenSSH's form.
    """
    digits = _fingerprint_bytes(public).hex()
    return "-".join(digits[at : at + 4] for at in range(0, 32, 4))


def is_key_code(text: str) -> bool:
    """Tell whether a string has the form that ``key_code`` returns."""
    return bool(_KEY_CODE.fullmatch(text))


def sign_text(private: EllipticCurvePrivateKey, text: bytes) -> bytes:
    """Sign ``text`` with ECDSA and SHA-256."""
    return private.sign(text, ECDSA(SHA256()))


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` is a valid signature of ``text`` by the owner of ``public``.

    Signatures are ECDSA with SHA-256. If ``public`` is not an elliptic-curve key in OpenSSH's form,
    the result is False.

    Args:
        public: the signer's public key in OpenSSH's form.
        text: the text that was signed.
        signature: the signature to check.
    """
    try:
        key = load_ssh_public_key(public)
        if not isinstance(key, EllipticCurvePublicKey):
            return False
        key.verify(signature, text, ECDSA(SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def simulated_key(seed: int, site: str) -> EllipticCurvePrivateKey:
    """Return the signing key of a simulated site, which anybody can derive from both arguments."""
    number = int.from_bytes(digest("simulated key", seed, site)) >> 1 | 1  # below the curve's order
    return derive_private_key(number, SECP256R1())
