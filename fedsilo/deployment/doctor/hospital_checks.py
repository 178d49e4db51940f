"""``fedsilo hospital start``: opens a kit, checks everything for a start, and becomes the node.

Everything is checked in a scratch folder first, so a refused kit does not change any file. The
hospital writes its own rules, and confirms them before its first start.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedsilo.client_app.privacy.signing import own_code, signing_key
from fedsilo.client_app.site.node import OWN, owner_only
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.arguments import path_of, several
from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.atomic_files import build_folder, read_regular, write_atomically
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.processes import free_ports
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import node_command
from fedsilo.deployment.doctor.credentials import check_certificate
from fedsilo.deployment.doctor.failed_start import tell_server
from fedsilo.deployment.doctor.findings import Status, examine
from fedsilo.deployment.doctor.site import CHECKS, SiteSetup
from fedsilo.deployment.kit import AUTHORITY, CARD, KEY, Kit, KitError, read_kit
from fedsilo.deployment.options import HospitalOptions
from fedsilo.deployment.rules import SITE, RulesError, check_rules, explain_rules, write_rules
from fedsilo.deployment.worker.hospital import parse_node_config
from fedsilo.server_app.config.settings import RunSettings


@dataclass(frozen=True)
class HospitalRequest:
    """The kit that a hospital's operator received, and the options given with it."""

    kit: Path  # the zip, or the folder where it was opened
    options: HospitalOptions
    site_file: Path | None = None  # replaces the site file in the opened folder; None keeps it

    @property
    def node_config(self) -> list[str]:
        """Return the node config entries of the options, each as a text key=value.

        The options ``device`` and ``data_dir`` give the entries 'device' and 'data-dir', which
        come first. The entries of the option ``node_config`` follow. If a key occurs twice, the
        later entry applies.
        """
        texts = []
        data_dir = path_of(self.options.get("data_dir"))
        for key, value in (("device", self.options.get("device")), ("data-dir", data_dir)):
            if value:
                texts.append(f"{key}={json.dumps(str(value), ensure_ascii=False)}")
        return texts + several(self.options.get("node_config"))

    def home(self, kit: Kit) -> Path:
        """Return the absolute path of the folder where the kit is opened.

        The option ``folder`` names it. Without that option, the result depends on the kit. If
        the kit is a folder, the result is that folder. If the kit is a zip, the result is a
        folder beside the zip with the site's name. The folder may not exist yet.
        """
        folder = path_of(self.options.get("folder"))
        if folder is None:
            folder = kit.path
            if not folder.is_dir():
                folder = kit.path.parent / folder_name(kit.card.site)
        return folder.expanduser().resolve()


def refuse_failing(setup: SiteSetup) -> None:
    """Check that a hospital's node can start, and that it is not connected already.

    The checks of ``fedsilo doctor`` run until one fails. The server is then told the name of that
    check, if it can be reached, so that the server's operator can see it. Skipped checks are
    ignored. If no check fails, the server is asked whether this hospital is connected.

    Raises:
        KitError: a check failed, or the hospital is already connected. The message names the failed
            check.
        Refused: the server does not say clearly whether the hospital is connected.
    """
    fault = ""
    for finding in examine(CHECKS, setup):
        if finding.status is Status.FAILED:
            fault = f"{setup.name}: {finding.check}: {finding.said}"
            if finding.fix:
                fault += f": {finding.fix}"
            tell_server(setup, finding.check)
            break
    if not fault and setup.is_online():
        fault = (
            f"{setup.name} is already connected to {setup.superlink}: end the other process; if it "
            "was killed, wait a minute until the server notices"
        )
    if fault:
        raise KitError(fault)


Confirm = Callable[[Sequence[str]], None]  # raises a KitError unless the operator agrees


