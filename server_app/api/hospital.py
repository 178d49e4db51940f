"""A hospital's node, from the kit that the server's operator made."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedsilo.server_app.run.arguments import AnyPath, Tell, path_of, several, silent


def start(
    kit: AnyPath,
    *,
    folder: AnyPath | None = None,
    trust: str = "",
    data_dir: AnyPath | None = None,
    device: str = "auto",
    node_config: Sequence[str] = (),
    health: str = "",
    tell: Tell = silent,
) -> None:
    """Open a kit, check it, and become the hospital's node; this process is it until it ends."""
    from fedsilo.server_app.deploy.kit import read_kit
    from fedsilo.server_app.doctor.hospital import HospitalRequest, command, hold, ready

    named = {"device": device, "data-dir": path_of(data_dir)}
    own = [f"{key}={json.dumps(str(value))}" for key, value in named.items() if value]
    request = HospitalRequest(
        Path(kit), folder=path_of(folder), trust=trust, node_config=(*own, *several(node_config))
    )
    setup = ready(request)
    assert setup.key is not None
    home = setup.key.parent
    hold(home, setup.name)
    code = read_kit(home).code
    tell(f"{setup.name}: kit {code} is opened in {home}; connecting to {setup.superlink}")
    words = command(setup, health)
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.execve(words[0], words, os.environ | {"FLWR_HOME": str(home / "flwr"), **quiet})
