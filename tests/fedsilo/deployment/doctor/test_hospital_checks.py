"""``hospital start`` opens a kit once, after checks, and leaves nothing of one that it refuses."""

import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fedsilo.api.hospital import _leave_replaced_folder
from fedsilo.cli.main import main
from fedsilo.client_app.privacy.signing import own_code
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import FedsiloError
from fedsilo.deployment.doctor import machine
from fedsilo.deployment.doctor.hospital_checks import (
    Confirm,
    HospitalRequest,
    lock_and_build_command,
    lock_kit_folder,
    prepare_node,
)
from fedsilo.deployment.kit import AUTHORITY, KEY, Card, KitError, make_kit, read_kit
from fedsilo.deployment.node_times import fault_of
from tests.fedsilo.deployment.doctor.conftest import certificate

CPU = ('device="cpu"',)


@dataclass(frozen=True)
class Usage:
    """What ``shutil.disk_usage`` says of a disk with much room, or none."""

    roomy: bool

    @property
    def free(self) -> int:
        return 10**12 * self.roomy


def _kit(
    folder: Path,
    secrets: Path,
    server: str,
    made: str = "2026-01-02T00:00:00",
    site: str = "north",
    node: str = "7",
) -> Path:
    """Write a kit of a hospital whose key is among the secrets."""
    names = {AUTHORITY: "ca.crt", KEY: f"{site}.key"}
    files = {name: (secrets / own).read_bytes() for name, own in names.items()}
    path = folder / f"{site}-{made[:10]}.zip"
    path.touch(mode=0o600)
    path.write_bytes(make_kit(site, server, node, made, files))
    return path


@pytest.fixture
def kit(tmp_path: Path, secrets: Path, fleet: int) -> Path:
    return _kit(tmp_path, secrets, f"localhost:{fleet}")


def _request(kit: Path, trust: str = "sums", **more: object) -> HospitalRequest:
    options: dict[str, object] = {"trust": trust, "node_config": CPU}
    return HospitalRequest(kit, options | more)  # type: ignore[arg-type]


def _agree(sentences: Sequence[str]) -> None:
    """Confirm whatever is asked."""


def _disagree(sentences: Sequence[str]) -> None:
    raise KitError("not confirmed")


def _refused(request: HospitalRequest, said: str, confirm: Confirm = _agree) -> None:
    before = sorted(request.kit.parent.rglob("*"))
    with pytest.raises(FedsiloError) as refused:
        prepare_node(request, confirm)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "fedsilo-kit-" not in str(refused.value), "no scratch folder is named"
    assert sorted(request.kit.parent.rglob("*")) == before


def test_a_kit_is_opened_beside_itself_for_its_owner_alone(kit: Path, fleet: int) -> None:
    setup = prepare_node(_request(kit), _agree)
    home = kit.parent / "north"
    assert (setup.name, setup.superlink, setup.node) == ("north", f"localhost:{fleet}", 7)
    assert home.stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o077 == 0 for p in home.rglob("*"))
    assert setup.rules.trust == "sums"
    assert own_code(home / "state" / OWN / "north"), "its signing key is made at the first start"
    words = lock_and_build_command(setup, "127.0.0.1:8081")
    options = {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}
    assert options["--auth-supernode-private-key"] == str(home / "node.key")
    assert options["--node-config"] == (
        f'site="north" state-dir="{home / "state"}" site-file="{home / "site.yaml"}" device="cpu"'
    )
    assert options["--health-server-address"] == "127.0.0.1:8081"


def test_a_hospital_that_trusts_nobody_does_not_start_without_a_cap(kit: Path) -> None:
    _refused(_request(kit, "nobody"), "add 'max-epsilon' and 'delta'")
    setup = prepare_node(_request(kit, trust="nobody", rule=["max-epsilon=3.0"]), _agree)
    assert setup.rules.max_epsilon == 3.0


