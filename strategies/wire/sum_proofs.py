"""Proofs of secret sums: what a server shows the sites so that they can compute a sum themselves.

Each site seals its part: a hash of its masked arrays and of a commitment to its own mask. When the
sites sign the list of sites in a sum, they sign all seals with it. Once the sum is unmasked, the
server knows the masked arrays and the own masks of all sites. Sent to the sites, they prove the
sum, because they fit only the seals that all sites have signed. They reveal no more than the sum:
the masks that pairs of sites share stay in place, and cancel only in the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.core.errors import SiteError
from fedsilo.models.privacy.secure_sum import KEY, Words
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.secure_keys import mask_check, read_texts
from fedsilo.strategies.wire.signatures import arrays_digest, digest

# Keys of a proof in a message's record and in a checkpoint, each with a list of texts
_SITES, _PARTS, _OWN_MASKS = "proof-sites", "proof-parts", "proof-own-masks"
_NAMES, _LENGTHS = "proof-names", "proof-lengths"


def part_seal(masked: Mapping[str, NDArray], own_mask_check: bytes) -> str:
    """Return the seal of a site's masked arrays in a secure sum: a hash as 64 hexadecimal digits.

    All sites sign all seals before the sum is unmasked. A later change of masked arrays is
    therefore noticed.

    Args:
        masked: the site's masked arrays by name, uint32, of any shape.
        own_mask_check: the hash, from ``mask_check``, of the seed of the mask that only this site
            adds.
    """
    flat = {name: array.reshape(-1) for name, array in masked.items()}
    return digest("part", arrays_digest(flat), own_mask_check).hex()


@dataclass(frozen=True)
class SumProof:
    """The proof of a secret sum: all sites' masked parts and own masks, sent to all sites.

    From these each site can compute the sum itself. An own mask is one that a site adds alone,
    while each other mask belongs to a pair of sites and cancels in the sum.

    Attributes:
        parts: site -> its masked arrays by name, (n,) uint32 each; the names and lengths are the
            same at all sites.
        own_masks: site -> the 32 bytes that its own mask comes from.
    """

    parts: Mapping[str, Mapping[str, Words]]
    own_masks: Mapping[str, bytes]

    def seals(self) -> dict[str, str]:
        """Return the seal of each site's part, by site."""
        seals = {}
        for site, arrays in self.parts.items():
            seals[site] = part_seal(arrays, mask_check(self.own_masks[site]))
        return seals

    def to_values(self) -> dict[str, list[str]]:
        """Convert the proof to lists of strings by key, for a message's record or a checkpoint.

        - 'proof-sites': the sites, sorted. There must be at least one.
        - 'proof-names': the names of the arrays, sorted.
        - 'proof-lengths': the length of each array.
        - 'proof-parts': for each site its masked arrays, joined by name, as hexadecimal digits of
          little-endian uint32.
        - 'proof-own-masks': for each site the seed of its own mask, as hexadecimal digits.
        """
        sites = sorted(self.parts)
        names = sorted(self.parts[sites[0]])
        parts = []
        for site in sites:
            arrays = [self.parts[site][name].astype("<u4").reshape(-1) for name in names]
            parts.append(np.concatenate(arrays).tobytes().hex())
        return {
            _SITES: sites,
            _NAMES: names,
            _LENGTHS: [str(self.parts[sites[0]][name].size) for name in names],
            _PARTS: parts,
            _OWN_MASKS: [self.own_masks[site].hex() for site in sites],
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "SumProof":
        """Read a proof from the lists that ``to_values`` made, without checking what it proves.

        Raises:
            SiteError: a list of the proof is missing, or the lists are malformed.
        """
        sites, names = read_texts(values, _SITES), read_texts(values, _NAMES)
        texts, own_masks = read_texts(values, _PARTS), read_texts(values, _OWN_MASKS)
        parts: dict[str, dict[str, Words]] = {}
        try:
            places = np.cumsum([int(length) for length in read_texts(values, _LENGTHS)])
            for site, text in zip(sites, texts, strict=True):
                words = np.frombuffer(bytes.fromhex(text), "<u4").astype(np.uint32)
                arrays = np.split(words, places)
                if arrays.pop().size:
                    raise ValueError("more numbers than the lengths say")
                parts[site] = dict(zip(names, arrays, strict=True))
            masks = dict(zip(sites, map(bytes.fromhex, own_masks), strict=True))
        except ValueError:
            raise SiteError("the proof of the sum of the round before is malformed") from None
        if any(len(mask) != KEY for mask in masks.values()):
            raise SiteError("the proof of the sum of the round before has a mask of a wrong length")
        return cls(parts, masks)
