"""One server and six hospitals in containers, from an empty engine to a summary and back.

Takes minutes and an engine: run it by ``make test-docker``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDSILO_DOCKER") != "1",
    reason="builds images and needs an engine: make test-docker",
)

SITES = ["s1a", "s1b", "s2a", "s2b", "s3a", "s3b"]
BASE = "fedsilo-base:bookworm"
HOSPITALS = [f"hospital-{number}" for number in range(1, 7)]
CONFIG = (
    'method="uefl" dataset="digits" split.silos=6 run.min-sites=6 split.silo-train-size=40 '
    "split.silo-test-size=10 train.local-epochs=1 train.batch-size=16 network.width=4 "
    "train.mc-passes=3 seed=7 uefl.codes=4 uefl.iteration-rounds=1 uefl.extension-rounds=1 "
    "uefl.gamma=0.0 uefl.centroid-min-count=1 run.reply-timeout=600.0 uefl.stop-when-certain=false"
)
# Silos this small are below a real site's floors, and noise would make each run another
SITE_FILE = """
methods: ["*"]
datasets: ["*"]
records: ["*"]
minimum-batch: 1
minimum-measured: 1
minimum-steps-per-reply: 1
sums-min-count: 1
"""
# The last hospital's disk is small, so that a test can fill it
SMALL_DISK = """
volumes:
  state-6:
    driver_opts: {type: tmpfs, device: tmpfs, o: "size=1100m,uid=10001,gid=10001,mode=700"}
"""
KINDS = ("container", "network", "volume")
_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}")
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Federation:
    """A running federation: the compose command that reaches it, and its settings."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    docker: Path
    project: str

    def compose(self, *words: str, check: bool = True) -> Done:
        return call(*self.command, *words, environment=self.environment, check=check)

    def deploy(self, *words: str) -> Done:
        """Run a ``fedsilo deploy`` command at the server."""
        return self.inside(
            "server", "fedsilo", "deploy", *words, "--deployment", "/state", check=True
        )

    def join(self) -> None:
        """Add all hospitals, and put their kits where compose looks for them."""
        self.deploy("add", *SITES)
        kits = self.folder / "kits"
        call("docker", "cp", f"{self.number('server')}:/state/kits", str(kits))
        for kit in kits.iterdir():
            os.chown(kit, 10001, 10001)

    def inside(self, service: str, *words: str, check: bool = False) -> Done:
        return call("docker", "exec", self.number(service), *words, check=check)

    def number(self, service: str) -> str:
        """Return a container's number; docker's own client is light enough to ask often."""
        labels = {"project": self.project, "service": service}
        pairs = (f"label=com.docker.compose.{key}={value}" for key, value in labels.items())
        words = (word for pair in pairs for word in ("--filter", pair))
        return call("docker", "ps", "-aq", *words).stdout.strip()

    def container(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]]
        found = json.loads(call("docker", "inspect", self.number(service)).stdout)
        return found[0]

    def submit(self, name: str, more: str = "", rounds: int = 2) -> str:
        """Start a run and return its number."""
        said = self.inside(
            "server",
            *("flwr", "run", "/app", "fedsilo", "--format", "json"),
            *("--run-config", f'{CONFIG} rounds={rounds} run.name="{name}" {more}'),
            check=True,
        )
        answer = json.loads(said.stdout)
        assert answer["success"], answer
        return str(answer["run-id"])

    def state_of(self, run: str) -> tuple[str, str]:
        for _ in range(5):  # on a machine that is busy the command ends well and says nothing
            said = self.inside("server", "flwr", "list", "--format", "json", check=True)
            if said.stdout.strip():
                break
            time.sleep(2)
        (found,) = (row for row in json.loads(said.stdout)["runs"] if row["run-id"] == run)
        return found["status"], found["status-details"]

    def wait_for(self, run: str, limit: float = 1800) -> tuple[str, str]:
        end = time.monotonic() + limit
        while (state := self.state_of(run))[0].split(":")[0] != "finished":
            assert time.monotonic() < end, f"run {run} is {state} after {limit:g} s"
            time.sleep(5)
        return state

    def summary(self, name: str) -> dict[str, Any]:
        text = self.inside(
            "server", "cat", f"/state/server/runs/{name}/summary.json", check=True
        ).stdout
        found: dict[str, Any] = json.loads(text)
        return found


