"""A kit that came altered, and a server that makes keys: rules and keys stay the hospital's own."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.client_app.app import app
from fedsilo.client_app.privacy.signing import KEY as SIGNING_KEY
from fedsilo.client_app.privacy.signing import KnownKeys, own_code, signer_of
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import FedsiloError, RefusedError, SettingError
from fedsilo.core.messages import CONFIG, SECURE_KEYS, SECURE_SHARES, TRAIN, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.deployment.certificates import make_authority, make_hospital_key
from fedsilo.deployment.doctor.hospital_checks import HospitalRequest, prepare_node
from fedsilo.deployment.doctor.site import SiteSetup
from fedsilo.deployment.hospital_keys import mark_keys
from fedsilo.deployment.kit import AUTHORITY, KEY, KitError, make_kit, read_kit
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.secure_round import SecureSum
from fedsilo.strategies.wire.secure_keys import SECURE
from fedsilo.strategies.wire.signatures import simulated_key
from tests.support.keys import compare_keys

CPU = ('device="cpu"',)
OPEN = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*", "survey/*"]\napp: any\n'
ALTERED = {
    "app any, floors of 1": f"site: north\ntrust:\n{OPEN}minimum-batch: 1\nsums-min-count: 1\n",
    "the line in quotes": f'site: north\n"trust": server\n{OPEN}',
    "in one pair of braces": '{site: north, trust: server, methods: ["*"], app: any}\n',
    "the key after a question mark": f"site: north\n? trust\n: server\n{OPEN}",
    "indented": "  site: north\n  trust: server\n  app: any\n",
    "twice": f"site: north\ntrust:\n{OPEN}trust: server\n",
    "an anchor": f"site: north\ntrust: &trust server\n{OPEN}",
    "empty": "",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder)
    return (folder / "ca.crt").read_bytes()


@pytest.fixture
def kit(authority: bytes, tmp_path: Path) -> Path:
    """Return north's kit as an honest server made it."""
    return _write_kit(tmp_path / "north.zip", authority)


def _write_kit(path: Path, authority: bytes, made: str = "2026-01-02") -> Path:
    path.touch(mode=0o600)
    files = {AUTHORITY: authority, KEY: make_hospital_key()[0]}
    path.write_bytes(make_kit("north", "fl.example.org:9092", "7", made, files))
    return path


