"""A site's side of secure aggregation: its weights leave masked, and only sums can be unmasked.

The protocol is figure 4 of Bonawitz et al. 2017, with every site a neighbour of every other. A site
signs new keys (``secure-keys``). It checks the others' keys and gives each other site a sealed
share of its secrets (``secure-shares``). It trains and masks (``train``), and signs the list of
sites whose weights arrived (``secure-agree``). Once at least the threshold of sites have signed the
same list, it returns one share for each site (``secure-unmask``): for a site whose weights arrived,
the share of that site's own mask; for a site that dropped out, the share of its masking key. It
never returns both, and never masks twice with one key.

The masks are bound to run, round, the names and keys of all sites, and the received model. So if a
server sends two sites different models or lists, their masks do not cancel. The secrets of a round
are erased once its sum is unmasked; ``fedsilo.client_app.privacy.unmasked_sums`` stores its sites.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from torch import Tensor

from fedsilo.client_app.privacy.proven_sums import (
    ProvenSum,
    prove_sum,
    refuse_missing,
    refuse_other_seal,
)
from fedsilo.client_app.privacy.round_secrets import (
    RoundSecrets,
    drop_secrets,
    lock_secrets,
    read_secrets,
    refuse_list,
)
from fedsilo.client_app.privacy.signing import SignedKeys, Signer
from fedsilo.client_app.privacy.summand import Summand
from fedsilo.client_app.privacy.unmasked_sums import (
    RoundSum,
    SummedBefore,
    UnmaskedSums,
    failed_before,
)
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.messages import SECURE_AGREE, SECURE_KEYS, SECURE_SHARES
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import (
    KEY,
    SAMPLES,
    Words,
    mask_arrays,
    needed_sites,
    quantisation,
    tolerated_colluders,
)
from fedsilo.models.privacy.summed_metrics import split_of
from fedsilo.strategies.wire.secure_keys import (
    LONGEST_KEY,
    LONGEST_SEALED,
    mask_check,
    new_key_pair,
    read_texts,
    read_tokens,
    read_whole,
)
from fedsilo.strategies.wire.signatures import (
    LONGEST_SIGNATURE,
    arrays_digest,
    bound_to,
    common_splits,
    context_of,
    digest,
    is_signed,
    key_words,
    public_text,
    sign_text,
)
from fedsilo.strategies.wire.sum_proofs import part_seal


@dataclass(frozen=True)
class SecureSite:
    """One site in one round of secure aggregation."""

    site: str  # the site's name
    run: str  # the run's name
    round: int
    common: CommonSettings  # the run's settings
    folder: Path  # the folder of the site's secrets
    asked: Mapping[str, Any]  # the server's record
    signer: Signer  # the site's signing key, and its rule for accepting others' keys
    summand: Summand  # the numbers that the site adds
    terms: bytes = b""  # the digest of the run's settings, which all sites must share
    # The site's part stays hidden from a server that works with this many other sites
    colluding: int = 0
    measures: Sequence[str] = ()  # the splits whose metrics may be summed
    samples: int = SAMPLES  # B, which scales parts; the same in the site files of all hospitals
    book: SummedBefore | None = None  # the sums of all runs; None in a simulation
    # The message's instruction, at a hospital that declares its data; None elsewhere. Once a sum is
    # unmasked, no other question about it is answered
    instruction: Mapping[str, Any] | None = None
    # Whether the method proves its sums, so that no site may be missing in any phase
    proves: bool = False

    def answer(self, phase: str) -> ConfigRecord:
        """Answer a phase of secure aggregation that trains nothing.

        - "secure-keys" makes this site's keys.
        - "secure-shares" makes shares of this site's secrets for the other sites.
        - "secure-agree" signs the list of sites in the sum.
        - Any other phase returns the shares with which the server unmasks the sum.

        Raises:
            SiteError: the message is malformed, or the site has no keys for this round.
            RefusedError: the answer would reveal more than a sum.
            SettingError: no threshold is possible for the number of sites.
            CheckpointError: the site's secrets or records are damaged, or cannot be written.
        """
        with lock_secrets(self.folder):
            if phase == SECURE_KEYS:
                return self._make_keys()
            if phase == SECURE_SHARES:
                return self._share_secrets()
            if phase == SECURE_AGREE:
                return self._sign_list()
            return self._unmask()

    def mask(
        self,
        updates: Mapping[str, Tensor],
        received: Mapping[str, Any],
        scaled_metrics: Mapping[str, float | None],
    ) -> dict[str, Words]:
        """Quantise, weight and mask this site's updates and metrics, as uint32 arrays by name.

        The weight follows from the site's number of samples. A site that failed masks zeros. The
        checks of ``prepare_masking`` are made again. Before anything leaves, a digest of the
        numbers is stored, so that the same keys cannot mask other numbers after a restart.

        Args:
            updates: the trained minus the received arrays, clipped, by name.
            received: all received NumPy arrays, named ``<record>/<array>``.
            scaled_metrics: the metrics, each scaled to 0 to 1, by name; None for a metric without a
                value.

        Raises:
            SiteError: the site has no keys for this round, the list of sites is malformed, or the
                site has masked 0 for the same received arrays before.
            RefusedError: ``prepare_masking`` refuses. This round's sum was already unmasked with
                other numbers of this site. The site has answered for the same received arrays
                before, but fails now.
            SettingError: the samples of all sites together do not fit into 32 bits.
            CheckpointError: the site's secrets or records are damaged, or cannot be written.
        """
        with lock_secrets(self.folder):
            # Checked again under the lock, because another message may have used the keys since
            secrets, partners = self.prepare_masking(received, list(scaled_metrics))
            quantiser = quantisation(self.common, len(secrets.keys), self.samples)
            numbers = self.summand.numbers(quantiser, updates, scaled_metrics)
            secrets.partners, secrets.weighed = partners, arrays_digest(numbers).hex()
            secrets.received = arrays_digest(received).hex()
            secrets.question = self._request_digest(received, secrets)
            secrets.failed = self.summand.failed
            self._sums().refuse_other(secrets.weighed)
            if self.book:
                self.book.note_part(secrets.received, secrets.failed)
            # Written before anything leaves, so that a restart cannot mask twice with one key
            secrets.write(self.folder)
            # Sites that received different models derive different masks, which do not cancel
            bound = bound_to(secrets.context, received, [*numbers, *scaled_metrics])
            masked = mask_arrays(numbers, *secrets.masks(self.site, bound))
            if self.proves:
                secrets.seal = part_seal(masked, mask_check(secrets.own_mask))
                secrets.write(self.folder)
        return masked

    def prepare_masking(
        self, received: Mapping[str, Any], metrics: Sequence[str]
    ) -> tuple[RoundSecrets, list[str]]:
        """Check that this site may mask its numbers; return its secrets and the sites in the sum.

        This is also called before the training. Nothing here depends on the site's data, so a
        hospital that declares its data can refuse before they are opened.

        Args:
            received: all received NumPy arrays, named ``<record>/<array>``.
            metrics: the names of the metrics that the server asks to sum.

        Returns:
            The round's secrets, and the names of the sites to mask with, including this site.

        Raises:
            SiteError: the site has no keys for this round, or the list of sites is malformed.
            RefusedError: the settings changed after the keys were signed, or the keys were used
                before. Too few sites take part, or a site is missing from a sum that must be
                proven. An earlier sum of this round or of the same arrays had other settings,
                another request, or a site that is missing now. A metric belongs to a split that not
                all sites measure.
            CheckpointError: the site's secrets or its records of sums are damaged.
        """
        secrets = read_secrets(self.folder, self.round)
        # A site with its own 'secure-samples' would get a larger weight
        if secrets.terms != self.terms:
            raise RefusedError(
                "the run's settings changed after the keys of this round were signed, but sums "
                "of sites with different settings reveal single sites' weights: begin the "
                "round again"
            )
        if secrets.partners:
            raise RefusedError(
                "weights masked with the keys of this round have already left, but two releases "
                "under the same masks reveal their difference: begin the round again"
            )
        partners = read_texts(self.asked, "sites")
        secrets.refuse_few(self.site, partners, "share their keys")
        if self.proves:
            refuse_missing(partners, secrets.keys)
        self._sums().refuse_missing_sites(partners)
        self._sums().refuse_other_question(self._request_digest(received, secrets))
        if self.book:
            self.book.refuse_changed_sum(arrays_digest(received).hex(), partners)
        for name in metrics:
            if split_of(name) not in ("", *secrets.splits):
                raise RefusedError(
                    f"'{name[:80]}' belongs to a split that not all sites measure: its sum would "
                    "cover few sites"
                )
        return secrets, partners

    def refuse_after_failure(self, received: Mapping[str, Any]) -> None:
        """Check that this site did not fail in an earlier answer to the same received arrays.

        A site that fails adds 0. A second answer would reveal the site's own part, as the
        difference between two sums. Without a record of earlier sums, as in a simulation, nothing
        is checked.

        Raises:
            SiteError: the site failed on these arrays before.
            CheckpointError: the record of the sums is damaged.
        """
        if self.book and self.book.has_failed(arrays_digest(received).hex()):
            raise failed_before()

    def proven_sum(self) -> ProvenSum:
        """Check the proof of the last round's sum in the message, and return this sum.

        Raises:
            SiteError: the message has no proof, or a malformed one.
            RefusedError: the proof has other parts than those that all sites signed in the last
                round, or this site has stored no signed sum of that round.
            CheckpointError: the record of the sums is damaged.
        """
        seals = UnmaskedSums(self.folder, self.round - 1).seals()
        return prove_sum(self.asked, seals, self.common, self.samples)

    def _request_digest(self, received: Mapping[str, Any], secrets: RoundSecrets) -> str:
        """Return a digest of everything in a request that decides which numbers this site masks.

        Once a round's sum is unmasked, the site refuses requests of this round with another digest
        (``UnmaskedSums.refuse_other_question``). The digest covers:

        - the instruction without the run's folder,
        - the names of the arrays and metrics to sum,
        - the received arrays,
        - the number of sites that have keys, on which the quantisation depends.

        It is an empty string, except at a hospital that declares its data.
        """
        if self.instruction is None:
            return ""
        asked = [sorted(read_texts(self.asked, kind)) for kind in ("metrics", "arrays")]
        said = [(key, self.instruction[key]) for key in sorted(self.instruction)]
        # A server's folder changes nothing at a site
        said = [(key, value) for key, value in said if key != "run-dir"]
        arrays = arrays_digest(received).hex()
        return digest("question", said, asked, arrays, len(secrets.keys)).hex()

    def _make_keys(self) -> ConfigRecord:
        """Make and store this site's keys of the round, and return the public keys, signed.

        There are two key pairs: one for masks, and one to encrypt shares. The record also has the
        public signing key, the digest of the settings, the splits that this site measures, and
        'secure-samples'. The new keys replace those of an earlier attempt at this round.

        Raises:
            CheckpointError: the keys cannot be written.
        """
        masking, sealing = new_key_pair(), new_key_pair()
        public = masking.public, sealing.public
        private, own_mask = (masking.private, sealing.private), os.urandom(KEY)
        RoundSecrets(self.round, *private, public, own_mask, self.terms).write(self.folder)
        splits = ",".join(self.measures)
        said = self._key_words(self.site, public, splits)
        return self._record(
            {
                "mask-key": masking.public,
                "seal-key": sealing.public,
                "public": public_text(self.signer.private),
                "terms": self.terms,
                "splits": splits,
                "samples": self.samples,
                "signature": sign_text(self.signer.private, said),
            }
        )

    def _key_words(self, site: str, keys: tuple[bytes, bytes], splits: str) -> bytes:
        return key_words(self.run, self.round, site, keys, self.terms, splits)

    def _share_secrets(self) -> ConfigRecord:
        """Check all sites' keys, and return this site's secrets as shares for the other sites.

        Enough shares reconstruct a secret. A share is encrypted, and only the site that it is for
        can open it. The record also has a hash of the seed of this site's own mask. With it the
        server can later verify the seed that it reconstructs.

        Raises:
            SiteError: the server's lists of keys are malformed, or the site has no keys for this
                round.
            RefusedError: the sites' keys of this round were stored before, a key or signature is
                not accepted (``_store_keys``), or the threshold is refused (``_refuse_threshold``).
            SettingError: no threshold is possible for the number of sites.
            CheckpointError: the site's secrets or its list of keys are damaged, or cannot be
                written.
        """
        secrets = read_secrets(self.folder, self.round)
        # A second list of keys would bind the same secrets to other sites
        if secrets.keys:
            raise RefusedError("keys of this round are already shared: begin the round again")
        self._store_keys(secrets)
        secrets.threshold = threshold = read_whole(self.asked, "threshold")
        self._refuse_threshold(threshold, len(secrets.keys))
        secrets.context = context_of(self.run, self.round, secrets.keys, threshold)
        sealed_shares = secrets.seal_shares(self.site)
        secrets.write(self.folder)
        return self._record(
            {
                "to": list(sealed_shares),
                "sealed": list(sealed_shares.values()),
                "check": mask_check(secrets.own_mask),
            }
        )

    def _store_keys(self, secrets: RoundSecrets) -> None:
        """Check all sites' public keys and their signatures, and put the keys into ``secrets``.

        The keys come from the server's record. A hospital trusts a signing key if people at both
        hospitals have compared its code, a short hash. ``secrets.splits`` gets the data splits,
        such as "val", on which every site measures.

        Raises:
            SiteError: the server's lists differ in length, the sites are not sorted or lack this
                site, or a signing key is malformed.
            RefusedError: two sites have the same key, the server lists other keys under this site's
                name, a signature does not match, or this site does not trust a signing key.
            CheckpointError: the hospital's list of signing keys, which stores each received code,
                is damaged or cannot be written.
        """
        sites, splits = read_texts(self.asked, "sites"), read_texts(self.asked, "splits")
        refuse_list(self.site, sites, sites, "make keys")
        masks = read_tokens(self.asked, "mask-keys", LONGEST_KEY)
        seals = read_tokens(self.asked, "seal-keys", LONGEST_KEY)
        publics = read_tokens(self.asked, "publics", LONGEST_KEY)
        signatures = read_tokens(self.asked, "signatures", LONGEST_KEY)
        lengths = {len(one) for one in (splits, masks, seals, publics, signatures)}
        if lengths != {len(sites)}:
            raise SiteError("record 'secure' must have one key of each kind for each site")
        # A repeated key would let the server play two sites and count them as two towards the
        # threshold
        if len({*masks, *seals}) != 2 * len(sites):
            raise RefusedError("two sites have the same key: only one of them can be real")
        keys = dict(zip(sites, zip(masks, seals, strict=True), strict=True))
        if keys[self.site] != secrets.public:
            raise RefusedError("the keys under this site's name are not its own")
        received = []
        for site, public, signature, measured in zip(
            sites, publics, signatures, splits, strict=True
        ):
            said = self._key_words(site, keys[site], measured)
            received.append(SignedKeys(site, public, said, signature))
        self.signer.refuse_unsigned(received)
        secrets.keys, secrets.publics = keys, dict(zip(sites, publics, strict=True))
        secrets.splits = common_splits(splits)

    def _refuse_threshold(self, threshold: int, sites: int) -> None:
        """Check the server's threshold against the run's settings and the hospital's limit.

        The threshold is the number of sites whose shares together reveal a secret. The higher it
        is, the more sites could collude with the server without learning this site's numbers
        (``tolerated_colluders``).

        Args:
            threshold: the threshold that the server states.
            sites: the number of sites that have keys.

        Raises:
            RefusedError: the threshold differs from that of the settings, or tolerates fewer
                colluding sites than the hospital requires ('colluding-sites').
            SettingError: no threshold is possible for this number of sites.
        """
        if threshold != needed_sites(self.common, sites):
            raise RefusedError(f"threshold {threshold} differs from the one of the run's settings")
        most = tolerated_colluders(threshold, sites)
        if most < self.colluding:
            raise RefusedError(
                f"with {sites} sites and threshold {threshold} a sum hides this site from a server "
                f"that colludes with {most} of the others, but this hospital requires "
                f"{self.colluding} ('colluding-sites'): raise 'secure.threshold', or let more "
                "sites take part"
            )

    def _sign_list(self) -> ConfigRecord:
        """Sign and store the server's list of sites whose weights arrived; return the signature.

        Two lists under the same keys would give two sums, whose difference reveals single sites.
        Only one list is therefore signed, but it may be signed again. If the method proves its
        sums, all sites must be in the list. The signature then also covers the seals (hashes) of
        their masked parts.

        Raises:
            RefusedError: another list was signed before, or the list names a site that did not
                mask. The list has too few sites. An earlier sum of this round or of the same arrays
                was over other sites, or had other numbers from this site. With proven sums, a site
                is missing, or the list has a wrong seal for this site.
            SiteError: the list is malformed, or the site has no keys for this round.
            CheckpointError: the site's secrets or records are damaged, or cannot be written.
        """
        secrets = read_secrets(self.folder, self.round)
        answered = read_texts(self.asked, "answered")
        secrets.refuse_few(self.site, answered, "have sent their weights")
        if not set(answered) <= set(secrets.partners):
            raise RefusedError("the list names a site that did not take part in masking")
        seals = list[str]()
        if self.proves:
            refuse_missing(answered, secrets.partners)
            seals = read_texts(self.asked, "seals")
            refuse_other_seal(dict(zip(answered, seals, strict=False)), self.site, secrets.seal)
        if (secrets.answered, secrets.seals) not in (([], []), (answered, seals)):
            raise RefusedError("another list of sites is already signed: begin the round again")
        self._sums().refuse_other(secrets.weighed, answered)
        if self.book:
            self.book.refuse_other_sites(secrets.received, answered)
        secrets.answered, secrets.seals = answered, seals
        # Before anything leaves, so that a restart cannot sign another list
        secrets.write(self.folder)
        return self._record({"signature": sign_text(self.signer.private, secrets.list_words())})

    def _unmask(self) -> ConfigRecord:
        """Return one share for each site, so that the server can unmask the sum.

        Each site has two secrets, and this site holds a share of both:

        - For a site whose weights arrived, the share of the seed of its own mask is returned.
        - For a site that dropped out, the share of its masking key is returned.

        This site never returns both, because together they would unmask the other site's weights. A
        site is left out if its encrypted shares are missing or cannot be opened. Before the record
        is made, the sum is noted in this site's records, and this site's secrets are deleted.

        Returns:
            A record with the sites' names in ``of`` and their shares in ``shares``, in the same
            order.

        Raises:
            SiteError: the lists in the message are malformed, or the site has no keys for this
                round.
            RefusedError: this site has signed no list of sites yet, or too few sites have validly
                signed the same list (``_refuse_disagreement``).
            CheckpointError: the site's secrets or records are damaged, or cannot be written.
        """
        secrets = read_secrets(self.folder, self.round)
        if not secrets.answered:
            raise RefusedError("this site has signed no list of sites yet: begin the round again")
        self._refuse_disagreement(secrets)
        senders = read_texts(self.asked, "from")
        sealed_shares = read_tokens(self.asked, "sealed", LONGEST_SEALED)
        opened_shares = secrets.open_shares(
            self.site, dict(zip(senders, sealed_shares, strict=False))
        )
        of, shares = list[str](), list[bytes]()
        for site, both in opened_shares.items():
            of.append(site)
            # Never both: together they would unmask this site's weights
            if site in secrets.answered:
                shares.append(both.own_mask)
            else:
                shares.append(both.mask_key)
        # Before anything leaves
        self._sums().note(
            RoundSum(secrets.answered, secrets.weighed, secrets.question, secrets.seals)
        )
        if self.book:
            self.book.note(secrets.received, secrets.answered, secrets.failed)
        drop_secrets(self.folder)
        return self._record({"of": of, "shares": shares})

    def _refuse_disagreement(self, secrets: RoundSecrets) -> None:
        """Check that enough sites have signed the list of sites that this site has signed.

        The number of valid signatures must reach the threshold. If the method proves its sums, all
        sites in the list must have signed it. Without this check, a server could show different
        lists to the sites, and unmask a sum for each list.

        Raises:
            RefusedError: too few signatures are valid. The error gives their number and the number
                needed.
            SiteError: the lists of signers and signatures in the message are malformed.
        """
        signers = read_texts(self.asked, "signers")
        signatures = read_tokens(self.asked, "signatures", LONGEST_SIGNATURE)
        refuse_list(self.site, signers, secrets.answered, "have signed", with_own=False)
        said = secrets.list_words()
        agreeing = 0
        for site, signature in zip(signers, signatures, strict=False):
            if is_signed(secrets.publics[site], said, signature):
                agreeing += 1
        if agreeing < secrets.threshold:
            raise RefusedError(
                f"{agreeing} sites have signed the same list of sites as this one, but "
                f"{secrets.threshold} are needed ('secure.threshold'): sites with different lists "
                "would reveal single sites' weights"
            )
        if self.proves and agreeing < len(secrets.answered):
            raise RefusedError(
                f"{agreeing} sites have signed the list of sites and parts, but all "
                f"{len(secrets.answered)} must, so that each can check the sum: begin the round "
                "again"
            )

    def _record(self, values: Mapping[str, Any]) -> ConfigRecord:
        return ConfigRecord({"round": self.round, **values})

    def _sums(self) -> UnmaskedSums:
        return UnmaskedSums(self.folder, self.round)
