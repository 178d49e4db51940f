"""Two studies on one server, with a hospital of the same name in both: nothing is shared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsilo.client_app.privacy.signing import own_code
from fedsilo.deployment import joining
from fedsilo.deployment.commands import make_secrets, plan_deployment, prepare
from fedsilo.deployment.deployment import Deployment, read_deployment
from fedsilo.deployment.doctor.credentials import check_signature
from fedsilo.deployment.doctor.findings import Refused
from fedsilo.deployment.doctor.hospital_checks import HospitalRequest, prepare_node
from fedsilo.deployment.doctor.site import SiteSetup
from fedsilo.deployment.kit import KitError
from fedsilo.server_app.config.operator_files import registered_keys
from tests.fedsilo.deployment.conftest import FakeSuperLink

TRUST = {"hearts": "server", "scans": "sums"}


@dataclass(frozen=True)
class Study:
    """A study: its deployment, the kit of its hospital north, and what north has opened."""

    deployment: Deployment
    kit: Path
    north: SiteSetup


def _start(kit: Path, folder: Path, trust: str) -> SiteSetup:
    """Open a kit as ``fedsilo hospital start`` does, without asking a server."""

    def agree(sentences: Sequence[str]) -> None:
        assert sentences

    request = HospitalRequest(kit, {"trust": trust, "folder": folder})
    return prepare_node(request, agree, lambda setup: None)


@pytest.fixture
def studies(superlink: FakeSuperLink, tmp_path: Path) -> dict[str, Study]:
    """Return two studies by name."""
    made = {}
    for port, (name, trust) in enumerate(TRUST.items(), 9092):
        planned = plan_deployment(tmp_path / name, "fedavg-digits", {"host": f"localhost:{port}"})
        prepare(planned)
        make_secrets(planned)
        (kit,) = joining.add(planned.folder, ["north"], print)
        north = _start(kit.path, tmp_path / "north" / name, trust)
        made[name] = Study(read_deployment(planned.folder), kit.path, north)
    return made


def test_two_studies_share_no_authority_key_port_folder_or_registration(
    studies: dict[str, Study],
) -> None:
    hearts, scans = studies.values()
    for one, other in ((hearts, scans), (scans, hearts)):
        with pytest.raises(Refused):
            check_signature(
                one.deployment.secrets / "server.crt", other.deployment.secrets / "ca.crt"
            )
    assert not set(hearts.deployment.ports.values()) & set(scans.deployment.ports.values())
    assert hearts.deployment.runs != scans.deployment.runs
    keys = [registered_keys(study.deployment.registry)["north"] for study in studies.values()]
    assert keys[0] != keys[1]
    joining.revoke(hearts.deployment.folder, "north", print)
    assert "north" in registered_keys(scans.deployment.registry)
    assert "north" not in registered_keys(hearts.deployment.registry)


def test_a_hospital_keeps_rules_state_quotas_and_keys_of_each_study_apart(
    studies: dict[str, Study],
) -> None:
    setups = {name: study.north for name, study in studies.items()}
    assert {name: setup.rules.trust for name, setup in setups.items()} == TRUST
    # Run book, ledger and audit log are in these folders
    assert setups["hearts"].own_folder != setups["scans"].own_folder
    codes = {own_code(setup.own_folder) for setup in setups.values()}
    assert len(codes) == 2


def test_a_kit_of_one_study_is_refused_in_the_folder_of_the_other(
    studies: dict[str, Study], tmp_path: Path
) -> None:
    folder = tmp_path / "north" / "scans"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(KitError):
        _start(studies["hearts"].kit, folder, "sums")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
