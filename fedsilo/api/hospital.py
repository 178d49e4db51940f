"""A hospital's node, from the kit that the server's operator made, and its signing keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api.options import command
from fedsilo.core.arguments import AnyPath, MaybePath, Tell, path_of, several, silent
from fedsilo.deployment.options import HospitalOptions, NodeConfig, ServiceOptions

if TYPE_CHECKING:
    from fedsilo.reports.audit import Audit


@command
def start(
    kit: Annotated[
        AnyPath, "the zip of 'fedsilo deploy add', or the folder into which it was opened"
    ],
    *,
    yes: Annotated[bool, "confirm the kit's code and the rules without being asked"] = False,
    health: Annotated[str, "address of Flower's health server"] = "",
    tell: Tell = silent,
    **options: Unpack[HospitalOptions],
) -> None:
    """Open a hospital's kit, confirm it, and turn this process into the hospital's node.

    Before the first start, ``tell`` shows the kit's code and the hospital's rules for its data. For
    a later kit, it shows the code and the differences from the previous kit. The user compares the
    code by telephone with the server's operator, and types 'yes' unless ``yes`` is set. If all
    checks pass, Flower's SuperNode replaces the process, and the function does not return.

    Raises:
        FedsiloError: the user does not confirm, the kit or an option cannot be used, or a check of
            the node fails.
    """
    from fedsilo.client_app.privacy.signing import own_code
    from fedsilo.deployment.doctor.hospital_checks import (
        HospitalRequest,
        lock_and_build_command,
        prepare_node,
    )
    from fedsilo.deployment.kit import KitError, read_kit

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
                "nothing was started, because you did not confirm: answer yes, or give --yes if "
                "nobody can answer"
            )

    setup = prepare_node(HospitalRequest(Path(kit), options), confirm)
    words = lock_and_build_command(setup, health)
    assert setup.key is not None
    home = setup.key.parent
    code = read_kit(home).code
    tell(f"{setup.name}: kit {code} is open in {home}; connecting to {setup.superlink}")
    tell(f"{setup.name}: signs secure sums with key {own_code(setup.own_folder)}")
    _leave_replaced_folder(home)
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.execve(words[0], words, os.environ | {"FLWR_HOME": str(home / "flwr"), **quiet})


def _leave_replaced_folder(home: Path) -> None:
    """Change the working folder to ``home`` if the present one no longer exists.

    The working folder may be gone because opening a kit into an empty folder replaces that folder.
    A node that starts in a removed folder fails.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir(home)


@command
def service(
    kit: Annotated[AnyPath, "the folder into which the hospital's kit was opened"],
    *,
    install: Annotated[bool, "install the unit and start the service (needs root)"] = False,
    uninstall: Annotated[bool, "stop the service and remove its unit (needs root)"] = False,
    **options: Unpack[ServiceOptions],
) -> str:
    """Print, install or uninstall the systemd unit that runs a hospital's node.

    Without ``install`` and ``uninstall``, nothing is changed. ``uninstall`` also works if the
    folder ``kit`` no longer exists, because the folder's name gives the hospital's name.

    Returns:
        The text of the unit. After ``install`` or ``uninstall``, a sentence about the change.

    Raises:
        FedsiloError: the kit was not opened and confirmed yet, both options are given, or the
            service cannot be installed or uninstalled.
    """
    from fedsilo.deployment.service.changing import change_hospital_service

    return change_hospital_service(Path(kit), options, install=install, uninstall=uninstall)


