"""Adds, renews and revokes hospitals on other machines while the server runs.

A hospital has two registrations. The SuperLink's registration admits its key. The registry's line
binds its name to the key; without the line, a run leaves the hospital out. Only this module writes
these two registrations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.processes import end_trees
from fedsilo.deployment.deployment import (
    FEDERATION,
    SERVER,
    Deployment,
    DeploymentError,
    find_name_fault,
    open_locked,
)
from fedsilo.deployment.flower_commands import Say, flwr, is_healthy, states_by_node
from fedsilo.deployment.kit import AUTHORITY, KEY, make_kit, read_kit


@dataclass(frozen=True)
class MadeKit:
    """A kit that the operator hands over to a hospital."""

    site: str
    path: Path
    code: str  # the beginning of its seal, which both sides compare by telephone


def add(folder: Path, names: Sequence[str], say: Say) -> list[MadeKit]:
    """Register new hospitals at the server, and make a kit for each.

    A kit is the zip that a hospital on another machine needs to connect: a private key, the
    authority's certificate and the server's address. Kits are in ``kits`` below the deployment's
    folder.

    Args:
        folder: the deployment's folder.
        names: the new hospitals. Each must be new and occur once.
        say: prints each command that is run.

    Returns:
        A kit for each name, in the same order. Without names the list is empty.

    Raises:
        FedsiloError: a name is not allowed or already exists, the server does not answer, or
            another command is changing the deployment. In these cases nothing was written. If
            one registration fails, the hospitals before it in ``names`` are registered, but have
            no kit.
    """
    with open_locked(folder) as deployment:
        # All names are checked before the first is registered, so after an error none is registered
        fault = find_name_fault(names)
        for name in names:
            if name in deployment.nodes or name in deployment.sites:
                fault = (
                    f"site '{name}' exists in {deployment.folder}: choose another name, or give "
                    f"it a new key by 'fedsilo deploy renew {name}'"
                )
        if fault:
            raise SettingError(fault)
        _refuse_silent_server(deployment)
        keys = {}
        for name in names:
            deployment, keys[name] = _make_key(deployment, name, say)
        return _make_kits(deployment, keys)


def renew(folder: Path, name: str, say: Say) -> MadeKit | str:
    """Replace a hospital's key, or renew the server's certificate if ``name`` is "server".

    The new key is registered before the old one is removed, so one key always works. Afterwards,
    the server refuses the old key. If the site is on this machine, its process is ended. A new
    certificate takes effect when the server is started again.

    Args:
        folder: the deployment's folder.
        name: a site on this machine, a hospital on another machine, or "server".
        say: prints each command that is run.

    Returns:
        For a hospital on another machine, its new kit. Otherwise a sentence that says what to do
        next.

    Raises:
        FedsiloError: ``name`` is not in the deployment, or another command is changing the
            deployment. Also raised if the server does not answer, or if the new key or
            certificate cannot be made. In these cases the old one stays. If the old key cannot
            be removed, it still works, and the error gives the command that removes it.
    """
    with open_locked(folder) as deployment:
        if name == SERVER:
            from fedsilo.deployment.certificates import sign_server

            end = sign_server(deployment.secrets)
            return (
                f"the server has a new certificate, valid until {end:%Y-%m-%d}: to use it, run "
                "'fedsilo deploy down' and 'fedsilo deploy up'; hospitals need not do anything"
            )
        old = _node_of(deployment, name)
        _refuse_silent_server(deployment)
        # The new key is registered before the old one is removed: after an interruption the
        # hospital still has one that works
        deployment, private = _make_key(deployment, name, say)
        _remove_old_key(deployment, name, old, say)
        if name in deployment.hospitals:
            (made,) = _make_kits(deployment, {name: private})
            return made
        write_atomically(deployment.private_key(name), private, mode=0o600)
        deployment.write_registry()
        # The process still signs with the old key; 'deploy up' starts it with the new one
        _end_process(deployment, name)
        return f"{name} has a new key: to start it again, run 'fedsilo deploy up'"


def revoke(folder: Path, name: str, say: Say) -> None:
    """Exclude a hospital from the deployment at once, and end its process on this machine, if any.

    The server is told first, and rejects the hospital's messages from then on. Next, the hospital
    is removed from deployment.json and the registry. The server's copies of its kit and keys are
    deleted. If the site ran on this machine, its folder with its private state is kept. The name
    can be added again, with a new key.

    Args:
        folder: the deployment's folder.
        name: the hospital's site.
        say: prints the command to the server before it is run.

    Raises:
        FedsiloError: ``name`` is not in the deployment, the server does not answer, or another
            command is changing the deployment. In these cases nothing was changed.
    """
    with open_locked(folder) as deployment:
        node = _node_of(deployment, name)
        _refuse_silent_server(deployment)
        # The SuperLink comes first, because it stops the hospital's messages at once
        _unregister(deployment, node, say)
        # Ended before deployment.json forgets the process, because nobody could find it later
        _end_process(deployment, name)
        deployment.without(name).write_registry()
        keys = deployment.public_key(name), deployment.private_key(name)
        for path in (*keys, _kit_of(deployment, name)):
            path.unlink(missing_ok=True)


def register(deployment: Deployment, site: str, say: Say, public: Path | None = None) -> Deployment:
    """Register a site's public key at the server, and return the deployment with the node id.

    The server assigns the site's node id. The id is recorded in deployment.json, but not in the
    registry, the file that tells the server which node is which site.

    Args:
        deployment: the deployment, whose server must answer.
        site: the site's name, under which the server lists the node.
        say: prints the command.
        public: the file of the public key; None for the site's own file in the deployment.

    Raises:
        DeploymentError: the server refuses the key, for example because it is already registered.
    """
    key = public or deployment.public_key(site)
    command = ("supernode", "register", str(key), FEDERATION)
    try:
        answer = flwr(deployment, *command, "--name", site, say=say)
    except DeploymentError as error:
        raise DeploymentError(
            f"{site} was not registered: {error}; if its key is already in use, an earlier call "
            f"was interrupted: remove {deployment.private_key(site)} and "
            f"{deployment.public_key(site)}, and repeat"
        ) from None
    return deployment.with_node(site, str(answer["node-id"]))


def _make_key(deployment: Deployment, site: str, say: Say) -> tuple[Deployment, bytes]:
    """Make and register a key with which a site proves its identity to the server.

    The public key is written into the deployment's secrets once the server has accepted it. The
    private key is not written.

    Args:
        deployment: the deployment, whose server must answer.
        site: the hospital's name.
        say: prints the command.

    Returns:
        The deployment with the site's new node id, and the private key in OpenSSH's format.
    """
    from fedsilo.deployment.certificates import make_hospital_key

    private, public = make_hospital_key()
    # The site's own file stays as it is until the SuperLink has taken the new key
    public_key = deployment.public_key(site)
    new = public_key.with_name(f"{public_key.name}.new")
    try:
        write_atomically(new, public, mode=0o600)
        deployment = register(deployment, site, say, new)
        new.rename(public_key)
    finally:
        new.unlink(missing_ok=True)
    return deployment, private


def _make_kits(deployment: Deployment, keys: dict[str, bytes]) -> list[MadeKit]:
    """Write the registry, and write a kit for each site in ``keys``.

    A kit is a zip with the site's private key, the authority's certificate and the server's
    address. It is in ``kits`` below the deployment's folder, and replaces the site's older kit.
    Only the owner can read the zip.

    Args:
        deployment: the deployment, in which all these sites have a node id.
        keys: site -> its private key in OpenSSH's format.

    Returns:
        For each kit, its site, its path and the code that people compare by telephone, in the order
        of ``keys``.

    Raises:
        DeploymentError: a site's public key cannot be read for the registry.
    """
    deployment.write_registry()
    authority = (deployment.secrets / "ca.crt").read_bytes()
    made = datetime.now(UTC).isoformat()
    kits = []
    for site, private in keys.items():
        path = _kit_of(deployment, site)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        files = {AUTHORITY: authority, KEY: private}
        content = make_kit(site, deployment.fleet, deployment.nodes[site], made, files)
        write_atomically(path, content, mode=0o600)
        kits.append(MadeKit(site, path, read_kit(path).code))
    return kits


def _kit_of(deployment: Deployment, site: str) -> Path:
    return deployment.folder / "kits" / f"{folder_name(site)}.zip"


def _node_of(deployment: Deployment, site: str) -> str:
    if site not in deployment.nodes:
        raise unknown_name("site of the deployment", site, sorted(deployment.nodes))
    return deployment.nodes[site]


def _unregister(deployment: Deployment, node: str, say: Say) -> None:
    """Remove a node's registration at the server, so that the server refuses its key.

    If the server does not have the node as registered, nothing is done. The registry file is not
    changed. ``say`` prints the command before it is run.

    Raises:
        DeploymentError: a ``flwr`` command failed.
    """
    if states_by_node(deployment).get(node, "unregistered") != "unregistered":
        flwr(deployment, "supernode", "unregister", node, FEDERATION, say=say)


def _remove_old_key(deployment: Deployment, site: str, node: str, say: Say) -> None:
    """Unregister the node of a site's old key, after its new key was registered.

    ``node`` is the id of the old key's node.

    Raises:
        DeploymentError: a ``flwr`` command failed, so the old key still works. The message says
            how to remove the old key.
    """
    try:
        _unregister(deployment, node, say)
    except DeploymentError as error:
        raise DeploymentError(
            f"the old key of {site} (node {node}) was not removed and still works: {error}; "
            f"to have a new key, repeat 'fedsilo deploy renew {site}'; then remove the old one by "
            f"'flwr supernode unregister {node} {FEDERATION}'"
        ) from None


def _end_process(deployment: Deployment, site: str) -> None:
    """End the process of a site on this machine, if it runs."""
    process = deployment.process(site)
    if process is not None:
        end_trees([process])


def _refuse_silent_server(deployment: Deployment) -> None:
    if not is_healthy(deployment):
        raise DeploymentError(
            f"the server of {deployment.folder} does not answer: start it by 'fedsilo deploy up'"
        )
