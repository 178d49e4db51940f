"""A site's check of a proven sum, for methods in which every question follows from earlier sums.

In each round the sites sign the seals of all masked parts (``strategies.wire.sum_proofs``). A site
keeps them with its record of unmasked sums. In the next round the server sends the parts and the
own masks. If they fit the seals, the site adds them up and has the sum itself, whatever the server
says of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedsilo.core.errors import RefusedError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import Floats, Words, mask_arrays, quantisation
from fedsilo.strategies.wire.secure_keys import COUNTS, OWN_ARRAYS
from fedsilo.strategies.wire.sum_proofs import SumProof


@dataclass(frozen=True)
class ProvenSum:
    """A secret sum that this site has added up itself.

    Attributes:
        sites: the sites in the sum, sorted.
        samples: the samples of all these sites together, each with at most 'secure-samples'.
        failed: the number of these sites that could not answer and added 0.
        totals: the sum over sites of each array by name, (n,) float64, weighted by samples.
    """

    sites: list[str]
    samples: int
    failed: int
    totals: Mapping[str, Floats]


def prove_sum(
    record: Mapping[str, Any], seals: Mapping[str, str], common: CommonSettings, samples: int
) -> ProvenSum:
    """Check the server's proof of a secret sum, and compute the sum from the proof.

    The proof has each site's masked part and mask seed. Their hash must equal the site's seal,
    which all sites signed. ``samples`` scales the sites' weights.

    Raises:
        SiteError: the proof is missing or malformed.
        RefusedError: no seals are stored, or the proof differs.
    """
    if not seals:
        raise RefusedError(
            "this site has no signed sum of the round before, so it cannot compute this round's "
            "question: begin a run with another 'run.name'"
        )
    proof = SumProof.from_values(record)
    proven = proof.seals()
    wrong = sorted(site for site in {*seals, *proven} if seals.get(site) != proven.get(site))
    if wrong:
        raise RefusedError(
            f"the proof of the sum of the round before does not fit the parts that the sites have "
            f"signed (of {', '.join(wrong)}), so this site cannot compute this round's question"
        )
    return _add_up(proof, common, samples)


def _add_up(proof: SumProof, common: CommonSettings, samples: int) -> ProvenSum:
    """Add up the masked parts of all sites in a proof, and remove the masks from the sum.

    ``samples`` is the number that scales each site's weight. If the sum counts no training sample,
    ``totals`` is empty.
    """
    sums: dict[str, Words] = {}
    for arrays in proof.parts.values():
        for name, words in arrays.items():
            # uint32 wraps around, so this is the sum modulo 2^32
            sums[name] = sums.get(name, 0) + words
    sums = mask_arrays(sums, [], proof.own_masks.values())
    counted, failed = map(int, sums[COUNTS])
    sites = sorted(proof.parts)
    # The arithmetic of the server (``SecureSum.mean``), so that both get the same bits
    quantiser = quantisation(common, len(sites), samples)
    totals: dict[str, Floats] = {}
    if not counted:  # all sites have failed
        return ProvenSum(sites, 0, failed, totals)
    for name in sums.keys() - set(OWN_ARRAYS):
        mean = quantiser.total(sums[name], len(sites)) * (samples / counted)
        totals[name] = counted * mean
    return ProvenSum(sites, counted, failed, totals)


def refuse_missing(sites: Iterable[str], expected: Iterable[str]) -> None:
    """Check that no site with keys is missing, because a proven sum needs every part.

    Args:
        sites: the sites that take part.
        expected: the sites that must take part.

    Raises:
        RefusedError: a site is missing. The error names the missing sites.
    """
    missing = sorted(set(expected) - set(sites))
    if missing:
        raise RefusedError(
            f"{', '.join(missing)} is missing, but in this method each site checks the sum over "
            "all sites: begin the round again"
        )


def refuse_other_seal(seals: Mapping[str, str], site: str, own: str) -> None:
    """Check that the server's list has the seal of the masked part that this site has sent.

    A seal is a hash of a site's masked part. ``seals`` maps each site to its seal, and ``own`` is
    this site's.

    Raises:
        RefusedError: the list has no seal for this site, or a different one.
    """
    if seals.get(site) != own:
        raise RefusedError(
            "the server's list has another part under this site's name than this site has sent"
        )