def call(*words: str, environment: dict[str, str] | None = None, check: bool = True) -> Done:
    given = os.environ | (environment or {})
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done


def compose_command() -> tuple[str, ...]:
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    return ("docker", "compose")


def settings(folder: Path) -> dict[str, str]:
    """Return the variables of a federation whose hospitals hold the silos of digits."""
    given = {"FEDSILO_KITS": str(folder / "kits"), "FEDSILO_TAG": "test"}
    given["FEDSILO_TRUST"] = "server"
    for number, site in enumerate(SITES, start=1):
        given |= {f"SITE_{number}": site, f"SITE_FILE_{number}": str(folder / "site.yaml")}
    # Digits need no folder; what one hospital has of its own is looked at
    given["DATA_2"] = str(folder / "data" / "s1b")
    if "BASE" not in os.environ:
        given |= {"BASE": BASE, "BUILD_NETWORK": "host"}
    return given


def prepare(folder: Path, docker_folder: Path) -> None:
    """Make the base image, where none is given, a site file and a hospital's folder of data."""
    if "BASE" not in os.environ and not call("docker", "images", "-q", BASE).stdout:
        call("bash", str(docker_folder / "offline-base.sh"), BASE)
    (folder / "site.yaml").write_text(SITE_FILE)
    (folder / "data" / "s1b").mkdir(parents=True)
    (folder / "data" / "s1b" / "s1b.txt").write_text("digits needs no files\n")
    folder.chmod(0o755)


@pytest.fixture(scope="module")
def federation(
    tmp_path_factory: pytest.TempPathFactory, docker_folder: Path
) -> Iterator[Federation]:
    """Build, bring up and register; bring down again, volumes included."""
    if call("docker", "info", check=False).returncode:
        pytest.fail("no engine answers: docker/start-engine.sh starts one")
    folder = tmp_path_factory.mktemp("federation")
    project = f"fedsilo-test-{os.getpid()}"
    (folder / "small.yaml").write_text(SMALL_DISK)
    files = ("-f", str(docker_folder / "compose.cpu.yaml"), "-f", str(folder / "small.yaml"))
    command = (*compose_command(), "-p", project, *files)
    made = Federation(command, settings(folder), folder, docker_folder, project)
    prepare(folder, docker_folder)
    try:
        timed("build", lambda: made.compose("build", "server", "hospital-1"))
        timed("server up", lambda: made.compose("up", "-d", "--no-build", "server"))
        timed("server healthy", lambda: wait_for_health(made, ["server"]))
        timed("join", made.join)
        timed("hospitals up", lambda: made.compose("up", "-d", "--no-build"))
        timed("hospitals healthy", lambda: wait_for_health(made, ["server", *HOSPITALS]))
        yield made
    finally:
        timed("down", lambda: made.compose("down", "--volumes", "--timeout", "20", check=False))
        shutil.rmtree(folder)
    left = [call("docker", kind, "ls", "-q", "--filter", f"name={project}") for kind in KINDS]
    assert [done.stdout for done in left] == ["", "", ""], "something was left behind"


def timed(what: str, action: Any) -> None:
    began = time.monotonic()
    action()
    print(f"{what}: {time.monotonic() - began:.1f} s", file=sys.stderr)


def wait_for_health(made: Federation, services: list[str], limit: float = 600) -> None:
    end = time.monotonic() + limit
    for service in services:
        while (state := made.container(service)["State"])["Health"]["Status"] != "healthy":
            if time.monotonic() > end:
                pytest.fail(f"{service}: {state}\n{made.compose('logs', '--tail=40').stdout}")
            time.sleep(5)


