"""Connects a run to a Ray cluster, and turns Ray's connection errors into one line.

Flower's actors on other nodes read the app, the data cache and the run directory by the paths of
this machine, but with their own packages. docs/cluster.md says what every node must have.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import one_line
from fedsilo.core.settings_schema import Value

LOCAL = "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON"  # its "env_vars" go into each worker's environment
_TRAVELLING = re.compile(r"(FEDSILO|FLWR)_\w+|OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG")
_LIMIT = 60.0  # seconds for Ray to connect; it takes a second, but tries a dead address for minutes
# A separate process tries the connection, because Ray ends a process when it gives up connecting
_CONNECT = "import logging, ray, sys; ray.init(sys.argv[1], logging_level=logging.ERROR)"


def ray_variables(address: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Build the environment variables that select the Ray cluster and set its workers' environment.

    Args:
        address: the address of a running cluster. If empty, Ray starts a cluster for the run, even
            if another one runs on this machine.
        variables: the environment of the run.
    """
    if not address:
        return {ADDRESS_VARIABLE: LOCAL}
    travelling = {k: value for k, value in variables.items() if _TRAVELLING.fullmatch(k)}
    job = json.dumps({"runtime_env": {"env_vars": travelling}})
    return {ADDRESS_VARIABLE: address, _JOB_VARIABLE: job}


def unused_cluster(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if the environment names a cluster, which is not used; None otherwise."""
    address = environment.get(ADDRESS_VARIABLE, LOCAL)
    if not address or address == LOCAL:
        return None
    return (
        f"{ADDRESS_VARIABLE} names {address}, but this run does not use it: give it by "
        "--ray-address to spread the run over that cluster"
    )


def check_cluster(address: str, resources: Mapping[str, Value]) -> None:
    """Check that Ray connects to the cluster at ``auto`` or ``HOST:PORT``.

    Raises:
        SettingError: Ray does not connect, with Ray's reason; or ``resources`` has a key that is
            only for a cluster started by the run.
    """
    for key in ("init-args-num-cpus", "init-args-num-gpus"):
        if resources.get(key):
            raise SettingError(
                f"resource '{key}' is for a cluster that the run starts, but --ray-address names "
                "a running one: remove the resource"
            )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONNECT, address],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT,
        )
    except subprocess.TimeoutExpired:
        reason = f"it did not answer within {_LIMIT:g} s"
    else:
        if not done.returncode:
            return
        lines = done.stderr.strip().splitlines() or ["Ray gave no reason"]
        reason = one_line(lines[-1], 300)
    raise SettingError(
        f"the Ray cluster at {one_line(address, 100)} cannot be used: {reason}; look at 'ray "
        "status' there, or leave --ray-address out"
    )
