"""``hospital start`` opens a kit once, after checks, and leaves nothing of one that it refuses."""

import itertools
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedsilo.models.contract.errors import FedsiloError
from fedsilo.server_app.cli.main import main
from fedsilo.server_app.deploy.kit import AUTHORITY, KEY, REGISTRY, KitError, make_kit, read_kit
from fedsilo.server_app.doctor import machine
from fedsilo.server_app.doctor.hospital import HospitalRequest, command, hold, ready
from tests.server_app.doctor.conftest import certificate

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
    names = {AUTHORITY: "ca.crt", KEY: f"{site}.key", REGISTRY: "registry.json"}
    files = {name: (secrets / own).read_bytes() for name, own in names.items()}
    path = folder / f"{site}-{made[:10]}.zip"
    path.touch(mode=0o600)
    path.write_bytes(make_kit(site, server, node, made, files))
    return path


@pytest.fixture
def kit(tmp_path: Path, secrets: Path, fleet: int) -> Path:
    return _kit(tmp_path, secrets, f"localhost:{fleet}")


def _request(kit: Path, **more: object) -> HospitalRequest:
    return HospitalRequest(kit, trust="sums", node_config=CPU, **more)  # type: ignore[arg-type]


def _refused(request: HospitalRequest, said: str) -> None:
    before = sorted(request.kit.parent.rglob("*"))
    with pytest.raises(FedsiloError) as refused:
        ready(request)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "fedsilo-kit-" not in str(refused.value), "no scratch folder is named"
    assert sorted(request.kit.parent.rglob("*")) == before


def test_a_kit_is_opened_beside_itself_for_its_owner_alone(kit: Path, fleet: int) -> None:
    setup = ready(_request(kit))
    home = kit.parent / "north"
    assert (setup.name, setup.superlink, setup.node) == ("north", f"localhost:{fleet}", 7)
    assert home.stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o077 == 0 for p in home.rglob("*"))
    assert "trust: sums\n" in (home / "site.yaml").read_text()
    words = command(setup, "127.0.0.1:8081")
    options = {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}
    assert options["--auth-supernode-private-key"] == str(home / "node.key")
    assert options["--node-config"] == (
        f'site="north" state-dir="{home / "state"}" site-file="{home / "site.yaml"}" '
        f'signing-key="{home / "node.key"}" site-registry="{home / "registry.json"}" device="cpu"'
    )
    assert options["--health-server-address"] == "127.0.0.1:8081"


def test_a_hospital_that_trusts_nobody_does_not_start_without_a_cap(kit: Path) -> None:
    _refused(HospitalRequest(kit, trust="nobody", node_config=CPU), "add 'max-epsilon' and 'delta'")
    ready(HospitalRequest(kit, trust="nobody", node_config=(*CPU, "max-epsilon=3.0")))


def test_a_kit_or_its_folder_starts_again_and_keeps_site_file_and_state(kit: Path) -> None:
    ready(_request(kit))
    home = kit.parent / "north"
    (home / "state" / "seed").write_text("1")
    rules = (home / "site.yaml").read_text() + "max-rounds: 3\n"
    (home / "site.yaml").write_text(rules)
    corrected = json.loads((home / "registry.json").read_text()) | {"west": {"key": "SHA256:x"}}
    (home / "registry.json").write_text(json.dumps(corrected))
    for again in (kit, home):
        setup = ready(HospitalRequest(again, node_config=CPU))
        assert setup.key == home / "node.key"
        assert setup.rules.max_rounds == 3
    assert (home / "state" / "seed").read_text() == "1"
    assert json.loads((home / "registry.json").read_text()) == corrected


def test_a_renewed_kit_replaces_the_key_alone_and_an_old_one_is_refused(
    kit: Path, secrets: Path, fleet: int
) -> None:
    ready(_request(kit))
    home = kit.parent / "north"
    other = shutil.copytree(secrets, kit.parent / "renewed")
    shutil.copy(other / "south.key", other / "north.key")
    entries = json.loads((other / "registry.json").read_text())
    (other / "registry.json").write_text(json.dumps({"north": entries["south"]}))
    new = _kit(kit.parent, other, f"localhost:{fleet}", "2026-03-01T00:00:00")
    ready(HospitalRequest(new, node_config=CPU))
    assert (home / "node.key").read_bytes() == (other / "south.key").read_bytes()
    assert "trust: sums\n" in (home / "site.yaml").read_text()
    assert read_kit(home).code == read_kit(new).code
    _refused(_request(kit), "is older than the kit in")