def _add(path: Path, name: str, content: str) -> None:
    """Add a file to a kit, as somebody may who carries it."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, content)


def _agree(sentences: Sequence[str]) -> None:
    """Confirm whatever is asked."""


def _start(path: Path, trust: str, confirm: Callable[[Sequence[str]], None] = _agree) -> SiteSetup:
    more = ["max-epsilon=3.0"] if trust == "nobody" else []
    request = HospitalRequest(path, {"trust": trust, "rule": more, "node_config": CPU})
    return prepare_node(request, confirm, check_setup=lambda setup: None)


@pytest.mark.parametrize("trust", ["sums", "nobody"])
@pytest.mark.parametrize("what", ALTERED)
def test_rules_that_come_with_a_kit_are_refused(what: str, trust: str, kit: Path) -> None:
    _add(kit, "site.yaml", ALTERED[what])
    with pytest.raises(KitError, match=r"has its own site\.yaml"):
        _start(kit, trust)
    assert not (kit.parent / "north").exists()


@pytest.mark.parametrize("trust", ["server", "sums", "nobody"])
def test_the_rules_of_an_honest_kit_are_those_of_the_options(trust: str, kit: Path) -> None:
    rules = _start(kit, trust).rules
    assert (rules.trust, rules.app, rules.site) == (trust, "installed", "north")
    assert (rules.minimum_batch, rules.sums_min_count, rules.colluding_sites) == (8, 10, 1)
    assert rules.survey_parts(["counts"]) == set()


@given(
    name=st.sampled_from(["site.yaml", "registry.json", "signing.key", "state/x", "opened.json"])
    | st.text(min_size=1, max_size=20),
    content=st.text(max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_whatever_a_kit_brings_beside_its_sealed_files_is_refused(
    name: str, content: str, authority: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("kit")
    path = _write_kit(folder / "north.zip", authority)
    with zipfile.ZipFile(path) as archive:
        sealed = archive.namelist()
    try:
        _add(path, name, content)
    except (UnicodeEncodeError, ValueError, IndexError):  # zipfile takes no such name
        return
    with zipfile.ZipFile(path) as archive:
        if archive.namelist()[-1] in sealed:
            return
    with pytest.raises(KitError):
        _start(path, "sums")
    assert [entry.name for entry in folder.iterdir()] == ["north.zip"]


def test_a_signing_key_in_a_kit_is_refused_and_the_own_one_is_made_here(kit: Path) -> None:
    before = kit.read_bytes()
    _add(kit, SIGNING_KEY, "the server's")
    with pytest.raises(KitError, match=r"'signing\.key', which no kit has"):
        _start(kit, "sums")
    kit.write_bytes(before)
    setup = _start(kit, "sums")
    private = (setup.own_folder / SIGNING_KEY).read_bytes()
    with zipfile.ZipFile(io.BytesIO(before)) as archive:
        assert all(archive.read(name) != private for name in archive.namelist())
    assert b"OPENSSH PRIVATE KEY" in private


def test_a_key_that_comes_while_two_hospitals_telephone_is_not_marked(tmp_path: Path) -> None:
    """A server that sent the real key first and its own one a minute later had its own marked."""
    own = tmp_path / OWN / "north"
    real, evil = ("-".join([group] * 8) for group in ("4f3a", "0bad"))
    known = KnownKeys(own)

    def arrives(code: str) -> None:
        with pytest.raises(RefusedError, match="not been compared"):
            known.refuse_uncompared("north", "", {"south": code})

    arrives(real)
    with pytest.raises(SettingError, match="since the keys were listed here"):
        mark_keys(own, ["south"], [])  # nobody has seen it
    known.show()  # on the screen: the code that south reads out
    arrives(evil)
    with pytest.raises(SettingError, match="since the keys were listed here"):
        mark_keys(own, ["south"], [])
    assert not known.read()["south"].compared
    known.show()
    mark_keys(own, [f"south={real}"], [])
    assert known.read()["south"].compared == real


def test_a_renewed_kit_changes_no_key_that_was_compared(kit: Path, authority: bytes) -> None:
    setup = _start(kit, "sums")
    known = KnownKeys(setup.own_folder)
    code = "-".join(["4f3a"] * 8)
    known.mark("south", code)
    own = own_code(setup.own_folder)
    new = _write_kit(kit.with_name("renewed.zip"), authority, "2026-03-01")
    registry = new.with_name("with-registry.zip")
    shutil.copy(new, registry)
    _add(registry, "registry.json", json.dumps({"south": {"key": "SHA256:evil"}}))
    with pytest.raises(KitError, match=r"has its own registry\.json"):
        _start(registry, "sums")
    asked: list[str] = []
    _start(new, "sums", asked.extend)
    assert any("node.key is replaced" in line for line in asked)
    assert known.read()["south"].compared == code
    assert own_code(setup.own_folder) == own


def test_a_kit_that_replaces_another_needs_a_yes(kit: Path, authority: bytes) -> None:
    def disagree(sentences: Sequence[str]) -> None:
        raise KitError("no")

    _start(kit, "sums")
    new = _write_kit(kit.with_name("renewed.zip"), authority, "2026-03-01")
    with pytest.raises(KitError):
        _start(new, "sums", disagree)
    assert read_kit(kit.parent / "north").code == read_kit(kit).code


SITES = ("cleveland", "hungary", "switzerland", "va")
VICTIM = "cleveland"
RUN: Mapping[str, Any] = {
    "method": "fedavg",
    "dataset": "heart-synthetic",
    "data.standardise": "declared",
    "network.name": "logistic",
    "train.mc-passes": 0,
    "machine.device": "cpu",
    "privacy.trust": "sums",
    "secure.aggregation": "secagg",
    "secure.clip-norm": 5.0,
    "rounds": 10,
}


@dataclass
class Said:
    """A site's answer, as the server's side of the protocol reads it."""

    secure: dict[str, Any]


@dataclass
class Company:
    """Hospitals, of which a server's operator may play some with its own copies of the app.

    Attributes:
        home: below which each has its 'state-dir'.
        refusals: of messages that were not answered.
    """

    home: Path
    refusals: list[str] = field(default_factory=list)

    def state(self, site: str) -> Path:
        return self.home / site

    def share_keys(self) -> bool:
        """Let the server begin a sum, and return whether the victim shares its secrets."""
        common = build(CommonSettings, resolve(RUN).as_mapping() | {"run.name": "r"})
        sum_ = SecureSum(1, common, {}, len(SITES), 2)
        first = {s: self._send(s, SECURE_KEYS, sum_) for s in SITES}
        sum_.take_keys({site: Said(said) for site, said in first.items() if said})  # type: ignore[misc]
        assert not self.refusals, "all make keys; what is refused is to share secrets by them"
        shares = self._send(VICTIM, SECURE_SHARES, sum_)
        return shares is not None

    def received(self) -> dict[str, str]:
        """Return the codes of the keys that the victim has received, by site."""
        known = KnownKeys(self.state(VICTIM) / OWN / VICTIM).read()
        return {site: key.received for site, key in known.items() if key.received}

    def _send(self, site: str, phase: str, sum_: SecureSum) -> dict[str, Any] | None:
        asked = Instruction(1, phase, 0, "r", evaluate=False)
        content = RecordDict({CONFIG: ConfigRecord(dict(asked.to_config()))})
        content[SECURE] = sum_.record(phase, site)
        node = {"site": site, "state-dir": str(self.state(site)), "trust": "sums"}
        number = 1001 + SITES.index(site)
        context = Context(1, number, node, RecordDict(), dict(resolve(RUN).as_mapping()))
        reply = app(Message(content, number, TRAIN, group_id="1"), context)
        if reply.has_error():
            self.refusals.append(str(reply.error.reason))
            return None
        return dict(reply.content[SECURE])  # type: ignore[arg-type]


def test_a_server_that_made_the_others_keys_plays_nobody(tmp_path: Path) -> None:
    """The operator runs copies of the app with keys of its own in the others' names."""
    company = Company(tmp_path / "company")
    for site in SITES:
        if site != VICTIM:
            folder = company.state(site) / OWN / site
            folder.mkdir(parents=True)
            key = simulated_key(99, site)  # which the operator knows
            pem = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            (folder / SIGNING_KEY).write_bytes(pem)
    assert not company.share_keys()
    operators = {s: own_code(company.state(s) / OWN / s) for s in SITES if s != VICTIM}
    assert company.received() == operators
    company.refusals.clear()
    # The victim compares by telephone with the hospitals themselves, which have other keys
    real = compare_keys({site: tmp_path / "real" / site for site in SITES if site != VICTIM})
    for site, code in real.items():
        KnownKeys(company.state(VICTIM) / OWN / VICTIM).mark(site, code)
    assert not company.share_keys()
    assert company.received() == operators


def test_hospitals_that_have_compared_their_keys_share_them(tmp_path: Path) -> None:
    company = Company(tmp_path)
    compare_keys({site: company.state(site) for site in SITES})
    assert company.share_keys(), company.refusals


@pytest.mark.parametrize("missing", [site for site in SITES if site != VICTIM])
def test_one_key_that_was_not_compared_is_enough_to_refuse(missing: str, tmp_path: Path) -> None:
    company = Company(tmp_path)
    compare_keys({site: company.state(site) for site in SITES})
    KnownKeys(company.state(VICTIM) / OWN / VICTIM).forget(missing)
    assert not company.share_keys()
    assert missing in company.received(), "its key came, and nobody has compared it"


def test_a_key_of_the_node_config_signs_nothing(tmp_path: Path) -> None:
    """A service file of the version before still names the kit's key."""
    node = {"state-dir": str(tmp_path), "signing-key": str(tmp_path / "node.key")}
    (tmp_path / "node.key").write_bytes(make_hospital_key()[0])
    with pytest.raises(FedsiloError, match="remove the entry"):
        signer_of(False, 0, "north", node)