def test_a_kit_or_its_folder_starts_again_and_keeps_site_file_and_state(kit: Path) -> None:
    prepare_node(_request(kit), _agree)
    home = kit.parent / "north"
    (home / "state" / "seed").write_text("1")
    rules = (home / "site.yaml").read_text() + "max-rounds: 3\n"
    (home / "site.yaml").write_text(rules)
    key = own_code(home / "state" / OWN / "north")
    for again in (kit, home):
        setup = prepare_node(_request(again), _disagree)  # nothing is asked
        assert setup.key == home / "node.key"
        assert setup.rules.max_rounds == 3
    assert (home / "state" / "seed").read_text() == "1"
    assert own_code(home / "state" / OWN / "north") == key


def test_before_the_first_start_code_and_rules_are_confirmed(kit: Path) -> None:
    said: list[str] = []
    _refused(_request(kit), "not confirmed", _disagree)
    prepare_node(_request(kit, method=["fedavg"]), said.extend)
    text = "\n".join(said)
    assert f"kit {read_kit(kit).code} of north, for the server localhost:" in text
    assert "the server may learn sums over several sites" in text
    assert "a run may only ask for these methods: fedavg" in text
    assert "only the fedsilo that is installed here answers a run" in text


def test_rules_that_are_written_again_are_confirmed_again(kit: Path) -> None:
    prepare_node(_request(kit), _agree)
    home = kit.parent / "north"
    (home / "site.yaml").unlink()
    _refused(_request(home, "server"), "not confirmed", _disagree)
    assert not (home / "site.yaml").exists()
    said: list[str] = []
    prepare_node(_request(home, "nobody", rule=["max-epsilon=2"]), said.extend)
    assert any("all runs together may spend at most epsilon 2" in line for line in said)


def test_no_second_start_comes_between_while_the_operator_is_asked(kit: Path) -> None:
    prepare_node(_request(kit), _agree)
    home = kit.parent / "north"
    (home / "site.yaml").unlink()
    refusals: list[str] = []

    def start_again(sentences: Sequence[str]) -> None:
        with pytest.raises(KitError) as refused:
            os.close(lock_kit_folder(home, "north"))
        refusals.append(str(refused.value))

    prepare_node(_request(home), start_again)
    assert "already runs" in refusals[0]
    os.close(lock_kit_folder(home, "north"))  # the lock is released afterwards


def test_two_first_starts_keep_the_files_of_the_faster_one(kit: Path) -> None:
    home = kit.parent / "north"
    codes: list[str] = []

    def start_another(sentences: Sequence[str]) -> None:
        prepare_node(_request(kit, "sums"), _agree)
        codes.append(own_code(home / "state" / OWN / "north"))

    with pytest.raises(KitError, match="another start has just opened"):
        prepare_node(_request(kit, "server"), start_another)
    assert '"sums"' in (home / "site.yaml").read_text()
    assert [own_code(home / "state" / OWN / "north")] == codes, "its signing key stays"


def test_an_option_that_contradicts_the_hospitals_own_file_is_refused(kit: Path) -> None:
    prepare_node(_request(kit, "nobody", rule=["max-epsilon=3.0"]), _agree)
    _refused(_request(kit, "server"), 'has \'trust\' "nobody", but the option says "server"')


def test_an_opened_folder_that_somebody_sent_is_confirmed_with_its_rules_and_key(
    kit: Path,
) -> None:
    prepare_node(_request(kit), _agree)
    sent = shutil.copytree(kit.parent / "north", kit.parent / "sent" / "north")
    rules = (sent / "site.yaml").read_text().replace('"sums"', '"server"')
    (sent / "site.yaml").write_text(rules)
    _refused(_request(sent, trust=""), "not confirmed", _disagree)
    said: list[str] = []
    prepare_node(_request(sent, trust=""), said.extend)
    text = "\n".join(said)
    assert "was not opened on this disk" in text
    assert f"it brings the signing key {own_code(sent / 'state' / OWN / 'north')}" in text
    assert "the server's operator may see what this site alone answers" in text