def test_a_second_start_is_refused_here_and_elsewhere(
    kit: Path, request: pytest.FixtureRequest
) -> None:
    ready(_request(kit))
    lock = hold(kit.parent / "north", "north")
    _refused(_request(kit), "north runs already from")
    os.close(lock)
    ready(_request(kit))
    state = request.getfixturevalue("online")
    _refused(_request(kit, folder=kit.parent / "there"), "north is connected to localhost:")
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
    ready(_request(kit))
    home = kit.parent / "north"
    for named, state in ((home, str(home / "state")), (kit, "fedsilo-kit-")):
        with suppress(SystemExit):  # the line 'trust' of the zip's site file is empty
            main(["doctor", "site", "--kit", str(named), "--node-config", CPU[0]])
        (said,) = re.findall("site north, state in (.*)", capsys.readouterr().out)
        assert state in said


def test_the_trust_line_must_be_filled_in(kit: Path) -> None:
    _refused(HospitalRequest(kit, node_config=CPU), "no line of site.yaml says whom north trusts")


def test_a_key_that_the_superlink_does_not_know_is_refused(
    tmp_path: Path, secrets: Path, fleet: int
) -> None:
    kit = _kit(tmp_path, secrets, f"localhost:{fleet}", node="8")
    _refused(_request(kit), "has no registration of this key at its SuperLink")


def test_a_server_of_another_authority_and_one_that_is_silent_are_refused(
    tmp_path: Path, other_secrets: Path, fleet: int
) -> None:
    kit = _kit(tmp_path, other_secrets, f"localhost:{fleet}")
    _refused(_request(kit), f"is not to be trusted with {kit}/ca.crt")
    _refused(_request(_kit(tmp_path, other_secrets, "localhost:1")), "does not answer")


def test_a_kit_of_another_server_does_not_replace_what_is_there(
    kit: Path, secrets: Path, fleet: int
) -> None:
    ready(_request(kit))
    other = _kit(kit.parent, secrets, f"127.0.0.1:{fleet}", "2026-03-01T00:00:00")
    _refused(_request(other), "of another server than the kit in")
    south = _kit(kit.parent, secrets, f"localhost:{fleet}", site="south")
    home = kit.parent / "north"
    _refused(_request(south, folder=home), "of another hospital than the kit in")


def test_an_expired_authority_is_refused(kit: Path, secrets: Path, fleet: int) -> None:
    own = shutil.copytree(secrets, kit.parent / "old")
    begin, end = (datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2021))
    certificate(own, own / "ca.key", own / "ca.crt", begin, end)
    old = _kit(kit.parent, own, f"localhost:{fleet}")
    _refused(_request(old), f"certificate {old}/ca.crt ended on 2021-01-01")


def test_data_that_are_not_there_are_refused(kit: Path) -> None:
    request = HospitalRequest(kit, trust="sums", node_config=(*CPU, 'data-dir="/nowhere"'))
    _refused(request, "north: data folder: data directory /nowhere is missing")


def test_the_folder_of_a_kit_that_was_altered_starts_nothing(kit: Path) -> None:
    ready(_request(kit))
    (kit.parent / "north" / "ca.crt").write_text("other")
    with pytest.raises(KitError, match=r"was altered: ca\.crt is not as sealed"):
        ready(_request(kit))


def test_the_command_becomes_the_node_and_keeps_the_lock(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, words, variables: became.append(words))
    words = ["hospital", "start", str(kit), "--trust", "server", "--device", "cpu"]
    assert main(words) == 0
    (command_,) = became
    assert 'device="cpu"' in command_[command_.index("--node-config") + 1]
    assert f"north: kit {read_kit(kit).code} is opened in" in capsys.readouterr().out
    assert main(words) == 1
    assert "north runs already from" in capsys.readouterr().err


def test_doctor_takes_a_kit_and_leaves_nothing(
    kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(kit.parent.rglob("*"))
    words = ("--node-config", 'trust="sums"', "--node-config", 'device="cpu"')
    with pytest.raises(SystemExit):  # the line 'trust' of its site file is empty
        main(["doctor", "site", "--kit", str(kit), *words])
    said = capsys.readouterr().out
    assert "PASSED  admission    north: registered at the SuperLink as node 7" in said
    assert sorted(kit.parent.rglob("*")) == before
