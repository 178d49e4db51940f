"""``fedsilo deploy``: makes a deployment, and runs a server and sites as processes of this machine.

The server and the sites authenticate with TLS and keys. This module runs Flower's commands and
prints each one. The module ``joining`` adds hospitals on other machines.
"""

import os
import re
import subprocess
from pathlib import Path

from fedsilo.core.arguments import RunSources, path_of, refuse_below, several
from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import build_folder, write_atomically
from fedsilo.core.processes import app_folder, end_trees, free_ports
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import silo_names
from fedsilo.deployment.deployment import (
    SERVER,
    Deployment,
    DeploymentError,
    is_deployment,
    locked,
    plan,
    read_deployment,
)
from fedsilo.deployment.flower_commands import (
    Say,
    is_healthy,
    list_missing_sites,
    print_command,
    wait_for,
    wait_until_left,
)
from fedsilo.deployment.joining import register
from fedsilo.deployment.options import DeploymentOptions
from fedsilo.deployment.worker.installed import refuse_other_flower
from fedsilo.server_app.config.settings import parse_pair

_EXPERIMENT = "uefl-digits"  # whose silos are the sites of a new deployment by default
_PORT = "9092"  # Flower's default port of the Fleet API
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?")


def hospital_address(host: str | None) -> str:
    """Return the server's address for hospitals on other machines, in the form host:port.

    Args:
        host: HOST or HOST:PORT, with port 9092 by default. An IPv6 address is not accepted. If
            ``host`` is None or empty, all sites are on this machine, and the result is empty.

    Raises:
        SettingError: ``host`` is not a host name or IPv4 address, or the port is not between 1
            and 65535.
    """
    if not host:
        return ""
    name, port = host, _PORT
    if ":" in host:
        name, _, port = host.rpartition(":")
    if not _HOST.fullmatch(name) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError(
            "--host must be a name or an address, with or without a :PORT of at most 65535, but is "
            f"'{host}'"
        )
    return f"{name}:{port}"


def requested_node_config(options: DeploymentOptions) -> dict[str, Value]:
    """Return the node config (settings of the sites' nodes) that the command's options request.

    The options ``device`` and ``data_dir`` become the keys 'device' and 'data-dir', the latter with
    an absolute path. Each text key=value in ``node_config`` adds an entry. Its value is read as
    TOML, or taken as a string if it is not valid TOML. Such an entry replaces an earlier one with
    the same key. Options that were not given are left out. Whether a key exists is not checked.

    Raises:
        SettingError: a text in ``node_config`` does not have the form key=value.
    """
    config: dict[str, Value] = {}
    if options.get("device"):
        config["device"] = str(options["device"])
    data_dir = path_of(options.get("data_dir"))
    if data_dir:
        config["data-dir"] = str(data_dir.expanduser().resolve())
    for text in several(options.get("node_config")):
        key, value = parse_pair(text)
        config[key] = value
    return config


def refuse_changes(deployment: Deployment, options: DeploymentOptions) -> None:
    """Check that the options given for an existing deployment agree with it.

    Only options that were given are compared: ``host``, the number and the names of the sites on
    this machine, and node config entries (settings of the sites' nodes). The order of names does
    not matter. Entries are compared with those of the first site, because all sites have the same
    ones. If there is no site on this machine, every given entry is refused.

    Raises:
        SettingError: an option is malformed or differs from the deployment. The message names
            the option.
    """
    # All sites have the same keys, but for their names and folders, so the first one is compared
    config = next(iter(deployment.node_config.values()), {})
    compared: dict[str, tuple[Value, Value]] = {}
    for key, value in requested_node_config(options).items():
        compared[f"--node-config {key}"] = value, config.get(key, "")
    count, names = options.get("sites"), several(options.get("site"))
    if count:
        compared["--sites"] = count, len(deployment.sites)
    if names:
        compared["--site"] = ", ".join(sorted(names)), ", ".join(deployment.sites)
    if options.get("host"):
        compared["--host"] = hospital_address(options["host"]), deployment.address
    for option, (wanted, present) in compared.items():
        if wanted != present:
            raise SettingError(
                f"{option} is {wanted}, but the deployment in {deployment.folder} has "
                f"{present or 'none'}: remove the option, or choose another --deployment"
            )


