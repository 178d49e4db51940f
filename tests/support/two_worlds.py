"""Three hospitals that trust sums alone, and the same messages over other patients of one of them.

The hospitals' app is the unaltered one. Their randomness is replaced: each message begins a stream
of its own, so that keys, shares and masks are the same in both worlds, and whatever differs outside
of the masks depends on the patients.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, derive_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.client_app.privacy.signing import KEY
from fedsilo.client_app.site.node import OWN
from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    SECURE_AGREE,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    Instruction,
)
from fedsilo.models.privacy.secure_sum import mask_arrays, needed_sites, quantisation
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.wire.records import record_bytes, to_record, unbundle
from fedsilo.strategies.wire.secure_keys import (
    COUNTS,
    MEASURED,
    KeyPair,
    join_shares,
    private_key_to_bytes,
    public_key_to_bytes,
)
from fedsilo.strategies.wire.sum_proofs import SumProof, part_seal
from tests.support.keys import compare_keys

VICTIM, OTHERS = "north", ("south", "west")
SITES = tuple(sorted((VICTIM, *OTHERS)))
RUN: dict[str, Any] = {
    "method": "fedavg",
    "dataset": "table",
    "data.standardise": "declared",
    "network.name": "logistic",
    "train.mc-passes": 0,
    "network.dropout": 0.0,
    "rounds": 9,
    "machine.device": "cpu",
    "privacy.trust": "sums",
    "secure.aggregation": "secagg",
    "secure.clip-norm": 5.0,
    "train.optimiser": "sgd",
    "train.learning-rate": 0.1,
    "train.batch-size": 16,
    "train.local-epochs": 2,
}
WEIGHTS = {"head.1.weight": (2, 2), "head.1.bias": (2,)}
_SITE_FILE = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*"]\ntrust: sums\n'
_SCHEMA = """columns:
  - {{name: age, mean: 50, std: 10}}
  - {{name: dose, mean: 10, std: 2}}
label: {{column: ill, classes: {{well: ['0'], sick: ['1']}}}}
policy: impute
sites: {{{site}: own.csv}}
"""
_ORDER = int("f" * 90, 16)  # below the order of SECP384R1
# Of the audit log's lines: they stay at the hospital; 'check' is over the whole line
_LEFT_OUT = ("time", "why", "outcome", "check")


def table(rows: int = 61) -> str:
    """Return the patients with which a hospital declares its data."""
    lines = [f"{30 + 7 * i % 40},{8 + i % 5},{i % 2}" for i in range(rows)]
    return "\n".join(["age,dose,ill", *lines, ""])


class Stream:
    """Bytes that depend on a name alone, in place of the operating system's."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, name: str) -> None:
        self._name, self._count = name, 0

    def same(self, size: int) -> bytes:
        """Return the same bytes each time, whoever asks first."""
        return hashlib.shake_256(self._name.encode()).digest(size)

    def __call__(self, size: int) -> bytes:
        self._count += 1
        text = f"{self._name}/{self._count}".encode()
        return hashlib.shake_256(text).digest(size)


@contextmanager
def known_randomness(stream: Stream) -> Iterator[None]:
    """Draw keys, shares, masks and signatures from ``stream``."""

    def new_key_pair() -> KeyPair:
        private = derive_private_key(int.from_bytes(stream(48)) % _ORDER + 1, SECP384R1())
        return KeyPair(private_key_to_bytes(private), public_key_to_bytes(private.public_key()))

    place = "fedsilo.client_app.privacy.secure_aggregation"
    with ExitStack() as stack:
        for target, value in (
            (f"{place}.os", SimpleNamespace(urandom=stream)),
            (f"{place}.new_key_pair", new_key_pair),
            # Flower cuts the parts of a secret in threads, which ask in any order
            ("Crypto.Protocol.SecretSharing.rng", stream.same),
            ("cryptography.fernet.os", SimpleNamespace(urandom=stream)),
            ("cryptography.fernet.time", SimpleNamespace(time=lambda: 1e9)),
            (
                "fedsilo.strategies.wire.signatures.ECDSA",
                partial(ECDSA, deterministic_signing=True),
            ),
        ):
            stack.enter_context(patch(target, value))
        yield