def prepare_node(
    request: HospitalRequest,
    confirm: Confirm,
    check_setup: Callable[[SiteSetup], None] = refuse_failing,
) -> SiteSetup:
    """Prepare the start of a hospital's node from its kit, and return the node's setup.

    A kit has the files that a hospital needs to connect. The kit, the rules and the machine are
    checked first, and then the operator confirms the kit and the rules. Only after that are the
    kit's files written into the hospital's folder, where they replace an older kit. The folder's
    state, signing key and rules are kept, unless the request names a site file with new rules. The
    node is not started.

    Args:
        request: the kit and the operator's options.
        confirm: takes the sentences to confirm, and raises an error unless the operator agrees. It
            is not called if the folder already has this confirmed kit.
        check_setup: raises an error for a setup that cannot start.

    Raises:
        KitError: the kit cannot be used, a check failed, or the operator does not confirm. Also
            raised if the hospital's folder belongs to another hospital, server or authority, or if
            its node is already running.
        RulesError: the rules cannot be used.
        FedsiloError: the node config cannot be parsed, or the signing key cannot be made or
            read.
    """
    kit = read_kit(request.kit.expanduser())
    home = request.home(kit)
    if not home.is_dir() or not any(home.iterdir()):
        rules = _confirm_rules(request, kit, None, home, confirm, check_setup)
        build_folder(home, lambda folder: _write(kit, rules, folder))
        # A faster start may have made the folder: ``build_folder`` then keeps it without an error
        with _lock_during(home, kit.card.site):
            _refuse_other_start(kit, rules, home)
            return _finish(request, kit, home)
    previous = read_kit(home)
    _refuse_other_hospital(kit, previous)
    # Locked until everything is written, so that no other start sees half of the files replaced
    with _lock_during(home, kit.card.site):
        rules = _confirm_rules(request, kit, previous, home, confirm, check_setup)
        if previous.card.seal != kit.card.seal:
            kit.write(home)
        if request.site_file or not os.path.lexists(home / SITE):
            write_atomically(home / SITE, rules, mode=0o600)
        return _finish(request, kit, home)


def _confirm_rules(
    request: HospitalRequest,
    kit: Kit,
    previous: Kit | None,
    home: Path,
    confirm: Confirm,
    check_setup: Callable[[SiteSetup], None],
) -> str:
    """Check a kit and its rules, let the operator confirm them, and return the text of the rules.

    The rules come from a site file or from the operator's options. If they cannot be used, the
    server is told that the check "site file" has failed, before the error is raised.

    Args:
        request: the kit and the operator's options.
        kit: the new kit.
        previous: the kit in ``home``, or None if the folder is new.
        home: the hospital's folder, in which no file is changed.
        confirm: takes the sentences to confirm, and raises an error unless the operator agrees. It
            is not called if nothing must be confirmed.
        check_setup: raises an error for a setup that cannot start.

    Raises:
        KitError: a check failed, a file cannot be read, or the operator does not confirm.
        RulesError: the rules cannot be used.
    """
    try:
        rules = _read_or_make_rules(request, kit, home)
    except RulesError:
        with open_temporarily(kit) as scratch:
            tell_server(build_setup(kit, scratch, ()), "site file")
        raise
    sentences = _check_in_scratch(request, kit, rules, home, check_setup)
    questions = _list_confirmations(kit, previous, home, sentences)
    if questions:
        confirm(questions)
    return rules


def _write(kit: Kit, rules: str, folder: Path) -> None:
    """Write a kit's files and the site file into an existing folder.

    First the folder is closed to all users except its owner. ``rules`` is the text of the site
    file.
    """
    folder.chmod(0o700)
    kit.write(folder)
    write_atomically(folder / SITE, rules, mode=0o600)


def _refuse_other_start(kit: Kit, rules: str, home: Path) -> None:
    """Check that the folder has the kit and the rules that the operator has confirmed.

    A second start of the hospital's node at the same time may have written another kit or other
    rules into the folder. In this case the present start is refused by an error.

    Args:
        kit: the confirmed kit.
        rules: the text of the confirmed rules.
        home: the hospital's folder, after the kit was written into it.

    Raises:
        KitError: the kit or the rules in ``home`` differ, or ``home`` has no complete kit.
    """
    found = read_kit(home)
    if found.card.seal != kit.card.seal or (home / SITE).read_text(encoding="utf-8") != rules:
        raise KitError(f"another start has just opened {home} with another kit or other rules")


def _finish(request: HospitalRequest, kit: Kit, home: Path) -> SiteSetup:
    """Make a hospital's folder ready for the start of the node, and return the node's setup.

    The folders ``state`` and ``flwr`` and the signing key are made if they are missing. The inode
    of ``home`` is written to ``opened.json``. A copy of the folder has another inode, so a later
    start can recognise a copy.

    Args:
        request: the kit and the operator's options.
        kit: the kit, whose files are already in ``home``.
        home: the hospital's folder.

    Raises:
        SettingError: the node config cannot be parsed.
        RefusedError: the signing key cannot be made or read.
    """
    for name in ("state", "flwr"):
        (home / name).mkdir(mode=0o700, exist_ok=True)
    _opened_here(home).write(home.stat().st_ino)
    setup = build_setup(kit, home, request.node_config)
    # The key is made now, so that people can compare it by telephone before the first run
    with owner_only():
        signing_key(setup.own_folder)
    return setup


