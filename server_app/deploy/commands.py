"""``fedsilo deploy``: a server and hospitals as processes of one machine, with TLS and keys.

It wraps Flower's own commands and prints each as it runs it; docs/deployment.md gives the same
steps by hand for machines of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from datasets.registry import silo_names
from models.contract.errors import SettingError
from models.contract.settings_schema import Value
from server_app.config.settings import parse_assignment
from server_app.deploy.deployment import (
    FEDERATION,
    SERVER,
    Deployment,
    DeploymentError,
    is_deployment,
    plan,
    read_deployment,
)
from server_app.run.planning import RunSources, planned
from server_app.run.processes import app_folder, end_trees, free_ports, tool
from server_app.run.progress_bars import make_console

_START_LIMIT = 90.0  # seconds for a member to be there
_SECRETS = Path("docker") / "make-secrets.sh"


def up(options: argparse.Namespace) -> None:
    """Start what does not run: all of a new deployment, or what has ended of one.

    Raises:
        FedsiloError: what is asked for contradicts the deployment, or a member does not start.
    """
    console, folder = make_console(), options.dir.expanduser().resolve()
    known = is_deployment(folder)
    deployment = read_deployment(folder) if known else _made(folder, options)
    if known:
        _refuse_changes(deployment, options)
    _make_secrets(deployment, console)
    deployment.write_connection()
    for member in deployment.members:
        if not deployment.process(member):
            if member != SERVER and member in deployment.started:
                _wait_until_left(deployment, member, console)
            deployment = _start(deployment, member, console)
        if member == SERVER:
            _wait(deployment, lambda now: [] if _healthy(now) else [SERVER])
            deployment = _registered(deployment, console)
    _wait(deployment, _offline)
    told = f"{len(deployment.sites)} sites are online: {', '.join(deployment.sites)}"
    console.print(told, highlight=False, soft_wrap=True)


def status(options: argparse.Namespace) -> None:
    """Print what runs: processes, and whom the server sees."""
    deployment = read_deployment(options.dir.expanduser().resolve())
    seen = online(deployment) if deployment.process(SERVER) else []
    table = Table("member", "process", "seen by the server", "log")
    for member in deployment.members:
        process = deployment.process(member)
        told = "" if member == SERVER else "online" if member in seen else "offline"
        table.add_row(
            member, f"{process.pid}" if process else "-", told, str(deployment.log(member))
        )
    console = make_console()
    console.print(table, soft_wrap=not console.is_terminal)


def logs(options: argparse.Namespace) -> None:
    """Print the end of a member's log."""
    deployment = read_deployment(options.dir.expanduser().resolve())
    path = deployment.log(options.member)
    if not path.is_file():
        raise DeploymentError(f"{options.member} has not run yet: there is no {path}")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(lines[-options.lines :]))


def down(options: argparse.Namespace) -> None:
    """End all processes of a deployment; its folder stays, and 'up' goes on with it."""
    deployment = read_deployment(options.dir.expanduser().resolve())
    running = deployment.running()
    for members in (deployment.sites, [SERVER]):  # a site says goodbye while the server listens
        end_trees([p for member in members if (p := deployment.process(member))])
    print(f"{len(running)} processes ended; {deployment.folder} stays")


def online(deployment: Deployment) -> list[str]:
    """Return the sites that the server sees."""
    nodes = flwr(deployment, "supernode", "list", FEDERATION)["nodes"]
    there = {str(node["node-id"]) for node in nodes if node["status"] == "online"}
    return [site for site in deployment.sites if deployment.nodes.get(site) in there]


def _offline(deployment: Deployment) -> list[str]:
    """Return the sites that the server does not see, or sees for a process that has ended."""
    seen = online(deployment)
    return [site for site in deployment.sites if site not in seen or not deployment.process(site)]


def _wait_until_left(deployment: Deployment, site: str, console: Console) -> None:
    """Wait until the server has noticed that a killed process is gone: it lets in only one."""
    limit, told = time.monotonic() + _START_LIMIT, ""
    while site in online(deployment) and time.monotonic() < limit:
        if not told:
            told = f"{site} ended without a word: the server misses it within a minute, waiting"
            console.print(told, highlight=False, soft_wrap=True)
        time.sleep(1.0)


def _refuse_changes(deployment: Deployment, options: argparse.Namespace) -> None:
    """Refuse options that a deployment does not have: it was made with its own.

    Raises:
        SettingError: names the first that differs.
    """
    first = deployment.node_config[deployment.sites[0]]
    asked: dict[str, tuple[Value, Value]] = {
        f"--node-config {key}": (value, first.get(key, "")) for key, value in _own(options).items()
    }
    if options.sites:
        asked["--sites"] = options.sites, len(deployment.sites)
    if options.site:
        asked["--site"] = ", ".join(sorted(options.site)), ", ".join(deployment.sites)
    for what, (wanted, there) in asked.items():
        if wanted != there:
            raise SettingError(
                f"{what} is {wanted}, and the deployment in {deployment.folder} has "
                f"{there or 'none'}: leave it out, or choose another --dir"
            )


def _own(options: argparse.Namespace) -> dict[str, Value]:
    """Return what the options say of every site's node config."""
    own: dict[str, Value] = {}
    if options.device:
        own["device"] = options.device
    if options.data_dir:
        own["data-dir"] = str(options.data_dir.expanduser().resolve())
    return own | dict(parse_assignment(text) for text in options.node_config)


