"""Sites of one round of secure aggregation, each with its folder; a test plays the server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsilo.client_app.privacy.secure_aggregation import SecureSite
from fedsilo.client_app.privacy.signing import signer_of
from fedsilo.client_app.privacy.summand import Summand
from fedsilo.core.messages import (
    SECURE_AGREE,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import needed_sites

NAMES = ["a", "b", "c", "d"]
SENT = {"w": torch.zeros(2)}
COMMON = CommonSettings(clip_norm=2.0, secure_aggregation="secagg")
SAMPLES = 10  # as which a larger site counts
CAME = {"arrays/w": np.zeros(2, np.float32)}


@dataclass
class Round:
    """Sites in round 3, and what they have answered."""

    folder: Path
    names: Sequence[str] = tuple(NAMES)
    common: CommonSettings = COMMON
    run: str = "trial"
    terms: bytes = b"terms"
    colluding: int = 0
    measures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, Any] = field(default_factory=dict)

    def site(
        self, name: str, round_: int = 3, counts: dict[str, int] | None = None, **asked: Any
    ) -> SecureSite:
        return SecureSite(
            name,
            self.run,
            round_,
            self.common,
            self.folder / name,
            asked,
            signer_of(True, self.common.seed, name, {}),
            Summand(self.common, counts or {"train": 10}),
            self.terms,
            self.colluding,
            self.measures.get(name, ()),
            SAMPLES,
        )

    def make_keys(self) -> None:
        self.keys = {name: self.site(name).answer(SECURE_KEYS) for name in self.names}

    def all_keys(self, **changes: Any) -> dict[str, Any]:
        return {
            "sites": list(self.names),
            **{
                f"{kind}s": [self.keys[name][kind] for name in self.names]
                for kind in ("mask-key", "seal-key", "public", "signature")
            },
            "splits": [self.keys[name]["splits"] for name in self.names],
            "threshold": needed_sites(self.common, len(self.names)),
            **changes,
        }

    def share(self) -> None:
        asked = self.all_keys()
        self.shares = {n: self.site(n, **asked).answer(SECURE_SHARES) for n in self.names}

    def begin(self) -> None:
        self.make_keys()
        self.share()

    def sealed_for(self, name: str) -> dict[str, Any]:
        senders = [other for other in self.names if other != name]
        return {
            "from": senders,
            "sealed": [self.shares[s]["sealed"][self.shares[s]["to"].index(name)] for s in senders],
        }

    def masked(self, name: str, values: list[float], samples: int = 10, **changes: Any) -> Any:
        asked = {"sites": list(self.names), **changes}
        site = self.site(name, counts={"train": samples}, **asked)
        return site.mask({"w": torch.tensor(values)}, CAME, {})["w"]

    def all_masked(self) -> None:
        for name in self.names:
            self.masked(name, [0.5, 0.5])

    def signed(self, name: str, answered: Iterable[str]) -> bytes:
        record = self.site(name, answered=list(answered)).answer(SECURE_AGREE)
        return bytes(record["signature"])  # type: ignore[arg-type]

    def agree(self, answered: Iterable[str]) -> dict[str, Any]:
        signers = list(answered)
        return {"signers": signers, "signatures": [self.signed(name, signers) for name in signers]}

    def unmask(self, name: str, agreed: dict[str, Any]) -> Any:
        return self.site(name, **agreed, **self.sealed_for(name)).answer(SECURE_UNMASK)