def _check_in_scratch(
    request: HospitalRequest,
    kit: Kit,
    rules: str,
    home: Path,
    check_setup: Callable[[SiteSetup], None],
) -> list[str]:
    """Check a kit and the rules in a temporary folder, and return a sentence for each rule.

    The certificate's dates are checked first, then the rules, and ``check_setup`` is called last.
    The setup names ``state`` in ``home`` as the folder for state, so that the final disk is
    checked.

    Args:
        request: the kit and the operator's options.
        kit: the kit.
        rules: the text of the site file.
        home: the hospital's folder, in which no file is changed.
        check_setup: raises an error for a setup that cannot start.

    Raises:
        KitError: a check failed. The message names the kit's path in place of the temporary
            folder.
    """
    state = f"state-dir={json.dumps(str(home / 'state'))}"  # checked on the disk that it will use
    with open_temporarily(kit, rules) as scratch:
        try:
            check_certificate(scratch / AUTHORITY)
            setup = build_setup(kit, scratch, (state, *request.node_config))
            sentences = list(explain_rules(setup.rules))
            check_setup(setup)
        except FedsiloError as error:  # the operator knows the kit, but not the scratch folder
            raise KitError(str(error).replace(str(scratch), str(kit.path))) from None
    return sentences


def _read_or_make_rules(request: HospitalRequest, kit: Kit, home: Path) -> str:
    """Return the text of the hospital's rules, from a site file or from the operator's options.

    The first of these sources that exists is used:

    1. The site file that the operator requests.
    2. The site file in ``home``.
    3. A new text, made from the options.

    A new text takes the level of trust from the options. With a site file, the level must be in
    that file or in the node config.

    Raises:
        RulesError: the rules cannot be used, the file is for another site, there is no level of
            trust, or an option contradicts the file.
        KitError: the file cannot be read, or is not UTF-8 text.
        SettingError: the node config cannot be parsed.
    """
    path = request.site_file or home / SITE
    trusted_elsewhere = "trust" in parse_node_config(request.node_config)
    # A broken link counts as a file: new rules must not replace the hospital's own in silence
    if request.site_file is None and not os.path.lexists(path):
        return write_rules(kit.card.site, request.options)
    try:
        # The file may be a link, which ``read_regular`` refuses, but not a pipe
        text = read_regular(Path(os.path.realpath(path))).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        if isinstance(error, OSError):
            reason = str(error.strerror)
        raise KitError(f"site file {path} cannot be read: {reason}") from None
    check_rules(text, kit.card.site, request.options, trusted_elsewhere)
    return text


def _opened_here(home: Path) -> OwnFile[int]:
    """Return an object that can read and write the file ``opened.json`` in a hospital's folder.

    The file stores the inode number that the folder ``home`` had when the hospital's node was last
    prepared for a start. A copied folder has another inode than its file says. The next start
    thus notices a copy, and asks the operator to confirm the kit and all rules again. This function
    neither reads nor writes the file.
    """
    return OwnFile(home / "opened.json", int, "opened.json", "remove it and start the kit again")


def _list_confirmations(
    kit: Kit, previous: Kit | None, home: Path, sentences: Sequence[str]
) -> list[str]:
    """List the lines that the operator must confirm before the node starts.

    The first of these cases that applies decides:

    - ``home`` has no kit or no site file, or its ``opened.json`` lacks its inode, so it came from
      elsewhere: the new kit's code and all rules. If it came from elsewhere, a warning says that
      its rules, state and keys will be used.
    - ``home`` has the same kit as ``kit``: an empty list.
    - ``home`` has another kit: the new kit's code and the differences between the kits.

    The server's operator reads out the code by telephone.

    Args:
        kit: the new kit.
        previous: the kit in ``home``, or None if the folder is new.
        home: the hospital's folder.
        sentences: the rules in words, one sentence each.
    """
    site, code = kit.card.site, kit.code
    is_opened_here = previous is not None and _opened_here(home).read(0) == home.stat().st_ino
    if previous is None or not is_opened_here or not os.path.lexists(home / SITE):
        lines = [
            f"kit {code} of {site}, for the server {kit.card.server}: the server's operator must "
            "read out the same code by telephone"
        ]
        if previous is not None and not is_opened_here:
            lines.append(
                f"{home} was not opened on this disk, or was opened by an older fedsilo that took "
                "rules from the kit: its rules, private state and keys are used if you confirm"
            )
            key = own_code(home / "state" / OWN / folder_name(site))
            if key:
                lines.append(f"it brings the signing key {key}")
        lines.append(f"rules of {site}:")
        for sentence in sentences:
            lines.append(f"  {sentence}")
        return lines
    # The operator has confirmed this kit and these rules already
    if previous.card.seal == kit.card.seal:
        return []
    return [
        f"kit {code} of {site} replaces kit {previous.code}: the server's operator must read out "
        "the same code by telephone",
        *_differences(previous, kit),
        "rules, signing key and the other hospitals' keys stay as they are",
    ]


