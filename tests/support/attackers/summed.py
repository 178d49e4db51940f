"""Hospitals that trust sums alone, attacked together: an attacker reads rows off their sum.

Each of its messages is one honest secure sum: the weights are the attacker's, everything else is
the protocol. What comes back is the mean update of all, from which the same attacks read rows
of any of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.core.errors import SettingError
from fedsilo.datasets.registry import silo_names
from fedsilo.models.privacy.secure_sum import SAMPLES
from fedsilo.server_app.config.settings import resolve
from tests.support.attackers.asked import Arrays, Asked
from tests.support.attackers.attacks import ATTACKS, DATA
from tests.support.attackers.planes import WAYS, planes_by
from tests.support.hospital import Hospital
from tests.support.setting_keys import as_keys
from tests.support.two_worlds import RUN, Federation

# More planes, since the rows of all hospitals lie between them
_WIDE = 2048
IN_SUMS = ATTACKS | {
    f"{_WIDE:,} planes, fedavg": replace(
        ATTACKS["planes, fedavg"],
        attack=planes_by(WAYS["fedavg"], _WIDE),
        run={**ATTACKS["planes, fedavg"].run, "width": _WIDE},
        messages=1,
    )
}
# What an attacker changes so that the sum's rounding does not hide what he reads
_LARGER = {"images by planes, fedavg": {"train.learning-rate": 1e-7}}


@dataclass
class AskedInSums(Asked):
    """Hospitals under attack; ``refused`` is why the first message got no answer."""

    federation: Federation | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        """The hospitals."""
        assert self.federation is not None
        return self.federation.sites

    def ask(self, phase: str, arrays: Mapping[str, Any] | None, **more: Any) -> Arrays | None:
        """Return what the arrays became on average, in a run of its own for each message."""
        self.messages += 1
        assert self.federation is not None
        sent = {n: np.asarray(a, np.float32) for n, a in (arrays or {}).items()}
        name = f"attack{self.messages}"
        try:
            config = resolve(RUN).as_mapping() | as_keys(self.run)
            left = self.federation.sum(config, sent, **{"run_name": name, **more})
        except (SettingError, AttributeError, StopIteration) as error:
            self.refused = self.refused or str(error)
            return None
        if left is None:
            self.refused = self.refused or str(self.federation.last_error)
            return None
        samples, failed = left["secure/counts"]
        if samples == 0:
            self.refused = self.refused or f"{failed} sites could not answer"
            return None
        self.answered += 1
        summed = [name for name in sent if name in left]
        return {n: sent[n].astype(np.float64) + left[n] * SAMPLES / samples for n in summed}

    def recovered(self) -> int:
        """Return how many rows of all hospitals are read."""
        return sum(self._at(site).recovered(self.candidates) for site in self.sites)

    def patients(self) -> int:
        """Return how many rows all hospitals train on."""
        return sum(len(self._at(site).rows()) for site in self.sites)

    def _at(self, site: str) -> Hospital:
        return replace(self.hospital, site=site)


def attacked_in_sums(name: str, home: Path, messages: int = 0, seed: int = 0) -> AskedInSums:
    """Attack all hospitals of a data set by their sums, as ``attacked`` does one of them."""
    planned = IN_SUMS[name]
    run = {**planned.run, "method": planned.method}
    run = as_keys(run)
    run |= _LARGER.get(name, {})
    checked = {key: run[key] for key in DATA if key in run} | {"network": "auto"}
    hospital = Hospital(home / "none", checked, planned.site)
    made = AskedInSums(hospital, run=run)
    sites = silo_names(resolve(checked).common)
    made.federation = Federation(home, tuple(sorted(sites)))
    for site in made.sites:
        made.federation.send(site, "query.hello", resolve(RUN).as_mapping() | run)
    planned.attack(made, np.random.default_rng(seed), messages or planned.messages)
    return made
