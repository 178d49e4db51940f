"""The Kubernetes manifests: each is valid, and holds what compose.yaml holds; no cluster here."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
COMPOSE = FOLDER.parent / "compose.yaml"
ROLES = ("server", "hospital")
MANIFESTS = sorted(
    path for path in FOLDER.rglob("*.yaml") if path.name not in ("kustomization.yaml", "site.yaml")
)


def _pod(role: str) -> dict[str, Any]:
    manifest = yaml.safe_load((FOLDER / role / "statefulset.yaml").read_text())
    pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_manifest_is_valid(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="install the extra 'test'")
    for manifest in yaml.safe_load_all(path.read_text()):
        validate.validate(manifest, "1.32", strict=True)


@pytest.mark.parametrize("folder", sorted((FOLDER / "example").iterdir()), ids=lambda p: p.name)
def test_an_example_is_built_by_kustomize(folder: Path, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="install the extra 'test'")
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    copy = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copy)
    there = copy / "example" / folder.name
    (there / "secrets").mkdir()
    (there / "secrets" / "north.zip").write_text("a secret")
    command = ["kubectl", "kustomize", str(there)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    built = list(yaml.safe_load_all(done.stdout))
    for manifest in built:
        validate.validate(manifest, "1.32", strict=True)
    kinds = [manifest["kind"] for manifest in built]
    assert {"Namespace", "ConfigMap", "StatefulSet", "NetworkPolicy"} <= set(kinds)
    if folder.name == "server":
        return
    (pod,) = [m["spec"]["template"]["spec"] for m in built if m["kind"] == "StatefulSet"]
    named = {m["metadata"]["name"] for m in built if m["kind"] == "Secret"}
    mounted = {volume["name"]: volume for volume in pod["volumes"]}["mounted"]["secret"]
    assert mounted["secretName"] in named, "the pod mounts the secret by its hashed name"
    assert mounted["defaultMode"] == 0o440


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_is_confined_as_composes_containers_are(role: str) -> None:
    container = yaml.safe_load(COMPOSE.read_text())["x-container"]
    pod = _pod(role)
    user, group = map(int, container["user"].split(":"))
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (
        user,
        group,
    )
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for one in (*pod.get("initContainers", ()), *pod["containers"]):
        confined = one["securityContext"]
        assert confined["readOnlyRootFilesystem"] is container["read_only"] is True
        assert confined["capabilities"] == {"drop": container["cap_drop"]}
        assert confined["allowPrivilegeEscalation"] is False
        assert one["image"].startswith(f"fedsilo-{role}:")


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_mounts_what_the_entry_point_reads(role: str) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    service = services["server" if role == "server" else "hospital-1"]
    pod = _pod(role)
    (main,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in main["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    manifest = yaml.safe_load((FOLDER / role / "statefulset.yaml").read_text())
    claims = {claim["metadata"]["name"] for claim in manifest["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in mounts.values()} <= volumes | claims
    assert claims == {"state", "cache"}
    wanted = {"/state", "/cache", "/tmp"}
    wanted |= {"/data", "/etc/fedsilo", "/run/secrets"} if role == "hospital" else set()
    assert set(mounts) == wanted
    assert all(mounts[path].get("readOnly") for path in wanted - {"/state", "/cache", "/tmp"})
    if role == "server":
        return
    mounted = [mount["target"] for mount in service["volumes"] if isinstance(mount, dict)]
    (copies,) = pod["initContainers"]
    copied = {Path(word).name for word in copies["command"] if word.startswith("/mounted/")}
    assert [f"/run/secrets/{name}" for name in copied] == mounted, (
        "each secret is copied to where only its owner may read it"
    )
    assert copies["command"][:3] == ["install", "-m", "600"]


@pytest.mark.parametrize("role", ROLES)
def test_health_is_asked_as_the_image_asks_it(role: str) -> None:
    dockerfile = (FOLDER.parent / "Dockerfile").read_text()
    (main,) = _pod(role)["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = main[probe]["exec"]["command"]
        assert f'CMD ["{command[0]}", "{command[1]}"]' in dockerfile


def test_nobody_reaches_a_hospital_and_only_one_port_the_server() -> None:
    hospital, server = (
        yaml.safe_load((FOLDER / role / "network-policy.yaml").read_text())["spec"]
        for role in ("hospital", "server")
    )
    assert set(hospital["policyTypes"]) == set(server["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in hospital
    assert {port["port"] for rule in hospital["egress"] for port in rule["ports"]} == {53, 9092}
    assert [port["port"] for rule in server["ingress"] for port in rule["ports"]] == [9092]