def _made(folder: Path, options: argparse.Namespace) -> Deployment:
    """Return a new deployment of the sites asked for, with ports that are free now."""
    app = app_folder()
    if folder.is_relative_to(app) and folder != app / "deployment":
        raise SettingError(
            f"--dir {folder} lies in fedsilo's checkout, which goes to every site with a run: "
            f"choose a folder outside, or {app / 'deployment'}"
        )
    own: dict[str, Value] = {"device": "cpu"}
    for key, variable in (("data-dir", "FEDSILO_DATA"), ("cache-dir", "FEDSILO_CACHE")):
        if given := os.environ.get(variable):
            own[key] = str(Path(given).expanduser().resolve())
    sites = list(options.site) or _silos(options)
    made = plan(folder, sites, free_ports(2 + len(sites)), own | _own(options))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for member in made.members:
        home = made.home(member)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)  # the database holds all that passes
        (home / "flwr").mkdir(mode=0o700, exist_ok=True)
    made.write()
    return made


def _silos(options: argparse.Namespace) -> list[str]:
    """Return the names of an experiment's silos, as many as --sites asks for."""
    more: dict[str, Value] = {"silos": options.sites} if options.sites else {}
    settings, _ = planned(
        options.experiment, RunSources(file=options.file, out=Path("/")), more=more
    )
    names = silo_names(settings.common)
    if options.sites and len(names) != options.sites:
        raise SettingError(
            f"--sites is {options.sites}, and {options.experiment} has the silos "
            f"{', '.join(names) or 'that the sites name'}: name them by --site, or ask for as many"
        )
    return names


def _make_secrets(deployment: Deployment, console: Console) -> None:
    if deployment.secrets.is_dir():
        _refuse_open_keys(deployment.secrets)
        return
    command = [
        *("bash", str(app_folder() / _SECRETS), "--out", str(deployment.secrets)),
        *("--host", "localhost"),
        *(part for site in deployment.sites for part in ("--hospital", site)),
    ]
    tell(console, command)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeploymentError(f"no secrets were made: {_last_line(done.stderr or done.stdout)}")
    console.print(done.stdout.strip(), highlight=False, soft_wrap=True)


def _refuse_open_keys(secrets: Path) -> None:
    """Refuse to start with a private key that others on this machine may read."""
    for path in sorted(secrets.glob("*.key")):
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            raise DeploymentError(
                f"{path} has mode {mode:o}, others may read it: chmod 600 it, and make a new key "
                "if somebody may have"
            )


def _start(deployment: Deployment, member: str, console: Console) -> Deployment:
    """Start a member's process; it outlives this command."""
    command = deployment.command(member)
    tell(console, command)
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


def _registered(deployment: Deployment, console: Console) -> Deployment:
    """Make the server know the keys that it does not know yet."""
    for site in deployment.sites:
        if site not in deployment.nodes:
            command = ("supernode", "register", str(deployment.secrets / f"{site}.pub"), FEDERATION)
            try:
                said = flwr(deployment, *command, "--name", site, say=console)
            except DeploymentError as error:
                raise DeploymentError(
                    f"{site} was not registered: {error}; if its key is in use, an earlier "
                    f"registration was cut short: remove {site}.key and {site}.pub from "
                    f"{deployment.secrets}, make others by {_SECRETS} --out {deployment.secrets} "
                    f"--add-hospital {site}, and repeat 'fedsilo deploy up'"
                ) from None
            deployment = deployment.with_node(site, str(said["node-id"]))
    return deployment


def flwr(deployment: Deployment, *arguments: str, say: Console | None = None) -> dict[str, Any]:
    """Return what a ``flwr`` command answers in JSON.

    Raises:
        DeploymentError: it failed; with Flower's own reason.
    """
    command = [tool("flwr"), *arguments, "--format", "json"]
    if say:
        tell(say, command)
    done = subprocess.run(
        command,
        env=deployment.environment(SERVER),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = {"error-message": _last_line(done.stdout + done.stderr)}
    if not said.get("success"):
        told = " ".join(str(said.get("error-message", said)).split())
        raise DeploymentError(f"'flwr {' '.join(arguments[:2])}' failed: {told}")
    return said


def _healthy(deployment: Deployment) -> bool:
    context = ssl.create_default_context(cafile=str(deployment.secrets / "ca.crt"))
    url = f"https://127.0.0.1:{deployment.ports['http']}/health"
    try:
        with urllib.request.urlopen(url, timeout=2, context=context):
            return True
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DeploymentError(
                f"the server's certificate does not hold: {reason.verify_message}; renew it by "
                f"{_SECRETS} --out {deployment.secrets} --renew-server, then 'fedsilo deploy down' "
                "and 'up'"
            ) from None
        return False


def _wait(deployment: Deployment, missing: Callable[[Deployment], Sequence[str]]) -> None:
    """Wait until no member is missing.

    Raises:
        DeploymentError: the process of one ended, or it takes too long; with the end of its log.
    """
    limit = time.monotonic() + _START_LIMIT
    while awaited := missing(deployment):
        ended = [member for member in awaited if deployment.process(member) is None]
        if ended or time.monotonic() > limit:
            member = (ended or awaited)[0]
            what = "ended at its start" if ended else f"was not there after {_START_LIMIT:.0f} s"
            path = deployment.log(member)
            last = _last_line(path.read_text(encoding="utf-8", errors="replace"))
            raise DeploymentError(f"{member} {what}: {last} (all of it: {path})")
        time.sleep(0.3)


def tell(console: Console, command: Sequence[str]) -> None:
    """Print a command as one could type it."""
    console.print(f"$ {shlex.join(command)}", highlight=False, markup=False, soft_wrap=True)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