def refuse_other_silos(deployment: Deployment, experiment: str, options: DeploymentOptions) -> None:
    """Check that the silos of ``experiment`` are the sites of an existing deployment.

    A silo is one site's part of the experiment's data. The names of the silos must equal those of
    the sites on this machine. The check is skipped in two cases:

    - The option ``site`` is given, which names the sites itself.
    - All sites are on other machines, and the option ``sites`` does not give their number.

    Raises:
        SettingError: the names differ, the number of silos is not ``sites``, or the experiment
            or its settings are invalid.
    """
    count, sites = options.get("sites"), several(options.get("site"))
    if sites or (deployment.address and not deployment.sites and not count):
        return
    wanted = _silos(experiment, count, path_of(options.get("file")))
    if sorted(wanted) != deployment.sites:
        raise SettingError(
            f"{experiment} has the silos {', '.join(wanted) or 'that the sites name'}, but the "
            f"deployment in {deployment.folder} has the sites "
            f"{', '.join(deployment.sites) or 'of hospitals only'}: leave the experiment out, or "
            "choose another --deployment"
        )


def plan_deployment(folder: Path, experiment: str, options: DeploymentOptions) -> Deployment:
    """Plan a new deployment: its sites, its ports and the settings of its sites (node config).

    The first of these rules that applies chooses the sites on this machine:

    1. The option ``site`` names them.
    2. With the option ``host`` but not ``sites``, there are none yet, because hospitals may join
    later.
    3. They are the silos of ``experiment``, the parts of its data. ``sites`` may set their number.

    The ports are free now, but are not reserved. With ``host``, the port for hospitals comes from
    that option, and is not checked. By default, sites use the CPU, the folders in $FEDSILO_DATA and
    $FEDSILO_CACHE, and the level of trust 'server'. No file of the deployment is written.

    Args:
        folder: the absolute path of the deployment's folder, which need not exist.
        experiment: the name of an experiment, or of a method, which runs with its defaults.
        options: the options of ``deploy up``. ``node_config`` overrides the defaults.

    Raises:
        SettingError: the experiment, an option or a site's name cannot be used, or there is neither
            a site nor ``host``. Also raised if ``folder`` is in fedsilo's checkout, except for
            ``deployment``.
        ProcessError: fedsilo was not installed from a checkout.
    """
    app = app_folder()
    if folder.is_relative_to(app) and folder != app / "deployment":
        raise SettingError(
            f"--deployment {folder} is in fedsilo's checkout, but a run sends that to every "
            f"site: choose a folder outside, or {app / 'deployment'}"
        )
    defaults: dict[str, Value] = {"device": "cpu", "trust": "server"}
    for key, variable in (("data-dir", "FEDSILO_DATA"), ("cache-dir", "FEDSILO_CACHE")):
        given = os.environ.get(variable)
        if given:
            defaults[key] = str(Path(given).expanduser().resolve())
    address = hospital_address(options.get("host"))
    count, sites = options.get("sites"), several(options.get("site"))
    # A server with an address may have all its sites elsewhere; 'deploy add' adds each
    if not sites and (count or not address):
        sites = _silos(experiment, count, path_of(options.get("file")))
    ports = free_ports(2 + len(sites))
    if address:
        ports[1] = int(address.rpartition(":")[2])
    return plan(folder, sites, ports, defaults | requested_node_config(options), address)


def prepare(planned: Deployment) -> None:
    """Create the folders of a new deployment, and write its deployment.json.

    The deployment has a folder for each member (the server and each site on this machine), with
    a subfolder ``flwr`` for Flower's files. Only the owner can open a new folder. Missing
    folders above the deployment get the system's default mode, and existing folders keep their
    mode. An existing deployment.json is replaced.
    """
    planned.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for member in planned.members:
        home = planned.home(member)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)  # the database holds all messages
        (home / "flwr").mkdir(mode=0o700, exist_ok=True)
    planned.write()