def test_the_folder_of_the_version_before_starts_once_it_is_confirmed(
    kit: Path, secrets: Path, fleet: int
) -> None:
    """It has the server's registry and the kit's rules, and no record of what was confirmed."""
    home = kit.parent / "north"
    prepare_node(_request(kit), _agree)
    shutil.rmtree(home / "state")
    (home / "opened.json").unlink()
    (home / "registry.json").write_text("{}")
    card = json.loads((home / "kit.json").read_text())
    card["files"]["registry.json"] = "0" * 64
    card["seal"] = Card.model_validate(card).compute_seal()
    (home / "kit.json").write_text(json.dumps(card))
    _refused(_request(home, trust=""), "not confirmed", _disagree)
    prepare_node(_request(home, trust=""), _agree)
    assert own_code(home / "state" / OWN / "north")
    prepare_node(_request(home, trust=""), _disagree)


def test_a_renewed_kit_replaces_the_nodes_key_alone_and_says_so(
    kit: Path, secrets: Path, fleet: int
) -> None:
    prepare_node(_request(kit), _agree)
    home = kit.parent / "north"
    key = own_code(home / "state" / OWN / "north")
    other = shutil.copytree(secrets, kit.parent / "renewed")
    shutil.copy(other / "south.key", other / "north.key")
    new = _kit(kit.parent, other, f"localhost:{fleet}", "2026-03-01T00:00:00")
    _refused(_request(new), "not confirmed", _disagree)
    said: list[str] = []
    setup = prepare_node(_request(new), said.extend)
    text = "\n".join(said)
    assert f"kit {read_kit(new).code} of north replaces kit {read_kit(kit).code}" in text
    assert "made: 2026-01-02T00:00:00 becomes 2026-03-01T00:00:00" in text
    assert "node.key is replaced" in text
    assert "ca.crt" not in text
    assert (home / "node.key").read_bytes() == (other / "south.key").read_bytes()
    assert setup.rules.trust == "sums"
    assert own_code(home / "state" / OWN / "north") == key, "the others need not compare again"
    assert read_kit(home).code == read_kit(new).code
    prepare_node(_request(new), _disagree)
    # A server whose clock was wrong once could make no newer one
    _refused(_request(kit), "not confirmed", _disagree)


def test_a_second_start_is_refused_here_and_elsewhere(
    kit: Path, request: pytest.FixtureRequest
) -> None:
    prepare_node(_request(kit), _agree)
    lock = lock_kit_folder(kit.parent / "north", "north")
    _refused(_request(kit), "north already runs from")
    os.close(lock)
    prepare_node(_request(kit), _agree)
    state = request.getfixturevalue("online")
    _refused(_request(kit, folder=kit.parent / "there"), "north is already connected to localhost:")
    assert state.beats == 0, "a heartbeat would keep a killed node online"


def test_a_full_disk_of_the_hospital_is_refused_whatever_the_disk_of_scratch_files_has(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda f: Usage(kit.parent not in f.parents))
    folder = kit.parent / "disk"
    folder.mkdir()
    _refused(_request(kit, folder=folder / "north"), f"{folder} has 0.00 GB free")