def wait_for_status(
    made: Federation, service: str, status: str, limit: float = 300
) -> dict[str, Any]:
    """Wait until a container is healthy or unhealthy, and return what the engine knows of it."""
    end = time.monotonic() + limit
    while (health := made.container(service)["State"]["Health"])["Status"] != status:
        assert time.monotonic() < end, f"{service} is not {status}: {health}"
        time.sleep(2)
    found: dict[str, Any] = health
    return found


def test_uefl_runs_to_its_summary(federation: Federation) -> None:
    began = time.monotonic()
    run = federation.submit("whole")
    status, details = federation.wait_for(run)
    assert status == "finished:completed", details
    print(f"run: {time.monotonic() - began:.1f} s", file=sys.stderr)
    summary = federation.summary("whole")
    assert (summary["method"], summary["dataset"], summary["rounds"]) == ("uefl", "digits", 2)
    assert sorted(summary["sites"]) == SITES
    assert all(0 <= found["accuracy"] <= 1 for found in summary["sites"].values())


@pytest.mark.parametrize("service", ["server", "hospital-6"])
def test_a_container_is_not_root_and_its_root_is_read_only(
    service: str, federation: Federation
) -> None:
    assert federation.inside(service, "id", "-u").stdout.strip() == "10001"
    for place in ("/", "/opt/venv", "/opt/fedsilo", "/etc"):
        done = federation.inside(service, "touch", f"{place}/written")
        assert "Read-only file system" in done.stderr, place
    found = federation.container(service)
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    # What the kernel grants to the processes, not only what was asked of the engine
    text = federation.inside(service, "cat", "/proc/1/status", check=True).stdout
    granted = dict(line.split(":\t") for line in text.splitlines())
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(granted[name], 16) == 0, name
    assert granted["NoNewPrivs"] == "1"
    assert set(granted["Uid"].split()) == {"10001"}
    assert found["HostConfig"]["PortBindings"] in (None, {})


@pytest.mark.parametrize("name", ["server", "hospital"])
def test_an_image_runs_as_a_numbered_user(name: str, federation: Federation) -> None:
    """Not by a name: Kubernetes cannot tell that a name is not root's."""
    (image,) = json.loads(call("docker", "image", "inspect", f"fedsilo-{name}:test").stdout)
    assert image["Config"]["User"] == "10001:10001"


def test_no_compiler_and_no_secret_but_its_own_is_in_a_container(federation: Federation) -> None:
    for tool in ("gcc", "cc", "g++", "make"):
        assert federation.inside("hospital-1", "sh", "-c", f"command -v {tool}").stdout == ""
    files = federation.inside("hospital-1", "ls", "/run/secrets").stdout.split()
    assert files == ["kit.zip"]
    variables = federation.inside("hospital-1", "env").stdout
    assert "PRIVATE" not in variables


def test_a_hospital_sees_its_own_data_and_cannot_change_them(federation: Federation) -> None:
    assert federation.inside("hospital-2", "ls", "/data").stdout.split() == ["s1b.txt"]
    done = federation.inside("hospital-2", "rm", "/data/s1b.txt")
    assert "Read-only file system" in done.stderr
    assert (federation.folder / "data" / "s1b" / "s1b.txt").exists()


_REACH = """
import socket, sys
host, port = sys.argv[1:]
try:
    socket.create_connection((host, int(port)), timeout=5).close()
    print("open")
except OSError as error:
    print(type(error).__name__, error)
"""


def test_a_hospital_reaches_the_servers_fleet_api_and_nothing_else(federation: Federation) -> None:
    def reach(host: str, port: int) -> str:
        words = ("python", "-c", _REACH, host, str(port))
        return federation.inside("hospital-1", *words).stdout.strip()

    assert reach("server", 9092) == "open"
    assert reach("server", 8000).startswith("ConnectionRefusedError"), "the Control API"
    assert reach("hospital-2", 9094).startswith("gaierror"), "no other hospital has a name"
    networks = federation.container("hospital-2")["NetworkSettings"]["Networks"]
    (other,) = (found["IPAddress"] for found in networks.values())
    assert "open" not in reach(other, 9094)
    assert "open" not in reach("1.1.1.1", 443), "and no way leads out"


