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

    The proof has each site's masked part, and the seed of the site's own mask, which no other site
    shares. A seal is the hash of a part and this seed. All sites signed all seals when the sum was
    made. The proof is right if it has exactly the sites of the stored seals, and each part with its
    seed fits the stored seal.

    Args:
        record: the message's record of secure aggregation, with the proof.
        seals: the seal of each site's part, by site, as this site has stored them.
        common: the run's settings.
        samples: 'secure-samples', the number of samples that scales each site's weight in the sum.

    Raises:
        SiteError: the record has no proof, or a malformed one.
        RefusedError: this site has stored no seals, or the parts do not fit the seals.
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

    The masks that pairs of sites share cancel, because no site is missing. Each site's own mask,
    which no other site shares, is subtracted: the proof has its seed. The arithmetic is that of the
    server (``SecureSum.mean``), so that site and server get the same bits. If the sum counts no
    training sample, for example because all sites have failed, ``totals`` is empty.

    Args:
        proof: the proof, which is already checked.
        common: the run's settings.
        samples: 'secure-samples', the number of samples that scales each site's weight in the sum.
    """
    sums: dict[str, Words] = {}
    for arrays in proof.parts.values():
        for name, words in arrays.items():
            # uint32 wraps around, so this is the sum modulo 2^32
            sums[name] = sums.get(name, 0) + words
    sums = mask_arrays(sums, [], proof.own_masks.values())
    counted, failed = map(int, sums[COUNTS])
    sites = sorted(proof.parts)
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

    A seal is a hash of a site's masked part. The sites sign the list before the sum is unmasked.

    Args:
        seals: the server's list, as the seal of each site's part by site.
        site: this site.
        own: the seal of the part that this site has sent.

    Raises:
        RefusedError: the list has no seal for this site, or a different seal.
    """
    if seals.get(site) != own:
        raise RefusedError(
            "the server's list has another part under this site's name than this site has sent"
        )