@command
def counts(
    *,
    kit: Annotated[MaybePath, "the folder into which the hospital's kit was opened"] = None,
    node_config: NodeConfig = (),
    draw_again: Annotated[
        bool, "charge the ledger for another draw, which the next run makes"
    ] = False,
) -> Iterator[str]:
    """List the noisy sample counts that a hospital keeps for all runs, or charge another draw.

    A hospital with differential privacy sends noisy counts of its samples. The noise is drawn once
    and kept for all runs, because repeated draws would reveal the true count. If the noise makes a
    count useless, ``draw_again`` lets the next run draw it again. This costs epsilon, the privacy
    budget.

    Args:
        kit: the folder into which the hospital's kit was opened. None to use only ``node_config``.
        node_config: entries of the node config. Without ``kit``, it needs 'site', 'state-dir' and a
            cap on epsilon. The cap may also come from the site file.
        draw_again: charge another draw to the ledger, the record of the epsilon that the hospital
            has spent. Nothing is charged if no counts were sent yet, or if the next run already
            draws again.

    Yields:
        A line for the counts of each version of the hospital's data. If no counts were sent, one
        line says so. If counts were sent, ``draw_again`` adds a line about the charge.

    Raises:
        SettingError: the hospital's name, its state folder or its cap on epsilon is not set.
        EpsilonSpentError: another draw would bring epsilon above the cap. Nothing changes.
        CheckpointError: the ledger or the stored counts are damaged, or cannot be written.
    """
    from fedsilo.deployment.hospital_counts import open_counts

    counts = open_counts(path_of(kit), several(node_config))
    yield from counts.describe()
    if draw_again:
        yield from counts.charge_another_draw()


@command
def keys(
    folder: Annotated[AnyPath, "the folder into which the kit was opened, or the 'state-dir'"],
    *,
    compared: Annotated[
        Sequence[str],
        "a hospital whose key was compared by telephone, or NAME=CODE as it was read out; may "
        "be repeated",
    ] = (),
    forget: Annotated[Sequence[str], "a hospital to remove from the list; may be repeated"] = (),
) -> list[str]:
    """List the signing keys of this hospital and of others, and mark keys as compared.

    Hospitals compare the codes of their keys by telephone. Only hospitals with a compared key take
    part in secure sums with this one. Before the list is made, ``compared`` marks keys. A NAME
    alone marks the key that an earlier call listed, and NAME=CODE the key with this code. Then
    ``forget`` removes hospitals.

    Returns:
        A line for this hospital's key, then a line for the key of each other hospital, by name. If
        no other key is known, the second line says how to enter one.

    Raises:
        FedsiloError: the folder lacks a signing key, ``compared`` names this hospital itself, a
            name or code is wrong, or the list of keys is damaged.
    """
    from fedsilo.deployment.hospital_keys import describe_keys, find_own_folder, mark_keys

    own = find_own_folder(Path(folder))
    mark_keys(own, several(compared), several(forget))
    return describe_keys(own)


@command
def audit(
    log: Annotated[
        Sequence[AnyPath], "the hospital's audit log; earlier logs of the hospital come first"
    ],
    *,
    run: Annotated[str, "only messages of the run with this name"] = "",
    since: Annotated[str, "only messages from this date or time (UTC) on, as 2026-03-03"] = "",
    until: Annotated[str, "only messages up to this date or time (UTC), inclusive"] = "",
) -> Audit:
    """Show what left a hospital, from its audit log, and check that nobody has changed the log.

    Each line of the log has a check value over itself and over the check value of the line before.
    The check value of the last line is also kept beside the log. This chain shows where lines were
    removed, altered or inserted.

    Returns:
        The messages that ``run``, ``since`` and ``until`` select, and the places at which the chain
        is broken. ``lines()`` has the text, ``document()`` the JSON values and ``csv()`` the table.

    Raises:
        FedsiloError: a file cannot be read or is not an audit log, or a time is malformed.
    """
    from fedsilo.reports.audit import Choice, audit_logs, parse_moment

    choice = Choice(run)
    if since:
        choice = replace(choice, since=parse_moment(since, "--since", end_of_day=False))
    if until:
        choice = replace(choice, until=parse_moment(until, "--until", end_of_day=True))
    return audit_logs([Path(path) for path in several(log)], choice)
