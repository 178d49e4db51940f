"""What each node of a Ray cluster has, asked of the cluster at an address.

It runs as a process of its own, so that Ray's client and its output end with it. It prints one JSON
object: the cluster's address and, for each node, what ``describe`` found there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TOKEN = "token"  # the file that this machine writes and every node must read
_LIMIT = 90.0  # seconds for all nodes' answers


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
    task, asked = ray.remote(num_cpus=0)(describe), {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = task.options(scheduling_strategy=there)
            asked[answer.remote(node["NodeID"], folder, packages)] = node
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LIMIT)
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
            for reference, node in asked.items()
        ],
    }


if __name__ == "__main__":
    print(json.dumps(_described(sys.argv[1], sys.argv[2], sys.argv[3:])))
