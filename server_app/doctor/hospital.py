"""``fedsilo hospital start``: open a kit, check all that a start needs, and become the node.

Everything is checked in a scratch folder first: what is refused leaves nothing behind. The rules
are the hospital's own, and it confirms them before its first start.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedsilo.client_app.privacy.signing import own_code, signing_key
from fedsilo.client_app.site.node import OWN, owner_only
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.client_app.site.sentences import explained
from fedsilo.client_app.worker.hospital import parse_node_config
from fedsilo.datasets.io.atomic_files import build_folder, write_atomically
from fedsilo.datasets.io.regular_files import read_regular
from fedsilo.models.contract.errors import FedsiloError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.deploy.deployment import node_command
from fedsilo.server_app.deploy.kit import AUTHORITY, KEY, Kit, KitError, read_kit
from fedsilo.server_app.deploy.rules import SITE, RuleOptions, check_rules, write_rules
from fedsilo.server_app.doctor.findings import Status, examine
from fedsilo.server_app.doctor.secrets import certificate
from fedsilo.server_app.doctor.site import CHECKS, SiteSetup
from fedsilo.server_app.run.processes import free_ports


@dataclass(frozen=True)
class HospitalRequest:
    """The words of a hospital's operator in addition to the kit."""

    kit: Path  # the zip, or the folder into which it was opened
    folder: Path | None = None  # where to open it; None: next to the zip, by the site's name
    rules: RuleOptions = field(default_factory=RuleOptions)  # options that make its rules
    site_file: Path | None = None  # the hospital's own, in place of the one in its folder
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


Confirm = Callable[[Sequence[str]], None]  # raises a KitError unless the operator says yes


def ready(
    request: HospitalRequest,
    confirm: Confirm,
    look: Callable[[SiteSetup], None] = refuse_failing,
) -> SiteSetup:
    """Check a kit and all that its node needs, open it, and return the setup to start.

    Args:
        request: what the hospital's operator says.
        confirm: is told in sentences what the operator must confirm: before the first start the
            kit's code and the rules, and for another kit than before what it replaces. It raises
            an error without a yes.
        look: refuses a setup that cannot start; a test has one that asks no server.

    Raises:
        KitError: the kit cannot be used, its site runs already, it is another's, or the operator
            does not confirm.
        RulesError: the rules cannot be used.
        FedsiloError: a check of the doctor failed.
    """
    kit = read_kit(request.kit.expanduser())
    home = request.home(kit)
    before = read_kit(home) if home.is_dir() and any(home.iterdir()) else None
    if before:
        _refuse_other(kit, before)
        os.close(hold(home, kit.card.site))
    rules = _rules_of(request, kit, home)
    state = f"state-dir={json.dumps(str(home / 'state'))}"  # on the disk of the node's own
    with opened(kit, rules) as scratch:
        try:
            certificate(scratch / AUTHORITY)
            setup = setup_of(kit, scratch, (state, *request.node_config))
            sentences = explained(setup.rules)
            look(setup)
        except FedsiloError as error:  # in words that name the kit and no scratch folder
            raise KitError(str(error).replace(str(scratch), str(kit.path))) from None
    questions = _to_confirm(kit, before, home, sentences)
    if questions:
        confirm(questions)
    if before is None:
        build_folder(home, lambda folder: _write(kit, rules, folder), replace=True)
        home.chmod(0o700)
    else:
        if before.card.seal != kit.card.seal:
            kit.write(home)
        if request.site_file or not os.path.lexists(home / SITE):
            write_atomically(home / SITE, rules, mode=0o600)
    for name in ("state", "flwr"):
        (home / name).mkdir(mode=0o700, exist_ok=True)
    _opened_here(home).write(home.stat().st_ino)
    setup = setup_of(kit, home, request.node_config)
    with owner_only():
        signing_key(setup.own_folder)
    return setup


def _rules_of(request: HospitalRequest, kit: Kit, home: Path) -> str:
    """Return the text of the hospital's rules: its own file's, or new ones from its options.

    Raises:
        RulesError: they cannot be used, or an option contradicts the file.
        KitError: the file cannot be read.
    """
    path = request.site_file or home / SITE
    said = "trust" in parse_node_config(request.node_config)
    if request.site_file is None and not os.path.lexists(path):
        return write_rules(kit.card.site, request.rules)
    try:
        text = read_regular(Path(os.path.realpath(path))).decode("utf-8")
    except OSError as error:
        raise KitError(f"site file {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise KitError(f"site file {path} cannot be read: it is not UTF-8 text") from None
    check_rules(text, kit.card.site, request.rules, said)
    return text


def _write(kit: Kit, rules: str, folder: Path) -> None:
    kit.write(folder)
    write_atomically(folder / SITE, rules, mode=0o600)


def _opened_here(home: Path) -> OwnFile[int]:
    """Return the file that says which folder of this machine's disk was opened here.

    Whoever sends an opened folder in place of a kit sends its rules and its keys too, but does not
    know the number that this disk gives to the copy.
    """
    return OwnFile(home / "opened.json", int, "opened.json", "remove it and start the kit again")


def _to_confirm(kit: Kit, before: Kit | None, home: Path, sentences: Sequence[str]) -> list[str]:
    """List in sentences the facts that the operator must confirm before this start."""
    site, code = kit.card.site, kit.code
    is_opened_here = before is not None and _opened_here(home).read(0) == home.stat().st_ino
    if before is None or not is_opened_here or not os.path.lexists(home / SITE):
        lines = [
            f"kit {code} of {site}, for the server {kit.card.server}: the server's operator must "
            "read out the same code by telephone"
        ]
        if before is not None and not is_opened_here:
            lines.append(
                f"{home} was not opened on this disk, or by a fedsilo that kept rules of the kit: "
                "its rules, private state and keys are used if you confirm"
            )
            if key := own_code(home / "state" / OWN / site):
                lines.append(f"it brings the signing key {key}")
        return [*lines, f"rules of {site}:", *(f"  {sentence}" for sentence in sentences)]
    if before.card.seal == kit.card.seal:
        return []
    return [
        f"kit {code} of {site} replaces kit {before.code}: the server's operator must read out the "
        "same code by telephone",
        *_differences(before, kit),
        "rules, signing key and the other hospitals' keys stay as they are",
    ]


def _differences(before: Kit, kit: Kit) -> list[str]:
    old = before.card.model_dump(by_alias=True, exclude={"files", "seal"})
    new = kit.card.model_dump(by_alias=True, exclude={"files", "seal"})
    lines = [f"  {key}: {old[key]} becomes {new[key]}" for key in old if old[key] != new[key]]
    changed = [name for name in kit.files if before.files.get(name) != kit.files[name]]
    return [*lines, *(f"  {name} is another one" for name in changed if name != "kit.json")]


@contextmanager
def opened(kit: Kit, rules: str = "") -> Iterator[Path]:
    """Yield a folder of the kit's files, for their owner alone, that is removed at the end.

    ``rules`` is the text of the site file, or empty if there is none yet.
    """
    with tempfile.TemporaryDirectory(prefix="fedsilo-kit-") as folder:
        kit.write(Path(folder))
        if rules:
            write_atomically(Path(folder) / SITE, rules, mode=0o600)
        yield Path(folder)


def setup_of(
    kit: Kit, home: Path, node_config: Sequence[str], settings: RunSettings | None = None
) -> SiteSetup:
    """Return the setup of a kit's node whose files are in ``home``."""
    own: dict[str, Value] = {"site": kit.card.site, "state-dir": str(home / "state")}
    if (home / SITE).is_file():  # a kit has none until it is started
        own["site-file"] = str(home / SITE)
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