def test_no_layer_holds_a_secret(federation: Federation) -> None:
    names = {file.name for file in (federation.folder / "kits").iterdir()}
    for image in ("fedsilo-server:test", "fedsilo-hospital:test"):
        history = call("docker", "history", "--no-trunc", image).stdout
        assert "PRIVATE KEY" not in history
        for layer in layers(image):
            assert [path for path in files_of(layer) if suspicious(path, names)] == []


def layers(image: str) -> list[Path]:
    """Return the folders of an image's layers; needs root and overlay2."""
    (found,) = json.loads(call("docker", "image", "inspect", image).stdout)
    data = found["GraphDriver"]["Data"]
    if os.geteuid() != 0 or "UpperDir" not in data:
        pytest.skip("looking into layers needs root and the storage driver overlay2")
    return [Path(part) for key in ("LowerDir", "UpperDir") for part in data.get(key, "").split(":")]


def files_of(layer: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(layer):
        yield from (Path(folder) / file for file in files)


def suspicious(path: Path, names: set[str]) -> bool:
    """Say whether a file is named as a secret, or holds a private key and not just the words."""
    published = "Crypto/SelfTest/" in path.as_posix()  # a dependency's own tests, with their keys
    if published or path.is_symlink() or path.stat().st_size > 1_000_000:
        return False
    return path.name in names or bool(_KEY.search(path.read_bytes()))


@pytest.mark.parametrize(
    ("image", "words", "said"),
    [
        ("hospital", (), "hospital: /run/secrets/kit.zip does not exist"),
        ("server", (), "server: FEDSILO_HOST is not set"),
    ],
)
def test_a_container_that_lacks_something_says_so_and_ends(
    image: str, words: tuple[str, ...], said: str, federation: Federation
) -> None:
    done = call("docker", "run", "--rm", *words, f"fedsilo-{image}:test", check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_hospital_without_a_level_of_trust_does_not_start(federation: Federation) -> None:
    """Compose has no default, and neither has the image."""
    kit = f"{federation.folder / 'kits' / 's1a.zip'}:/run/secrets/kit.zip:ro"
    words = ("--network", "none", "-e", "FEDSILO_DATA_FROM=", "-v", kit)
    done = call("docker", "run", "--rm", *words, "fedsilo-hospital:test", check=False)
    assert done.returncode == 2
    assert "hospital: s1a has no level of trust" in done.stderr


def test_a_hospital_that_cannot_start_is_unhealthy_and_the_server_knows_why(
    federation: Federation,
) -> None:
    empty = federation.folder / "data" / "empty"
    empty.mkdir()
    changed = replace(federation, environment=federation.environment | {"DATA_5": str(empty)})
    changed.compose("up", "-d", "--no-build", "--no-deps", "hospital-5")
    said = "hospital: s3a: data folder: data directory /data is empty"
    health = wait_for_status(federation, "hospital-5", "unhealthy")
    assert said in health["Log"][-1]["Output"]
    assert federation.compose("logs", "hospital-5").stdout.count(said) == 1
    assert "s3a" in federation.deploy("status").stdout
    members = {
        member["member"]: member
        for member in json.loads(federation.deploy("status", "--json").stdout)
    }
    assert members["s3a"]["seen"] == "offline"
    assert members["s3a"]["times"]["fault"] == "data folder"
    assert members["s3b"]["seen"] == "online"
    # Once the fault is gone, it starts by itself
    (empty / "scan.txt").write_text("digits needs no files\n")
    wait_for_status(federation, "hospital-5", "healthy")
    federation.compose("up", "-d", "--no-build", "--no-deps", "hospital-5")
    wait_for_status(federation, "hospital-5", "healthy")


def test_a_run_that_fails_says_why_where_it_was_started(federation: Federation) -> None:
    words = ("fedsilo", "deploy", "run", "uefl-digits", "--deployment", "/state", "--name", "few")
    few = ("--set", "split.silos=6", "--set", "run.min-sites=7", "--set", "run.away-timeout=5")
    done = federation.inside("server", *words, *few)
    assert done.returncode == 1
    assert "6 of 7" in done.stderr or "'run.min-sites'" in done.stderr, done.stderr


def test_a_run_goes_on_after_a_hospitals_network_was_cut(federation: Federation) -> None:
    found = federation.container("hospital-3")
    (network,) = found["NetworkSettings"]["Networks"]
    run = federation.submit("cut")
    time.sleep(15)
    call("docker", "network", "disconnect", network, found["Id"])
    time.sleep(60)
    assert federation.state_of(run)[0] == "running"
    call("docker", "network", "connect", network, found["Id"])
    status, details = federation.wait_for(run)
    assert status == "finished:completed", details
    assert federation.summary("cut")["sites"] == federation.summary("whole")["sites"]


def test_a_full_disk_is_named_and_the_run_resumes_when_there_is_room(
    federation: Federation,
) -> None:
    private = 'train.optimiser-state="run"'  # so that there is something to keep, each round
    run = federation.submit("full", private, rounds=6)  # not over before the disk is full
    checkpoint = "ls /state/server/runs/full/checkpoints/*.safetensors"
    while federation.inside("server", "sh", "-c", checkpoint).returncode:
        assert federation.state_of(run)[0] != "finished:failed"
        time.sleep(1)
    fill = "dd if=/dev/zero of=/state/fill bs=64k 2>/dev/null; test -e /state/fill"
    federation.inside("hospital-6", "sh", "-c", fill, check=True)
    status, details = federation.wait_for(run)
    assert status == "finished:failed"
    assert "s3b" in details
    assert "No space left on device" in details
    federation.inside("hospital-6", "rm", "/state/fill", check=True)
    status, details = federation.wait_for(
        federation.submit("full", f"{private} run.resume=true", 6)
    )
    assert status == "finished:completed", details
    assert sorted(federation.summary("full")["sites"]) == SITES


def test_a_revoked_hospital_is_shut_out(federation: Federation) -> None:
    assert "s3b is revoked" in federation.deploy("revoke", "s3b").stdout
    federation.compose("restart", "-t", "5", "hospital-6")
    end = time.monotonic() + 120
    while "no registration of this key" not in federation.compose("logs", "hospital-6").stdout:
        assert time.monotonic() < end, "a revoked hospital is still let in"
        time.sleep(3)
    assert "s3b" not in federation.deploy("status").stdout
    status, details = federation.wait_for(federation.submit("without"))
    assert status == "finished:failed"
    assert "5 SuperNodes are connected" in details


def test_one_command_goes_from_images_to_the_table_and_leaves_nothing(
    federation: Federation, docker_folder: Path
) -> None:
    """On the images of these tests, after the federation of these tests has ended."""
    federation.compose("down", "--volumes", "--timeout", "20")
    out = federation.folder / "out"
    done = call(
        *("bash", str(docker_folder / "try.sh"), "cpu", str(out)),
        environment=federation.environment | {"TIMES": str(federation.folder / "times.csv")},
    )
    print(done.stdout, file=sys.stderr)
    assert sorted(json.loads((out / "summary.json").read_text())["sites"]) == SITES
    assert all(site in done.stdout for site in SITES)
    times = dict(
        line.split(",") for line in (federation.folder / "times.csv").read_text().splitlines()
    )
    assert {"build", "server", "admit", "hospitals", "run", "remove"} <= set(times)
    left = [call("docker", kind, "ls", "-q", "--filter", "name=fedsilo-try") for kind in KINDS]
    assert [one.stdout for one in left] == ["", "", ""]
