"""A Ray cluster that a run is to use: every node is checked before anything starts.

Flower's actors on other nodes read the app, the data's cache and the run directory by the paths of
this machine, and run it with their own packages. So every node must have the same fedsilo, Python
and packages, and see the folder of runs.
"""

import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import counted
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.run.processes import app_folder

AUTO, LOCAL = "auto", "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON"  # what Ray adds to each worker's environment
_TRAVELLING = re.compile(r"(FEDSILO|FLWR)_\w+|OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG")
_HOST_PORT = re.compile(r"(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_ANSWER = 5.0  # seconds for a port to answer
_LIMIT = 150.0  # seconds for all nodes to be asked
_NODES_LIMIT = 90.0  # seconds for all nodes' answers
_NAMED = 3
TOKEN = "token"  # the file that this machine writes and every node must read


@dataclass(frozen=True)
class Cluster:
    """A cluster that passed the checks: its address, and its nodes and CPUs."""

    address: str
    nodes: int
    cpus: float

    def __str__(self) -> str:
        size = f"{counted(self.nodes, 'node')} and {counted(round(self.cpus), 'CPU')}"
        return f"{size} of the Ray cluster at {self.address}"


def ray_variables(cluster: Cluster | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what tells Ray which cluster to use, and what its workers get of ``variables``.

    Without a cluster Ray starts one of its own, even if another one runs on this machine.
    """
    if cluster is None:
        return {ADDRESS_VARIABLE: LOCAL}
    travelling = {k: value for k, value in variables.items() if _TRAVELLING.fullmatch(k)}
    job = json.dumps({"runtime_env": {"env_vars": travelling}})
    return {ADDRESS_VARIABLE: cluster.address, _JOB_VARIABLE: job}


def unused_cluster(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a line that the cluster which the environment names is not used, if it names one."""
    address = environment.get(ADDRESS_VARIABLE, LOCAL)
    if not address or address == LOCAL:
        return None
    return (
        f"{ADDRESS_VARIABLE} names {address}, which is not used: name it with --ray-address to "
        "spread the run over it"
    )


def fit_cluster(address: str, folder: Path, resources: Mapping[str, Value]) -> Cluster:
    """Return the cluster at ``auto`` or ``HOST:PORT`` if a run can be spread over it.

    All its nodes must share ``folder``, that of the run directories.

    Raises:
        SettingError: nothing answers there, or a node cannot be used; named, with what to do.
    """
    for key in ("init-args-num-cpus", "init-args-num-gpus"):
        if resources.get(key):
            raise SettingError(
                f"resource '{key}' is for a cluster that the run starts itself, and --ray-address "
                "names one that is running: leave it out"
            )
    _refuse_silent(address)
    project = tomllib.loads((app_folder() / "pyproject.toml").read_text())["project"]
    names = (re.match(r"[\w.-]+", text) for text in project["dependencies"])
    packages = sorted({"ray", *(match[0] for match in names if match)})
    with _shared(folder) as (shared, token):
        found = _asked(address, shared, packages)
        own = describe("here", str(shared), packages)
        for node in found["nodes"]:
            if fault := _fault(node, own, token, shared):
                raise SettingError(f"node {node['host']} of the Ray cluster at {address} {fault}")
    cpus = sum(float(node["cpus"]) for node in found["nodes"])
    return Cluster(str(found["address"]), len(found["nodes"]), cpus)


def _refuse_silent(address: str) -> None:
    if address == AUTO:
        return
    match = _HOST_PORT.fullmatch(address)
    if not match or not 0 < int(match["port"]) < 65536:
        raise SettingError(f"--ray-address is {address!r}; it must be auto or HOST:PORT")
    try:
        where = (match["host"].strip("[]"), int(match["port"]))
        socket.create_connection(where, _ANSWER).close()
    except OSError as error:
        raise SettingError(
            f"no Ray cluster answers at {address} ({error}): start one ('ray start --head "
            f"--port={match['port']}'), or leave --ray-address out"
        ) from None


@contextmanager
def _shared(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield a folder next to the runs, and a secret in it that only those who see it can know."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shared = tempfile.TemporaryDirectory(prefix=".fedsilo-cluster-", dir=folder)
    except OSError as error:
        raise SettingError(f"folder {folder} cannot be written: {error.strerror}") from None
    with shared:
        token = secrets.token_hex(16)
        (Path(shared.name) / TOKEN).write_text(token)
        yield Path(shared.name), token


def _asked(address: str, shared: Path, packages: Sequence[str]) -> dict[str, Any]:
    """Return what a separate process found at each node."""
    command = [sys.executable, "-m", "fedsilo.server_app.run.ray_cluster", address, str(shared)]
    environment = dict(os.environ)
    if address != AUTO:
        environment.pop(ADDRESS_VARIABLE, None)
    try:
        done = subprocess.run(
            [*command, *packages],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise SettingError(
            f"the Ray cluster at {address} did not answer within {_LIMIT:.0f} s: look at "
            "'ray status' there"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise SettingError(
            f"the Ray cluster at {address} cannot be used: {lines[-1][:300]}; look at 'ray "
            "status' there, or leave --ray-address out"
        )
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _fault(node: Mapping[str, Any], own: Mapping[str, Any], token: str, shared: Path) -> str | None:
    """Return what is wrong with a node and what to do, or None if nothing is."""
    found = node["found"]
    if found is None:
        return "did not answer: look at 'ray status', or stop Ray there"
    if found["token"] != token or not (shared / node["id"]).is_file():
        return (
            f"does not share {shared.parent}: 'out' must be a folder that all nodes see under the "
            "same path; name one with --out"
        )
    if not found["fedsilo"]:
        return f"has no fedsilo that can be imported ({found['fault'][:200]}): install it there"
    if found["python"] != own["python"]:
        return f"has Python {found['python']}, this machine {own['python']}: install the same"
    there, here = found["packages"], own["packages"]
    if other := [
        f"{name} {there.get(name) or 'nowhere'} where this machine has {version or 'none'}"
        for name, version in here.items()
        if there.get(name) != version
    ]:
        return f"has {_some(other)}: install the same packages"
    there, here = json.loads(found["fedsilo"]), json.loads(own["fedsilo"])
    if other := sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n)):
        return f"has another fedsilo, {_some(other)} differ: install this machine's"
    return None


def _some(differing: Sequence[str]) -> str:
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return ", ".join(differing[:_NAMED]) + more


def describe(node: str, folder: str, packages: Sequence[str]) -> dict[str, Any]:
    """Return a node's versions of ``packages`` and what it sees of ``folder``; runs there.

    It writes a file into the folder, which must be shared, under the node's id.
    """
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = dict.fromkeys(packages, "")
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": versions,
        "fedsilo": "",
        "token": "",
        "fault": "",
    }
    try:
        from fedsilo.client_app.worker.installed import installed_app

        found["fedsilo"] = json.dumps(dict(installed_app().digests), sort_keys=True)
    except Exception as error:  # of whatever kind: the node cannot run fedsilo
        found["fault"] = f"{type(error).__name__}: {error}"
    try:
        found["token"] = (Path(folder) / TOKEN).read_text()
        (Path(folder) / node).write_text(node)
    except OSError as error:
        found["token"] = f"{error.strerror}"
    return found


def _described(address: str, folder: str, packages: Sequence[str]) -> dict[str, Any]:
    """Connect to the cluster as Flower does and ask every node that is alive."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    task, questions = ray.remote(num_cpus=0)(describe), {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = task.options(scheduling_strategy=there)
            questions[answer.remote(node["NodeID"], folder, packages)] = node
    done, _ = ray.wait(list(questions), num_returns=len(questions), timeout=_NODES_LIMIT)
    answers = {reference: ray.get(reference) for reference in done}
    return {
        "address": ray.get_runtime_context().gcs_address,
        "nodes": [
            {
                "id": node["NodeID"],
                "host": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
                "cpus": node["Resources"].get("CPU", 0.0),
                "found": answers.get(reference),
            }
            for reference, node in questions.items()
        ],
    }


if __name__ == "__main__":
    print(json.dumps(_described(sys.argv[1], sys.argv[2], sys.argv[3:])))