def _silos(experiment: str, count: int | None, file: Path | None) -> list[str]:
    """List the names of an experiment's silos, which are the parts into which its data are split.

    Args:
        experiment: the name of an experiment in ``file``, or of a method.
        count: the requested number of silos. None or 0 means the experiment's own number.
        file: the simulation file. None means the default file.

    Raises:
        SettingError: the experiment or its settings are invalid, or the number of silos is not
            ``count``. The number cannot be chosen for a data set with natural sites, such as
            hospitals.
    """
    # PyTorch, which takes seconds that status, logs and down can spare
    from fedsilo.engines.planning import plan_run

    overrides: dict[str, Value] = {}
    if count:
        overrides["split.silos"] = count
    sources = RunSources(file=file, out=Path("/"))
    settings, _ = plan_run(experiment, sources, overrides=overrides)
    names = silo_names(settings.common)
    # A data set with natural sites, such as hospitals, ignores the requested number
    if count and len(names) != count:
        raise SettingError(
            f"--sites is {count}, but {experiment} has the silos "
            f"{', '.join(names) or 'that the sites name'}: name them by --site, or correct --sites"
        )
    return names


def share_signing_keys(deployment: Deployment) -> None:
    """Make missing signing keys for the sites on this machine, and mark the keys as compared.

    A site joins secure sums only with sites whose keys are marked as compared in its list.
    Hospitals compare keys by telephone. Here one operator runs all sites, so each site's key is
    marked in the lists of all other sites on this machine without a comparison.

    Existing keys are kept. A mark for a site's present key keeps its date. A mark for an earlier
    key of the site is replaced by a mark for the present key.
    """
    from fedsilo.client_app.privacy.signing import KnownKeys, signing_key
    from fedsilo.client_app.site.node import own_folder_of, owner_only
    from fedsilo.strategies.wire.signatures import key_code, public_text

    folders = {}
    for site in deployment.sites:
        folder = own_folder_of(deployment.node_config[site], site)
        assert folder is not None
        folders[site] = folder
    with owner_only():
        # All keys are made before the first mark, because each site marks those of all others
        codes = {}
        for site, folder in folders.items():
            codes[site] = key_code(public_text(signing_key(folder)))
        for site, folder in folders.items():
            known = KnownKeys(folder)
            before = known.read()
            for other, code in codes.items():
                if other == site:
                    continue
                # A mark has the day of the comparison, so an unchanged one stays as it is
                if other not in before or before[other].compared != code:
                    known.mark(other, code)


def make_secrets(deployment: Deployment) -> None:
    """Make the deployment's certificates and the key pairs of its sites, if they are missing.

    If the folder of secrets does not exist, it is made with a new authority and a certificate for
    the server. If the folder exists, no certificate is made. Then each site on this machine without
    a private key gets a key pair. Existing files are not replaced or checked.

    Raises:
        DeploymentError: the mode of an existing private key gives other users access.
    """
    from fedsilo.deployment.certificates import make_authority, make_hospital_key, sign_server

    def make_certificates(scratch: Path) -> None:
        make_authority(scratch)
        sign_server(scratch, [deployment.fleet.rpartition(":")[0]])

    secrets = deployment.secrets
    for path in sorted(secrets.glob("*.key")):
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise DeploymentError(
                f"{path} has mode {mode:o}, so other users may read it: chmod 600 the file, and "
                "make a new key if somebody may have read it"
            )
    # The folder is renamed into place as a whole, so an interrupted call leaves no half of a pair
    if not secrets.is_dir():
        build_folder(secrets, make_certificates)
        secrets.chmod(0o700)
    for site in deployment.sites:
        if not deployment.private_key(site).is_file():
            private, public = make_hospital_key()
            write_atomically(deployment.private_key(site), private, mode=0o600)
            write_atomically(deployment.public_key(site), public, mode=0o600)


def up(folder: Path, experiment: str | None, options: DeploymentOptions, say: Say) -> Deployment:
    """Make a deployment if it is new, start the members that are not running, and wait for them.

    The members are the server and the sites on this machine. The call returns when the server
    reports all these sites as online.

    Args:
        folder: the deployment's folder, which may be relative.
        experiment: the experiment whose silos (parts of its data) are the sites. For a new
            deployment, None means ``uefl-digits``. For an existing one, None means that the silos
            are not compared with its sites.
        options: options for a new deployment. For an existing one, they must agree with it.
        say: prints one line, such as a command that is run.

    Returns:
        The deployment, with the ids of its processes.

    Raises:
        FedsiloError: an option is invalid or differs from the deployment, or another command is
            changing the deployment. Also raised if a member does not start, or if the installed
            version of Flower is not supported.
    """
    refuse_other_flower()
    refuse_below(1, "sites", options.get("sites"))
    if options.get("sites") and several(options.get("site")):
        raise SettingError("--sites has no effect with --site: remove one of the two")
    folder = folder.expanduser().resolve()
    planned = None
    # Planned before locking, because that makes the folder, and a refused plan must not
    if not is_deployment(folder):
        planned = plan_deployment(folder, experiment or _EXPERIMENT, options)
    elif experiment:
        refuse_other_silos(read_deployment(folder), experiment, options)
    with locked(folder):
        # Another 'up' may have made the deployment during the planning, which took seconds
        if planned and not is_deployment(folder):
            prepare(planned)
        deployment = read_deployment(folder)
        refuse_changes(deployment, options)
        return _start_missing(deployment, say)


