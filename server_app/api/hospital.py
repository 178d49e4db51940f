"""A hospital's node, from the kit that the server's operator made, and its signing keys."""

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
    method: Sequence[str] = (),
    dataset: Sequence[str] = (),
    rule: Sequence[str] = (),
    yes: bool = False,
    data_dir: AnyPath | None = None,
    device: str = "auto",
    node_config: Sequence[str] = (),
    health: str = "",
    tell: Tell = silent,
) -> None:
    """Open a kit, confirm its code and the rules, and become the hospital's node."""
    from fedsilo.client_app.privacy.signing import own_code
    from fedsilo.server_app.deploy.kit import KitError, read_kit
    from fedsilo.server_app.deploy.rules import RuleOptions
    from fedsilo.server_app.doctor.hospital import HospitalRequest, command, hold, ready

    def confirm(sentences: Sequence[str]) -> None:
        for sentence in sentences:
            tell(sentence)
        if yes:
            return
        try:
            answer = input("Is the code the same, and do you agree? Type yes: ")
        except EOFError:
            answer = ""
        if answer.strip().lower() != "yes":
            raise KitError(
                "nothing was started, as you did not confirm: answer yes, or give --yes if nobody "
                "is there to answer"
            )

    named = {"device": device, "data-dir": path_of(data_dir)}
    own = [f"{key}={json.dumps(str(value))}" for key, value in named.items() if value]
    rules = RuleOptions(trust, several(method), several(dataset), several(rule))
    request = HospitalRequest(
        Path(kit), path_of(folder), rules, node_config=(*own, *several(node_config))
    )
    setup = ready(request, confirm)
    assert setup.key is not None
    home = setup.key.parent
    hold(home, setup.name)
    code = read_kit(home).code
    tell(f"{setup.name}: kit {code} is opened in {home}; connecting to {setup.superlink}")
    tell(f"{setup.name}: signs in secure sums by key {own_code(setup.own_folder)}")
    words = command(setup, health)
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.execve(words[0], words, os.environ | {"FLWR_HOME": str(home / "flwr"), **quiet})


def keys(folder: AnyPath, *, compared: Sequence[str] = (), forget: Sequence[str] = ()) -> list[str]:
    """List the signing keys of this hospital and the others, and mark those that were compared."""
    from fedsilo.server_app.deploy.hospital_keys import describe_keys, find_own_folder, mark_keys

    own = find_own_folder(Path(folder))
    mark_keys(own, several(compared), several(forget))
    return describe_keys(own)
