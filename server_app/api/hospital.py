"""A hospital's node, from the kit that the server's operator made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedsilo.models.contract.errors import SettingError
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


def counts(
    *, kit: AnyPath | None = None, node_config: Sequence[str] = (), draw_again: bool = False
) -> Iterator[str]:
    """Tell which noisy counts of samples a hospital keeps for all runs, and draw them again.

    Where the noise made a bad draw, such as of eight samples in place of thirty, it stays bad: that
    is how it hides patients. Another draw costs epsilon like the first one.

    Args:
        kit: the folder into which the hospital's kit was opened, or None for ``node_config``.
        node_config: the node's, with 'site', 'state-dir' and, in it or in its site file, a cap.
        draw_again: charge the hospital's ledger for another draw, which the next run makes.

    Yields:
        A line for each data set that was told of, and for what is charged.

    Raises:
        SettingError: the hospital has no name, no folder or no cap on epsilon.
        EpsilonSpentError: another draw would bring epsilon above the cap; nothing changes.
    """
    from flwr.app import Context, RecordDict

    from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
    from fedsilo.client_app.privacy.told_counts import draw_again as pay_for_another
    from fedsilo.client_app.privacy.told_counts import kept_counts
    from fedsilo.client_app.site.node import own_folder, owner_only
    from fedsilo.client_app.site.sentences import effective
    from fedsilo.client_app.worker.hospital import parse_node_config
    from fedsilo.server_app.deploy.kit import read_kit
    from fedsilo.server_app.doctor.hospital import setup_of

    node = parse_node_config(several(node_config))
    if kit is not None:
        home = Path(kit).expanduser().resolve()
        node = dict(setup_of(read_kit(home), home, several(node_config)).node_config)
    context = Context(0, 0, dict(node), RecordDict(), {})
    site = str(node.get("site", ""))
    folder, rules = own_folder(context, site), effective(context)
    if not site or folder is None or not rules.max_epsilon:
        raise SettingError(
            "counts have noise at a hospital that has a 'site', a 'state-dir' and 'max-epsilon': "
            "name its opened kit by --kit, or all three by --node-config"
        )
    hospital = Ledger(folder / LEDGER, rules.max_epsilon, rules.delta, of_all_runs=True)
    kept = kept_counts(hospital)
    if not kept:
        yield f"{site}: no run has asked for counts yet"
    for told in kept.values():
        noise = f"noise {told.noise:.3g}" if told.noise else "noise of a run of an older version"
        totals = {split: sum(each) for split, each in told.counts.items()}
        parts = ", ".join(f"{split} {total}" for split, total in totals.items())
        yield f"{site}: {parts} ({noise}{'; drawn again at the next run' if told.again else ''})"
    if kept and draw_again:
        before = hospital.epsilon()
        with owner_only():
            noise_now = pay_for_another(rules.counts_noise, hospital)
        yield (
            f"{site}: the next run draws them again with noise {noise_now:.3g}; epsilon of all "
            f"runs was {before:.4g} and is {hospital.epsilon():.4g} of {rules.max_epsilon:g}"
        )