def _start_missing(deployment: Deployment, say: Say) -> Deployment:
    """Start every member that is not running, register new sites, and wait until all are online.

    The members are the server and the sites on this machine. Missing keys and certificates are made
    first. Then the server is started, new sites are registered at it, and the sites are started. A
    killed site is not started again while the server still shows it as online. Each wait takes at
    most 90 seconds.

    The function also writes deployment.json, the registry of node ids and keys, and the file that
    tells ``flwr`` the server's address.

    Args:
        deployment: the deployment, whose folder must be locked.
        say: prints one line, such as a command that is run.

    Returns:
        The deployment, with the new processes and node ids.

    Raises:
        FedsiloError: a member does not start, or a key, certificate or registration cannot be
            used.
    """
    make_secrets(deployment)
    share_signing_keys(deployment)
    deployment.write_connection()
    # A killed site, or one of a restored deployment, counts as online at the server for a while
    known = set(deployment.nodes)
    for member in deployment.members:
        if not deployment.process(member):
            if member in known:
                wait_until_left(deployment, member, say)
            deployment = _start_process(deployment, member, say)
        # Sites are registered as soon as the server answers, before they are started
        if member == SERVER:
            wait_for(deployment, _find_silent_server)
            for site in deployment.sites:
                if site not in deployment.nodes:
                    deployment = register(deployment, site, say)
            deployment.write_registry()
    wait_for(deployment, list_missing_sites)
    return deployment


def _find_silent_server(deployment: Deployment) -> list[str]:
    """Return an empty list if the server answers a health request, otherwise ["server"].

    ``wait_for`` repeats the call until the list is empty. A request takes at most two seconds.
    """
    if is_healthy(deployment):
        return []
    return [SERVER]


def logs(folder: Path, member: str, lines: int) -> str:
    """Return the last ``lines`` lines of the log of the server or of a site on this machine.

    ``lines`` must be at least 1. The newest line is last. The call reads the whole file into
    memory.

    Raises:
        FedsiloError: the folder has no usable deployment, the deployment has no member
            ``member``, the member is on another machine, or it has no log because it was never
            started.
    """
    path = read_deployment(folder).log(member)
    if not path.is_file():
        raise DeploymentError(
            f"{member} has no log {path}, because it has not run yet: start it by 'fedsilo deploy "
            "up'"
        )
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(text[-lines:])


def down(folder: Path) -> tuple[Deployment, list[str]]:
    """End those processes of a deployment that run on this machine, the sites before the server.

    Each process gets SIGTERM and, if it still runs after 10 seconds, SIGKILL. The server ends last,
    so that the sites can sign off. All files are kept. The deployment is not locked meanwhile.

    Returns:
        The deployment, read before the processes ended, and the names of the members that were
        running, with the server first.

    Raises:
        DeploymentError: the folder does not contain a usable deployment.
        psutil.AccessDenied: a process belongs to another user.
    """
    deployment = read_deployment(folder)
    running = deployment.running()
    # Sites end first, so that they can sign off at the server
    for members in (deployment.sites, [SERVER]):
        processes = []
        for member in members:
            process = deployment.process(member)
            if process is not None:
                processes.append(process)
        end_trees(processes)
    return deployment, running


def _start_process(deployment: Deployment, member: str, say: Say) -> Deployment:
    """Start a member's process in the background, and record its id in the deployment.

    The process keeps running after this command has ended, and Ctrl-C in this terminal does not
    reach it. Its output is appended to the member's log. The process id is also written to
    deployment.json. ``say`` prints the command before it is run.

    Returns:
        The deployment with the new process id.
    """
    command = deployment.command(member)
    print_command(command, say)
    # A session of its own keeps Ctrl-C in this terminal away from it
    with deployment.log(member).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=deployment.environment(member),
            cwd=deployment.home(member),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return deployment.with_started(member, process.pid)