def _differences(previous: Kit, kit: Kit) -> list[str]:
    old = previous.card.model_dump(by_alias=True, exclude={"files", "seal"})
    new = kit.card.model_dump(by_alias=True, exclude={"files", "seal"})
    lines = []
    for key, value in old.items():
        if value != new[key]:
            lines.append(f"  {key}: {value} becomes {new[key]}")
    for name, content in kit.files.items():
        # The values of kit.json are the lines above
        if name != CARD and previous.files.get(name) != content:
            lines.append(f"  {name} is replaced")
    return lines


@contextmanager
def open_temporarily(kit: Kit, rules: str = "") -> Iterator[Path]:
    """Write a kit's files into a temporary folder for the block, and yield the folder's path.

    Only the owner can read the folder, because it has the private key. It is removed after the
    block. ``rules`` is the text of the site file, which is not written if the text is empty.
    """
    with tempfile.TemporaryDirectory(prefix="fedsilo-kit-") as folder:
        kit.write(Path(folder))
        if rules:
            write_atomically(Path(folder) / SITE, rules, mode=0o600)
        yield Path(folder)


def build_setup(
    kit: Kit, home: Path, node_config: Sequence[str], settings: RunSettings | None = None
) -> SiteSetup:
    """Build the description of a hospital's node from its kit.

    The description has the server's address, the paths of the keys, and the node config (the node's
    settings). By default the node config has the site's name, ``state`` in ``home`` as the folder
    for state, and the device "auto". It also names the site file in ``home``, if there is one. The
    node's local API gets a port that is free now. Nothing is written or started.

    Args:
        kit: the kit, for the hospital's name, its node id and the server's address.
        home: the folder with the kit's files.
        node_config: entries key=value, which override the defaults.
        settings: the settings of a run to check. None means that there is no run.

    Raises:
        SettingError: ``node_config`` cannot be parsed.
    """
    own: dict[str, Value] = {"site": kit.card.site, "state-dir": str(home / "state")}
    if (home / SITE).is_file():  # before the first start, a folder does not contain a site file
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


def lock_and_build_command(
    setup: SiteSetup, health: str = "", *, is_shown: bool = False
) -> list[str]:
    """Lock the hospital's folder for its node, and build the command that starts the node.

    This process holds the lock. The caller must start the command with ``exec``, which keeps the
    process and so the lock while the node runs.

    Args:
        setup: the setup that ``prepare_node`` returned.
        health: the address of Flower's health server, or empty for none.
        is_shown: whether the command will only be shown. The folder is then not locked.

    Returns:
        The words of the command.

    Raises:
        KitError: the hospital's node is already running.
    """
    assert setup.key is not None
    if not is_shown:
        lock_kit_folder(setup.key.parent, setup.name)
    address, config = (setup.host, setup.port), setup.node_config
    words = node_command(setup.superlink, *setup.secrets(), *address, config)
    if health:
        words += ["--health-server-address", health]
    return words


@contextmanager
def _lock_during(home: Path, site: str) -> Iterator[None]:
    """Lock a kit's folder against other starts of its node while the block runs.

    The call does not wait for a lock that is taken. ``site`` names the hospital in the error.

    Raises:
        KitError: another process has locked the folder, because it starts or runs the node.
    """
    lock = lock_kit_folder(home, site)
    try:
        yield
    finally:
        os.close(lock)


def lock_kit_folder(home: Path, site: str) -> int:
    """Lock a kit's folder so that only one node runs from it, and return the lock's descriptor.

    The lock is an exclusive ``flock`` on the folder itself. The call does not wait for a lock that
    is taken. The lock ends when the descriptor is closed or the process ends. The descriptor is
    inheritable, so that the lock survives ``exec``.

    Args:
        home: the folder, which must exist.
        site: the hospital's name, for the error.

    Raises:
        KitError: another process has locked the folder.
    """
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise KitError(
            f"{site} already runs from {home}: end that process before another start"
        ) from None
    # Otherwise Python would close the descriptor at ``exec``, and the node would run unlocked
    os.set_inheritable(handle, True)
    return handle


def _refuse_other_hospital(kit: Kit, previous: Kit) -> None:
    """Check that a new kit may replace the previous one in a hospital's folder.

    Both must be for the same hospital, the same server address and the same authority.

    Raises:
        KitError: the hospital, the server address or the authority differs.
    """
    old, new, home = previous.card, kit.card, previous.path
    for what, same in (
        ("hospital", old.site == new.site),
        ("server", old.server == new.server),
        ("authority", previous.files[AUTHORITY] == kit.files[AUTHORITY]),
    ):
        if not same:
            raise KitError(
                f"{kit.path} is for {new.site} at {new.server}, but the kit in {home} is for "
                f"another {what} ({old.site} at {old.server}): choose another --folder"
            )
