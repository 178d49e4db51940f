"""The unit files by which systemd runs a server or a hospital.

A unit runs as a user of its own, sees the system read-only and may write only its own folder. It is
restarted after a failure, also if the server answered a hospital's node with an error. Each restart
of a hospital repeats the checks of ``fedsilo hospital start``, and logs in one line what fails.
"""

import json
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedsilo.core.arguments import path_of, several
from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.site_names import folder_name, site_of_folder
from fedsilo.core.versions import FEDSILO
from fedsilo.deployment.deployment import FILE, Deployment
from fedsilo.deployment.kit import CARD, Kit, KitError, read_kit
from fedsilo.deployment.options import ServiceOptions
from fedsilo.deployment.rules import SITE

MARK = "# Written by fedsilo"  # the beginning of each unit file, by which uninstalling knows it
_DEFAULT_USER = "fedsilo"
_WITH_STEPS = 254  # the first systemd whose restarts can grow apart

# See 'man systemd.exec'. PyTorch generates code, so MemoryDenyWriteExecute is not among them
_HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
"""


class ServiceError(FedsiloError):
    """A service cannot be made, installed or uninstalled.

    Fix: do what the message names; most steps need root (``sudo``). ``systemctl status NAME`` and
    ``journalctl -u NAME`` show why an installed service does not run.
    """

    code = "service"


@dataclass(frozen=True)
class Unit:
    """A service of systemd."""

    name: str  # without ``.service``
    title: str
    folder: Path  # absolute; the user must own it
    required: Path  # a file without which the service does not start
    user: str
    command: Sequence[str]
    writable: Sequence[Path] = ()  # further folders that it may write
    needs_devices: bool = False  # such as a GPU's

    def text(self, systemd: int = 0) -> str:
        """Build the text of the systemd unit file for this service.

        The service runs as ``user`` and starts at boot. It does not start if the file ``required``
        is missing. Otherwise it restarts after each failure, any number of times, but not after a
        normal end. It may write only to its own folder and to those in ``writable``. It has no
        access to devices unless ``needs_devices`` is set.

        Args:
            systemd: the major version of systemd. From 254 on, the pauses before restarts grow
                from 15 to 300 seconds. With an older version, or 0 for an unknown one, they
                always take 15 seconds.
        """
        writable = " ".join(_quote(str(path)) for path in (self.folder, *self.writable))
        restart = ["Restart=on-failure", "RestartSec=15"]
        if systemd >= _WITH_STEPS:
            restart += ["RestartSteps=6", "RestartMaxDelaySec=300"]
        hardening = _HARDENING
        if not self.needs_devices:
            hardening += "PrivateDevices=yes\n"
        lines = [
            f"{MARK} {FEDSILO} for {self.folder}",
            "[Unit]",
            f"Description={self.title}",
            "After=network-online.target",
            "Wants=network-online.target",
            f"AssertPathExists={_escape(str(self.required))}",
            # The server may be away for days, so the restarts never end
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"User={self.user}",
            f"WorkingDirectory={_escape(str(self.folder))}",
            f"ExecStart={' '.join(_quote(word) for word in self.command)}",
            "Environment=NO_COLOR=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1",
            *restart,
            # SIGTERM only to the main process, which ends the others in order; SIGKILL to the rest
            "KillMode=mixed",
            "TimeoutStopSec=30",
            f"SyslogIdentifier={self.name}",
            f"ReadWritePaths={writable}",
        ]
        install = "\n[Install]\nWantedBy=multi-user.target\n"
        return "\n".join(lines) + "\n" + hardening + install


def server_unit_name(folder: Path) -> str:
    """Return the name of the systemd unit for the deployment in ``folder``, without ".service"."""
    return f"fedsilo-server-{folder.name}"


def hospital_unit_name(kit: Path) -> str:
    """Return the name of a hospital's systemd unit, such as "fedsilo-west", without ".service".

    The name contains the site's name, which is read from the kit. If the kit cannot be read, for
    example because its folder is gone, the site's name is derived from the name of the folder.

    Args:
        kit: the folder of the hospital's opened kit.
    """
    try:
        site = read_kit(kit.expanduser()).card.site
    except KitError:
        site = site_of_folder(kit.name)
    return _unit_of(site)


def _unit_of(site: str) -> str:
    # systemd allows no '+' in the name of a unit, and no folder of a site has a ':'
    return f"fedsilo-{folder_name(site).replace('+', ':')}"


def build_server_unit(deployment: Deployment, options: ServiceOptions) -> Unit:
    """Describe the systemd service of a deployment's server, without writing it.

    The service runs ``fedsilo.deployment.service.serve`` as the user in ``options``, or as the
    owner of the deployment's folder. If the owner is root or has no name, the user is "fedsilo".
    Sites on this machine do not belong to the service.
    """
    folder = deployment.folder
    return Unit(
        name=server_unit_name(folder),
        title=f"fedsilo server in {_one_word(folder.name)}",
        folder=folder,
        required=folder / FILE,
        user=options.get("user") or _owner_of(folder),
        command=[sys.executable, "-m", "fedsilo.deployment.service.serve", str(folder)],
    )


def build_hospital_unit(kit_path: Path, options: ServiceOptions) -> Unit:
    """Describe the systemd service of a hospital whose kit was opened and confirmed.

    The service runs 'fedsilo hospital start' with the kit's folder and with the data folder, device
    and node config in ``options``. The default device is 'auto'. The default user is the owner of
    the kit's folder. If the owner is root or has no name, it is "fedsilo".

    The service may also write to the folders of state, cache and audit log that are outside the
    kit's folder. It has access to devices unless the device is 'cpu'. Nothing is written here.

    Raises:
        ServiceError: ``kit_path`` is not a folder, or its site file is missing or cannot be read.
            The hospital's first start writes that file.
        KitError: the folder is not a complete kit, or was altered.
        SettingError: the node config cannot be parsed.
    """
    folder = kit_path.expanduser().resolve()
    if not folder.is_dir() or not (folder / SITE).is_file():
        raise ServiceError(
            f"{kit_path} is not a kit that was opened and confirmed: start the hospital once by "
            "'fedsilo hospital start KIT.zip --trust LEVEL', and name the folder that it opened"
        )
    kit = read_kit(folder)
    device = options.get("device") or "auto"
    command = [sys.executable, "-m", "fedsilo.deployment.service.journal"]
    command += [sys.executable, "-m", "fedsilo.cli", "hospital", "start", str(folder)]
    command += ["--device", device]
    data_dir = path_of(options.get("data_dir"))
    if data_dir:
        command += ["--data-dir", str(data_dir.expanduser().resolve())]
    for entry in several(options.get("node_config")):
        command += ["--node-config", entry]
    return Unit(
        name=_unit_of(kit.card.site),
        title=f"fedsilo hospital {kit.card.site}",
        folder=folder,
        required=folder / CARD,
        user=options.get("user") or _owner_of(folder),
        command=command,
        writable=_list_writable(kit, folder, several(options.get("node_config"))),
        needs_devices=device != "cpu",
    )


def _list_writable(kit: Kit, folder: Path, node_config: Sequence[str]) -> list[Path]:
    """List the folders outside the kit's folder into which a hospital's node writes.

    These are the folders for state and cache that ``node_config`` names, and the folder of the
    audit log that the site file names. The list is sorted, without duplicates, and may be empty.

    Raises:
        ServiceError: the site file cannot be read.
        SettingError: ``node_config`` cannot be parsed.
    """
    from fedsilo.deployment.worker.hospital import parse_node_config

    named = []
    config = parse_node_config(node_config) if node_config else {}
    for key in ("state-dir", "cache-dir"):
        if config.get(key):
            named.append(Path(str(config[key])))
    try:
        rules = yaml.safe_load((folder / SITE).read_text(encoding="utf-8")) or {}
        log = rules.get("audit-log")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        raise ServiceError(
            f"{folder / SITE} of {kit.card.site} cannot be read: correct the file"
        ) from None
    if log:
        named.append(Path(str(log)).parent)
    # systemd refuses nothing if a folder is named twice, but a reader would wonder
    outside = [path for path in named if not path.resolve().is_relative_to(folder)]
    return sorted(set(outside))


def _owner_of(folder: Path) -> str:
    """Choose the user of a service: the owner of its folder.

    If the owner is root, who must not run a service, or has no name, the result is "fedsilo".
    """
    try:
        name = pwd.getpwuid(folder.stat().st_uid).pw_name
    except KeyError:
        return _DEFAULT_USER
    if name == "root":
        return _DEFAULT_USER
    return name


def _escape(text: str) -> str:
    """Double each "%" in a path, because systemd would replace it in a unit file."""
    return text.replace("%", "%%")


def _quote(word: str) -> str:
    """Write a word or a path so that systemd reads it unchanged in a line of a unit file.

    "%" and "$" are doubled. A word gets double quotes only if it has one of these two
    characters, a space, a quote, a backslash, a semicolon or a control character such as a tab.
    Double quotes and backslashes in it are escaped as in JSON.
    """
    # systemd's quotes and backslashes are JSON's; % and $ have a meaning of their own
    text = json.dumps(word, ensure_ascii=False)
    text = text.replace("%", "%%").replace("$", "$$")
    if text[1:-1] == word and not any(character in " \t;'" for character in word):
        return word
    return text


def _one_word(text: str) -> str:
    return " ".join(text.replace("%", "%%").split())
