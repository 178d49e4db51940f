"""``fedsilo hospital start``: open a kit, check all that a start needs, and become the node.

Everything is checked in a scratch folder first: what is refused leaves nothing behind.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fedsilo.client_app.worker.hospital import parse_node_config
from fedsilo.datasets.io.atomic_files import build_folder
from fedsilo.models.contract.errors import FedsiloError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.deploy.deployment import node_command
from fedsilo.server_app.deploy.kit import AUTHORITY, KEY, REGISTRY, SITE, Kit, KitError, read_kit
from fedsilo.server_app.doctor.findings import Status, examine
from fedsilo.server_app.doctor.secrets import certificate
from fedsilo.server_app.doctor.site import CHECKS, SiteSetup
from fedsilo.server_app.run.processes import free_ports


@dataclass(frozen=True)
class HospitalRequest:
    """What a hospital's operator says in addition to the kit."""

    kit: Path  # the zip, or the folder into which it was opened
    folder: Path | None = None  # where to open it; None: next to the zip, by the site's name
    trust: str = ""  # fills in the site file's line; empty: it is filled in
    site_file: Path | None = None  # the hospital's own, in place of the kit's
    node_config: Sequence[str] = ()  # more of it, as key=value: data-dir, device

    def home(self, kit: Kit) -> Path:
        """Return the absolute folder into which the kit is opened."""
        usual = kit.path if kit.path.is_dir() else kit.path.parent / kit.card.site
        return (self.folder or usual).expanduser().resolve()


def refuse_failing(setup: SiteSetup) -> None:
    """Raise the first failed check of the doctor, and if the hospital is online elsewhere."""
    for finding in examine(CHECKS, setup):
        if finding.status is Status.FAILED:
            fix = f": {finding.fix}" if finding.fix else ""
            raise KitError(f"{setup.name}: {finding.check}: {finding.said}{fix}")
    if setup.is_online():
        raise KitError(
            f"{setup.name} is connected to {setup.superlink} already: end the other one; if it was "
            "killed, the server notices within a minute"
        )


def ready(
    request: HospitalRequest, look: Callable[[SiteSetup], None] = refuse_failing
) -> SiteSetup:
    """Check a kit and all that its node needs, open it, and return the setup to start.

    ``look`` refuses a setup that cannot start; a test has one that asks no server.

    Raises:
        KitError: the kit cannot be used, its site runs already, or it is another's.
        FedsiloError: a check of the doctor failed.
    """
    kit = read_kit(request.kit.expanduser())
    home = request.home(kit)
    before = read_kit(home) if home.is_dir() and any(home.iterdir()) else None
    if before:
        _refuse_other(kit, before)
        os.close(hold(home, kit.card.site))
        if kit.card.seal == before.card.seal:
            kit = replace(before, path=kit.path)  # with what the hospital has corrected since
    said = "trust" in parse_node_config(request.node_config)
    rules = _with(before or kit, request.site_file).site_file(request.trust, elsewhere=said)
    kit = replace(kit, files={**kit.files, SITE: rules.encode()})
    state = f"state-dir={json.dumps(str(home / 'state'))}"  # on the disk of the node's own
    with opened(kit) as scratch:
        try:
            certificate(scratch / AUTHORITY)
            look(setup_of(kit, scratch, (state, *request.node_config)))
        except FedsiloError as error:  # in words that name the kit and no scratch folder
            raise KitError(str(error).replace(str(scratch), str(kit.path))) from None
    if before is None:
        build_folder(home, kit.write, replace=True)
        home.chmod(0o700)
    elif before.files != kit.files:
        kit.write(home)
    for name in ("state", "flwr"):
        (home / name).mkdir(mode=0o700, exist_ok=True)
    return setup_of(kit, home, request.node_config)


def _with(kit: Kit, site_file: Path | None) -> Kit:
    """Return a kit with the hospital's own site file, if it has one."""
    if site_file is None:
        return kit
    try:
        return replace(kit, files={**kit.files, SITE: site_file.read_bytes()})
    except OSError as error:
        raise KitError(f"site file {site_file} cannot be read ({error.strerror})") from None


@contextmanager
def opened(kit: Kit) -> Iterator[Path]:
    """Yield a folder of the kit's files, for their owner alone, that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-kit-") as folder:
        kit.write(Path(folder))
        yield Path(folder)


def setup_of(
    kit: Kit, home: Path, node_config: Sequence[str], settings: RunSettings | None = None
) -> SiteSetup:
    """Return the setup of a kit's node whose files are in ``home``."""
    own: dict[str, Value] = {
        "site": kit.card.site,
        "state-dir": str(home / "state"),
        "site-file": str(home / SITE),
        "signing-key": str(home / KEY),
        "site-registry": str(home / REGISTRY),
    }
    return SiteSetup(
        own | {"device": "auto"} | parse_node_config(node_config),
        superlink=kit.card.server,
        authority=home / AUTHORITY,
        key=home / KEY,
        port=free_ports(1)[0],
        settings=settings,
        node=int(kit.card.node_id),
    )


def command(setup: SiteSetup, health: str = "") -> list[str]:
    """Return the command that starts a node."""
    address, config = (setup.host, setup.port), setup.node_config
    words = node_command(setup.superlink, *setup.secrets(), *address, config)
    return [*words, *(("--health-server-address", health) if health else ())]


def hold(home: Path, site: str) -> int:
    """Lock a kit's folder and return the lock, a file that the process may leave to its next one.

    Raises:
        KitError: another process has locked it.
    """
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise KitError(f"{site} runs already from {home}: a hospital is started once") from None
    os.set_inheritable(handle, True)
    return handle


def _refuse_other(kit: Kit, before: Kit) -> None:
    """Refuse a kit that does not continue the one that was opened in its folder."""
    old, new, home = before.card, kit.card, before.path
    for what, same in (
        ("hospital", old.site == new.site),
        ("server", old.server == new.server),
        ("authority", before.files[AUTHORITY] == kit.files[AUTHORITY]),
    ):
        if not same:
            raise KitError(
                f"{kit.path} is for {new.site} at {new.server}, of another {what} than the kit in "
                f"{home} ({old.site} at {old.server}): choose another --folder"
            )
    if new.made < old.made:
        raise KitError(f"{kit.path} is older than the kit in {home}: start that folder instead")