def test_doctor_looks_at_the_state_of_an_opened_kit_and_at_a_scratch_folder_for_a_zip(
    kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_node(_request(kit), _agree)
    home = kit.parent / "north"
    for named, state in ((home, str(home / "state")), (kit, "fedsilo-kit-")):
        with suppress(SystemExit):  # nothing says whom the zip's hospital trusts
            main(["doctor", "site", "--kit", str(named), "--node-config", CPU[0]])
        (said,) = re.findall("site north, state in (.*)", capsys.readouterr().out)
        assert state in said


def test_whom_a_hospital_trusts_must_be_said(kit: Path) -> None:
    _refused(_request(kit, trust=""), "north has no level of trust: give --trust")


def test_a_key_that_the_superlink_does_not_know_is_refused(
    tmp_path: Path, secrets: Path, fleet: int
) -> None:
    kit = _kit(tmp_path, secrets, f"localhost:{fleet}", node="8")
    _refused(_request(kit), "has no registration of this key")


def test_a_server_of_another_authority_and_one_that_is_silent_are_refused(
    tmp_path: Path, other_secrets: Path, fleet: int
) -> None:
    kit = _kit(tmp_path, other_secrets, f"localhost:{fleet}")
    _refused(_request(kit), f"cannot be trusted by {kit}/ca.crt")
    _refused(_request(_kit(tmp_path, other_secrets, "localhost:1")), "does not answer")


def test_a_kit_of_another_server_does_not_replace_what_is_there(
    kit: Path, secrets: Path, fleet: int
) -> None:
    prepare_node(_request(kit), _agree)
    other = _kit(kit.parent, secrets, f"127.0.0.1:{fleet}", "2026-03-01T00:00:00")
    _refused(_request(other), "is for another server")
    south = _kit(kit.parent, secrets, f"localhost:{fleet}", site="south")
    home = kit.parent / "north"
    _refused(_request(south, folder=home), "is for another hospital")


def test_an_expired_authority_is_refused(kit: Path, secrets: Path, fleet: int) -> None:
    own = shutil.copytree(secrets, kit.parent / "old")
    begin, end = (datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2021))
    certificate(own, own / "ca.key", own / "ca.crt", begin, end)
    old = _kit(kit.parent, own, f"localhost:{fleet}")
    _refused(_request(old), f"certificate {old}/ca.crt ended on 2021-01-01")


def test_data_that_are_not_there_are_refused(kit: Path) -> None:
    request = _request(kit, node_config=(*CPU, 'data-dir="/nowhere"'))
    _refused(request, "north: data folder: data directory /nowhere is missing")


def test_the_server_learns_which_check_a_start_has_failed(kit: Path, connections: Any) -> None:
    empty = f'data-dir="{kit.parent / "empty"}"'
    for request, check in (
        (_request(kit, node_config=(*CPU, empty)), "data folder"),
        (_request(kit, trust=""), "site file"),
    ):
        with pytest.raises(FedsiloError):
            prepare_node(request, _agree)
        assert fault_of(connections.interval) == check
        assert not connections.online, "and the node is not taken for one that works"
    prepare_node(_request(kit), _agree)
    assert fault_of(connections.interval) == ""


def test_a_start_that_fails_does_not_end_the_nodes_own_connection(kit: Path, online: Any) -> None:
    with pytest.raises(FedsiloError):
        prepare_node(_request(kit, trust=""), _agree)
    assert online.online


def test_the_folder_of_a_kit_that_was_altered_starts_nothing(kit: Path) -> None:
    prepare_node(_request(kit), _agree)
    (kit.parent / "north" / "ca.crt").write_text("other")
    with pytest.raises(KitError, match=r"was altered: ca\.crt does not match the seal"):
        prepare_node(_request(kit), _agree)


def test_the_command_becomes_the_node_and_keeps_the_lock(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, words, variables: became.append(words))
    words = ["hospital", "start", str(kit), "--trust", "server", "--device", "cpu"]
    for answer in ("no\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(words) == 1
        assert "nothing was started, because you did not confirm" in capsys.readouterr().err
        assert not (kit.parent / "north").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    assert main(words) == 0
    (command_,) = became
    assert 'device="cpu"' in command_[command_.index("--node-config") + 1]
    assert f"north: kit {read_kit(kit).code} is open in" in capsys.readouterr().out
    assert main(words) == 1
    assert "north already runs from" in capsys.readouterr().err


def test_doctor_takes_a_kit_and_leaves_nothing(
    kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(kit.parent.rglob("*"))
    words = ("--node-config", 'trust="sums"', "--node-config", 'device="cpu"')
    assert main(["doctor", "site", "--kit", str(kit), *words]) == 0
    said = capsys.readouterr().out
    assert "PASSED  admission    north: registered at the SuperLink as node 7" in said
    assert sorted(kit.parent.rglob("*")) == before


def test_a_start_in_the_folder_that_a_kit_replaces_goes_into_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _leave_replaced_folder(tmp_path / "stays")  # nothing was replaced
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path / "old")
    (tmp_path / "old").rmdir()
    _leave_replaced_folder(tmp_path)
    assert Path.cwd() == tmp_path
