"""Doctor against a server and three hospitals as processes: well, and broken one by one."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.main import main
from fedsilo.core.processes import end_trees
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment, read_deployment
from tests.support.setting_keys import as_keys

SITES = 3
# One file for all three; a test narrows what it allows
SITE_FILE = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*"]\n'
Tiny = Callable[..., dict[str, Value]]
Found = list[dict[str, Any]]


@pytest.fixture
def doctor(
    folder: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Found]]:
    """Return a function that looks at a target of the deployment: exit code and findings."""

    def look(target: str, *words: str, **changes: Value) -> tuple[int, Found]:
        sets = []
        if target != "server":
            values = tiny("fedavg", silos=SITES) | as_keys(changes)
            sets = ["fedavg-digits", *(f"--set={k}={json.dumps(v)}" for k, v in values.items())]
        capsys.readouterr()
        try:
            code = main(["doctor", target, *sets, "--deployment", str(folder), "--json", *words])
        except SystemExit as end:
            code = int(str(end.code))
        found: Found = json.loads(capsys.readouterr().out)["findings"]
        return code, found

    return look


def _failed(found: Found) -> dict[str, dict[str, Any]]:
    return {f"{f['check']} {f['about']}".strip(): f for f in found if f["status"] == "FAILED"}


def test_a_deployment_that_is_well_passes(
    doctor: Callable[..., tuple[int, Found]], deployment: Deployment
) -> None:
    code, found = doctor("server")
    assert (code, _failed(found)) == (0, {})
    assert {f["status"] for f in found} == {"PASSED"}
    code, found = doctor("site")
    assert (code, _failed(found)) == (0, {})
    assert [f["about"] for f in found if f["check"] == "clock"] == deployment.sites
    assert {f["check"] for f in found if f["status"] == "SKIPPED"} == {"data folder", "gpu"}
    before = sorted(path.name for path in deployment.home("server").iterdir())
    code, found = doctor("run")
    assert (code, _failed(found)) == (0, {})
    assert [f["about"] for f in found if f["check"] == "sites"] == deployment.sites
    assert sorted(path.name for path in deployment.home("server").iterdir()) == before
    assert not deployment.runs.exists()


def test_what_a_hospital_refuses_is_told_at_the_server_and_at_the_site(
    doctor: Callable[..., tuple[int, Found]], folder: Path
) -> None:
    rules = folder / "site.yaml"
    before = rules.read_text()
    rules.write_text(before.replace('methods: ["*"]', "methods: [local]"))
    try:
        code, found = doctor("run")
        assert code == 1
        refused = [f["said"] for f in found if f["check"] == "sites" and f["status"] == "FAILED"]
        assert len(refused) == SITES
        assert all("the site file does not allow method 'fedavg'" in said for said in refused)
        code, found = doctor("site", "--site", "s1a")
        assert code == 1
        assert "does not allow method 'fedavg'" in _failed(found)["requests s1a"]["said"]
    finally:
        rules.write_text(before)


def test_a_site_that_is_killed_is_named_and_the_fix_brings_it_back(
    doctor: Callable[..., tuple[int, Found]], folder: Path
) -> None:
    process = read_deployment(folder).process("s2a")
    assert process
    process.send_signal(signal.SIGKILL)
    end_trees(process.children(recursive=True) if process.is_running() else [])
    process.wait(10)
    code, found = doctor("run", min_sites=2)
    assert code == 1
    told = _failed(found)["members"]
    assert "s2a of" in told["said"]
    assert told["fix"].startswith("fedsilo deploy up --deployment ")
    assert [f["about"] for f in found if f["check"] == "sites" and f["about"]] == ["s1a", "s3a"]
    assert main(told["fix"].split()[1:]) == 0
    code, found = doctor("run")
    assert (code, _failed(found)) == (0, {})


def test_keys_and_registry_are_looked_at_where_they_lie(
    doctor: Callable[..., tuple[int, Found]], deployment: Deployment
) -> None:
    key = deployment.secrets / "s3a.key"
    key.chmod(0o644)
    code, found = doctor("site", "--site", "s3a")
    key.chmod(0o600)
    assert code == 1
    assert "chmod 600" in _failed(found)["key s3a"]["fix"]
    entries = json.loads(deployment.registry.read_text())
    deployment.registry.write_text(json.dumps({k: v for k, v in entries.items() if k != "s3a"}))
    code, found = doctor("server")
    deployment.write_registry()
    assert code == 1
    assert "hospital s3a has no line in the registry" in _failed(found)["registry"]["said"]


def test_a_server_that_is_down_is_one_line(
    doctor: Callable[..., tuple[int, Found]], folder: Path, deployment: Deployment
) -> None:
    assert main(["deploy", "down", "--deployment", str(folder)]) == 0
    code, found = doctor("run")
    assert code == 1
    assert "is down" in _failed(found)["members"]["said"]
    assert list(_failed(found)) == ["members"], "the other checks say that they cannot look"
    code, found = doctor("site", "--site", "s1a")
    assert "does not answer" in _failed(found)["server s1a"]["said"]
    code, found = doctor("server")
    assert (code, _failed(found)) == (0, {}), "nothing is wrong with a server that is not started"
