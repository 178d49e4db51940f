"""A site's side of secure aggregation: its weights leave masked, and only sums can be unmasked.

Before it trains, a site makes keys (phase ``secure-keys``), agrees on masks with each other site
and gives each a share of its secrets, sealed (``secure-shares``). After, it gives for each site one
share of one secret (``secure-unmask``): of those whose weights came that of the site's own mask, of
those that dropped out that of its masks with others. It never gives both, never masks twice by the
same keys, and of a round that is begun again helps to open no other sum than before: the difference
would be a site's own. The secrets of a round lie beside the site's state and are gone with the next
round, and with the evaluation that ends a run; whose sums were opened stays known.

It guards against a server that follows the protocol and reads what it gets
(docs/secure-aggregation.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from torch import Tensor

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import RefusedError, SiteError
from fedsilo.models.contract.messages import SECURE_KEYS, SECURE_SHARES
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.secure_sum import KEY, Words, masked, needed_sites, quantisation
from fedsilo.strategies.wire.secure_keys import (
    LONGEST_KEY,
    LONGEST_SEALED,
    Shares,
    agreed_key,
    cut,
    mask_key,
    new_key_pair,
    opened,
    sealed,
    texts,
    tokens,
    whole,
)

SECRETS = "secure-round.json"
SUMS = "secure-sums.json"  # whose sums this site has helped to open, by round
_KEPT = 3  # rounds: a server may go back by two


@dataclass
class RoundSecrets:
    """What a site knows in one round, bytes as hexadecimal text.

    Attributes:
        round: the round.
        masking: private key for masks; gone once the sum is open, as is own_mask.
        sealing: private key for what travels. public: both keys' public halves.
        own_mask: key of the site's own mask.
        sites: all that have keys, sorted; known from the shares on, as are
        mask_keys, seal_keys: their public keys, by site, and
        own_shares: what the site keeps of its own secrets.
        threshold: shares that give a secret back.
        partners: the sites with which it is masked; empty: nothing has left yet.
    """

    round: int
    masking: str
    sealing: str
    public: list[str]
    own_mask: str
    sites: list[str] = field(default_factory=list)
    mask_keys: dict[str, str] = field(default_factory=dict)
    seal_keys: dict[str, str] = field(default_factory=dict)
    own_shares: list[str] = field(default_factory=list)
    threshold: int = 0
    partners: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SecureSite:
    """One site in one round of secure aggregation.

    Attributes:
        site: its name.
        round: the round.
        common: the run's settings.
        folder: where its secrets lie.
        asked: the record that came, of the server.
    """

    site: str
    round: int
    common: CommonSettings
    folder: Path
    asked: Mapping[str, Any]

    def answer(self, phase: str) -> ConfigRecord:
        """Answer a phase in which nothing is trained.

        Raises:
            SiteError: the message is not as it must be, or of another round.
            RefusedError: it would tell more than a sum.
        """
        if phase == SECURE_KEYS:
            return self._made_keys()
        return self._shared() if phase == SECURE_SHARES else self._unmasked()

    def masked(
        self, arrays: Mapping[str, Tensor], reference: Mapping[str, Tensor]
    ) -> dict[str, Words]:
        """Return what leaves for weights: updates from ``reference``, weighted, whole and masked.

        Args:
            arrays: as they would leave, clipped, by name.
            reference: what came, by the same names.

        Raises:
            SiteError: it knows no keys of this round.
            RefusedError: masked weights have left by these keys already, or too few sites mask.
        """
        secrets, partners = self.ready()
        secrets.partners = partners
        self._write(secrets)  # before anything leaves
        way = quantisation(self.common, len(secrets.sites))
        weight = self.weight()
        whole_numbers = {
            name: way.quantised(
                weight
                * (array.detach().cpu().double() - reference[name].detach().cpu().double()).numpy()
            )
            for name, array in arrays.items()
        }
        plus, minus = [_raw(secrets.own_mask)], list[bytes]()
        for other in partners:
            if other != self.site:
                key = mask_key(_raw(secrets.masking), _raw(secrets.mask_keys[other]))
                (plus if self.site < other else minus).append(key)
        return masked(whole_numbers, plus, minus)

    def ready(self) -> tuple[RoundSecrets, list[str]]:
        """Return the round's secrets and the sites to be masked with; asked before training, too.

        Raises:
            SiteError: it knows no keys of this round.
            RefusedError: masked weights have left by these keys already, too few sites mask, or
                others than those of this round's sum that is open already.
        """
        secrets = self._read()
        if secrets.partners:
            raise RefusedError(
                "weights masked by the keys of this round have left already, and what leaves "
                "twice by the same masks can be distinguished: begin the round again"
            )
        partners = texts(self.asked, "sites")
        self._refuse_few(partners, secrets, "share their keys")
        if not set(self._opened_before()) <= set(partners):
            raise self._other_sum()
        return secrets, partners

    def _opened_before(self) -> list[str]:
        """Return whose sum of this round this site has helped to open; empty: none."""
        return list(self._sums().get(str(self.round), []))

    def _other_sum(self) -> RefusedError:
        return RefusedError(
            f"the sum of {', '.join(self._opened_before())} was opened in this round before: that "
            "of others beside it would tell single sites' weights; let the same sites answer, or "
            "go on without this one"
        )

    def weight(self) -> float:
        """Return what the update counts for beside that of the site with the most samples.

        Raises:
            SiteError: the message does not say.
        """
        value = self.asked.get("weight")
        if not isinstance(value, float) or not 0 < value <= 1:
            raise SiteError("record 'secure' has no 'weight' above 0 and at most 1")
        return value

    def _made_keys(self) -> ConfigRecord:
        masking, sealing = new_key_pair(), new_key_pair()
        self._write(
            RoundSecrets(
                self.round,
                masking.private.hex(),
                sealing.private.hex(),
                [masking.public.hex(), sealing.public.hex()],
                os.urandom(KEY).hex(),
            )
        )
        return self._record({"mask-key": masking.public, "seal-key": sealing.public})

    def _shared(self) -> ConfigRecord:
        secrets = self._read()
        sites = texts(self.asked, "sites")
        mask_keys = tokens(self.asked, "mask-keys", LONGEST_KEY)
        seal_keys = tokens(self.asked, "seal-keys", LONGEST_KEY)
        threshold = whole(self.asked, "threshold")
        if secrets.sites:
            raise RefusedError("keys of this round are shared already: begin the round again")
        if sites != sorted(set(sites)) or self.site not in sites:
            raise SiteError("record 'secure' names no sorted list of sites with this one in it")
        if not len(sites) == len(mask_keys) == len(seal_keys):
            raise SiteError("record 'secure' has not one key of each kind for each site")
        if len({*mask_keys, *seal_keys}) != 2 * len(sites):
            raise RefusedError("two sites have the same key: only one of them can be real")
        place = sites.index(self.site)
        if [mask_keys[place].hex(), seal_keys[place].hex()] != secrets.public:
            raise RefusedError("the keys under this site's name are not its own")
        if threshold != needed_sites(self.common, len(sites)):
            raise RefusedError(f"threshold {threshold} is not the one of the run's settings")
        secrets.sites, secrets.threshold = sites, threshold
        secrets.mask_keys = {s: k.hex() for s, k in zip(sites, mask_keys, strict=True)}
        secrets.seal_keys = {s: k.hex() for s, k in zip(sites, seal_keys, strict=True)}
        record = self._cut_and_sealed(secrets)
        self._write(secrets)
        return record

    def _cut_and_sealed(self, secrets: RoundSecrets) -> ConfigRecord:
        """Return the shares of this site's secrets, sealed for each other site; keep its own."""
        sites, place = secrets.sites, secrets.sites.index(self.site)
        own_masks = cut(_raw(secrets.own_mask), secrets.threshold, len(sites))
        mask_keys = cut(_raw(secrets.masking), secrets.threshold, len(sites))
        secrets.own_shares = [own_masks[place].hex(), mask_keys[place].hex()]
        others = [other for other in range(len(sites)) if other != place]
        return self._record(
            {
                "to": [sites[other] for other in others],
                "sealed": [
                    sealed(
                        Shares(own_masks[other], mask_keys[other]),
                        agreed_key(_raw(secrets.sealing), _raw(secrets.seal_keys[sites[other]])),
                        (place, other),
                    )
                    for other in others
                ],
            }
        )

    def _unmasked(self) -> ConfigRecord:
        secrets = self._read()
        answered = texts(self.asked, "answered")
        self._refuse_few(answered, secrets, "have sent their weights")
        if not set(answered) <= set(secrets.partners):
            raise RefusedError("a site that masks no weights is said to have sent some")
        if self._opened_before() not in ([], answered):
            raise self._other_sum()
        held = self._opened(secrets)
        self._note_sum(answered)  # before anything leaves
        secrets.masking = secrets.own_mask = ""
        self._write(secrets)
        return self._record(
            {
                "of": list(held),
                "shares": [
                    shares.own_mask if site in answered else shares.mask_key
                    for site, shares in held.items()
                ],
            }
        )

    def _opened(self, secrets: RoundSecrets) -> dict[str, Shares]:
        """Return the shares that this site holds, by the site whose secrets they are of."""
        senders = texts(self.asked, "from")
        came = dict(zip(senders, tokens(self.asked, "sealed", LONGEST_SEALED), strict=False))
        place = secrets.sites.index(self.site)
        held = {self.site: Shares(*(_raw(share) for share in secrets.own_shares))}
        for site in secrets.partners:
            if site == self.site:
                continue
            if site not in came:
                raise SiteError(f"the shares of site {site} did not come with the message")
            key = agreed_key(_raw(secrets.sealing), _raw(secrets.seal_keys[site]))
            held[site] = opened(came[site], key, (secrets.sites.index(site), place))
        return held

    def _refuse_few(self, sites: list[str], secrets: RoundSecrets, what: str) -> None:
        if not secrets.sites:
            raise SiteError("the keys of this round were not shared with this site yet")
        if sites != sorted(set(sites) & set(secrets.sites)):
            raise SiteError("record 'secure' names no sorted list of sites that have keys")
        if len(sites) < secrets.threshold:
            raise RefusedError(
                f"{len(sites)} sites {what}, and {secrets.threshold} are needed "
                "('secure-threshold'): of fewer a sum tells too much"
            )
        if self.site not in sites:
            raise SiteError(f"the sites that {what} are said to be others")

    def _record(self, values: Mapping[str, Any]) -> ConfigRecord:
        return ConfigRecord({"round": self.round, **values})

    def _read(self) -> RoundSecrets:
        secrets = self._secrets().read(_secrets, None)
        if secrets is None:
            raise SiteError("it has no keys for secure aggregation: begin the round again")
        if secrets.round != self.round:
            raise SiteError(
                f"its keys for secure aggregation are of round {secrets.round}, and round "
                f"{self.round} is asked for: begin the round again"
            )
        return secrets

    def _sums(self) -> dict[str, list[str]]:
        """Return the sites whose sums this one has helped to open, by round."""
        return self._opened_sums().read(_opened, {})

    def _note_sum(self, answered: list[str]) -> None:
        known = {**self._sums(), str(self.round): answered}
        newest = sorted(known, key=int)[-_KEPT:]
        self._opened_sums().write({number: known[number] for number in newest})

    def _write(self, secrets: RoundSecrets) -> None:
        self._secrets().write(asdict(secrets))

    def _secrets(self) -> OwnFile:
        return OwnFile(self.folder / SECRETS, SECRETS, "remove it and begin the round again")

    def _opened_sums(self) -> OwnFile:
        lost = (
            "bring it back, or choose another 'run-name'; whose sums were opened is known by "
            "nothing else"
        )
        return OwnFile(self.folder / SUMS, SUMS, lost)


def _secrets(content: Any) -> RoundSecrets | None:
    secrets = RoundSecrets(**content)
    _raw(secrets.own_mask)
    return secrets


def _opened(content: Any) -> dict[str, list[str]]:
    return {str(int(number)): [str(site) for site in sites] for number, sites in content.items()}


def drop_secrets(folder: Path) -> None:
    """Remove the keys of a run's last round: the run is over."""
    (folder / SECRETS).unlink(missing_ok=True)


def _raw(text: str) -> bytes:
    return bytes.fromhex(text)