@dataclass
class Federation:
    """Three hospitals and a server of the attacker's; what the victim's server sees is recorded."""

    home: Path
    sites: tuple[str, ...] = SITES
    stream: Stream = field(default_factory=Stream)
    seen: list[Any] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, Any] = field(default_factory=dict)
    signatures: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)  # the masked parts in the newest sum
    proof: dict[str, list[str]] = field(default_factory=dict)  # the newest sum's proof
    proves: bool = False  # whether the run's method proves its sums
    limits: dict[str, Any] = field(default_factory=dict)  # limits in the hospitals' node configs
    last_error: str = ""

    def __post_init__(self) -> None:
        for number, site in enumerate(self.sites):
            folder = self.home / site
            (folder / "data").mkdir(parents=True)
            private = derive_private_key(number + 5, SECP384R1())
            text = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            own = folder / "state" / OWN / site
            own.mkdir(parents=True, mode=0o700)
            (own / KEY).write_bytes(text)
            (own / KEY).chmod(0o600)
            (folder / "site.yaml").write_text(_SITE_FILE)
            (folder / "data" / "schema.yaml").write_text(_SCHEMA.format(site=site))
            self.patients(site, table())
        compare_keys({site: self.home / site / "state" for site in self.sites})

    def patients(self, site: str, text: str | None) -> None:
        """Replace a hospital's patients; None removes their file."""
        path = self.home / site / "data" / "own.csv"
        if text is None:
            path.unlink()
        else:
            path.write_text(text)

    def send(
        self,
        site: str,
        kind: str,
        config: Mapping[str, Any],
        arrays: Mapping[str, Any] | None = None,
        secure: Mapping[str, Any] | None = None,
        **instruction: Any,
    ) -> RecordDict | None:
        """Return what a hospital answers, None for an error."""
        content = RecordDict({CONFIG: ConfigRecord({"hello": True})})
        if not kind.startswith("query"):
            asked = {"round": 1, "phase": kind, "run_name": "r", **instruction}
            content = RecordDict({CONFIG: ConfigRecord(dict(Instruction(**asked).to_config()))})
        if secure is not None:
            content["secure"] = ConfigRecord(dict(secure))
        if arrays is not None:
            content[ARRAYS] = to_record({k: np.asarray(v) for k, v in arrays.items()})
        folder = self.home / site
        node = {
            "site": site,
            "state-dir": str(folder / "state"),
            "site-file": str(folder / "site.yaml"),
            "data-dir": str(folder / "data"),
            "max-seconds": 100.0,
            **self.limits,
        }
        number = 1001 + self.sites.index(site)
        context = Context(1, number, node, RecordDict(), dict(config))
        self.stream.begin(f"{len(self.seen)} {site} {kind} {instruction}")
        reply = app(Message(content, number, kind, group_id="1"), context)
        if site == VICTIM:
            self.seen.append(what_leaves(reply))
        if reply.has_error():
            self.last_error = str(reply.error.reason)
            return None
        return unbundle(reply.content)

    def secure(self, phase: str, config: Mapping[str, Any], **instruction: Any) -> None:
        """Play a phase of secure aggregation with all three hospitals, as an honest server does."""
        asked = self._asked(phase)
        kept = {SECURE_KEYS: self.keys, SECURE_SHARES: self.shares, SECURE_AGREE: self.signatures}
        kept.get(phase, {}).clear()
        for site in self.sites if phase == SECURE_KEYS else self.keys:
            content = self.send(
                site, "train", config, None, {"round": instruction["round"], **asked(site)},
                phase=phase, **instruction,
            )  # fmt: skip
            if content is not None and phase in kept:
                kept[phase][site] = content["secure"]

    def sum(
        self,
        config: Mapping[str, Any],
        arrays: Mapping[str, Any],
        metrics: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
        **instruction: Any,
    ) -> dict[str, Any] | None:
        """Play a round of honest messages; return its sums by name, None where a site refuses.

        ``names`` are the arrays to sum; empty for all that are no start.
        """
        asked = {"round": 1, "run_name": "r", "evaluate": False, **instruction}
        for phase, answers in ((SECURE_KEYS, self.keys), (SECURE_SHARES, self.shares)):
            self.secure(phase, config, **asked)
            if not answers:
                return None
        secure = {
            "round": asked["round"],
            "sites": sorted(self.shares),
            "metrics": list(metrics),
            "arrays": sorted(names)
            or sorted(n for n in arrays if "start/" not in n and f"start/{n}" not in arrays),
        }
        if self.proves and asked["round"] > 1:
            secure |= self.proof
        self.parts = came = {}
        for site in sorted(self.shares):
            if (answer := self.send(site, "train", config, arrays, secure, **asked)) is None:
                return None
            came[site] = {n: a.numpy() for n, a in answer["arrays"].items()}
        self.secure(SECURE_AGREE, config, **asked)
        shares = self._unmask(config, asked)
        if not came or shares is None:
            return None
        threshold = needed_sites(resolve(RUN).common, len(came))
        own_masks = {site: join_shares(shares[site][:threshold]) for site in sorted(came)}
        if self.proves:
            self.proof = SumProof(came, own_masks).to_values()
        return self._total(own_masks)

    def _unmask(
        self, config: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> dict[str, list[bytes]] | None:
        """Return the shares of each site's own mask, None where a site gives none."""
        shares: dict[str, list[bytes]] = {}
        for site in self.keys:
            unmasking = {"round": asked["round"], **self._unmasking(site)}
            told = self.send(site, "train", config, None, unmasking, phase=SECURE_UNMASK, **asked)
            if told is None:
                return None
            for of, share in zip(told["secure"]["of"], told["secure"]["shares"], strict=True):
                shares.setdefault(of, []).append(share)
        return shares

    def _total(self, own_masks: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the sums of the newest parts by name, without masks."""
        total = {name: np.uint32(0) for name in next(iter(self.parts.values()))}
        for part in self.parts.values():
            total = {name: total[name] + words for name, words in part.items()}
        left = mask_arrays(total, [], own_masks.values())
        way = quantisation(resolve(RUN).common, len(self.parts))
        whole = {COUNTS, MEASURED}
        return {
            name: words.tolist() if name in whole else way.total(words, len(self.parts))
            for name, words in left.items()
        }

    def _asked(self, phase: str) -> Any:
        if phase == SECURE_SHARES:
            kinds = ("mask-key", "seal-key", "public", "signature")
            keys = dict(sorted(self.keys.items()))
            told = {f"{kind}s": [key[kind] for key in keys.values()] for kind in kinds}
            threshold = needed_sites(resolve(RUN).common, len(keys))
            told |= {"splits": [key["splits"] for key in keys.values()]}
            return lambda site: {"sites": list(keys), "threshold": threshold, **told}
        if phase == SECURE_AGREE:
            told = {"answered": sorted(self.keys)}
            if self.proves:
                told["seals"] = [self.seal(site) for site in sorted(self.keys)]
            return lambda site: told
        if phase == SECURE_UNMASK:
            return self._unmasking
        return lambda site: {}

    def _unmasking(self, site: str) -> dict[str, Any]:
        senders = [one for one in self.shares if one != site and site in self.shares[one]["to"]]
        sealed = [self.shares[one]["sealed"][self.shares[one]["to"].index(site)] for one in senders]
        return {
            "signers": sorted(self.signatures),
            "signatures": [self.signatures[one]["signature"] for one in sorted(self.signatures)],
            "from": senders,
            "sealed": sealed,
        }

    def seal(self, site: str) -> str:
        """Return the seal of a site's part in the newest sum."""
        return part_seal(self.parts[site], self.shares[site]["check"])

    def log(self) -> list[dict[str, Any]]:
        """Return what the victim's audit log says of what left."""
        path = self.home / VICTIM / "state" / ".own" / VICTIM / "audit.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in _LEFT_OUT} for line in lines]


def what_leaves(reply: Message) -> Any:
    """Return all of a reply that a server sees outside of the masks."""
    if reply.has_error():
        return "error", reply.error.code, reply.error.reason
    size, content = record_bytes(reply.content), unbundle(reply.content)
    return size, {name: _record(content[name]) for name in content}


def _record(record: Any) -> Any:
    if isinstance(record, ArrayRecord):
        return {name: _array(array) for name, array in record.items()}
    return dict(record)


def _array(array: Array) -> tuple[str, tuple[int, ...]]:
    return array.dtype, tuple(array.shape)
