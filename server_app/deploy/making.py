"""How a deployment is made: its sites, ports and node config, its keys; and what it refuses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.datasets.registry import silo_names
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import parse_assignment
from fedsilo.server_app.deploy.deployment import Deployment, DeploymentError, plan
from fedsilo.server_app.deploy.flower import MAKE_SECRETS, Say, last_line, tell
from fedsilo.server_app.run.planning import RunSources, planned
from fedsilo.server_app.run.processes import app_folder, free_ports


@dataclass(frozen=True)
class DeploymentRequest:
    """What a deployment is to be made of; of one that is there it must be true.

    Attributes:
        experiment: whose silos are the sites, unless ``sites`` names them.
        site_count: how many silos the experiment is cut into; None: as many as it has.
        sites: the sites by name.
        data_dir: where the sites' data lie.
        device: of all sites; None: cpu.
        node_config: what else every SuperNode is told, as ``key=value``.
        file: the simulation file; None: the usual one.
    """

    experiment: str = "uefl-digits"
    site_count: int | None = None
    sites: Sequence[str] = ()
    data_dir: Path | None = None
    device: str | None = None
    node_config: Sequence[str] = ()
    file: Path | None = None

    def own_config(self) -> dict[str, Value]:
        """Return what is asked for of every site's node config."""
        config: dict[str, Value] = {}
        if self.device:
            config["device"] = self.device
        if self.data_dir:
            config["data-dir"] = str(self.data_dir.expanduser().resolve())
        return config | dict(parse_assignment(text) for text in self.node_config)


def refuse_changes(deployment: Deployment, request: DeploymentRequest) -> None:
    """Refuse what a deployment does not have: it was made with its own.

    Raises:
        SettingError: names the first that differs.
    """
    config = deployment.node_config[deployment.sites[0]]
    asked: dict[str, tuple[Value, Value]] = {
        f"--node-config {key}": (value, config.get(key, ""))
        for key, value in request.own_config().items()
    }
    if request.site_count:
        asked["--sites"] = request.site_count, len(deployment.sites)
    if request.sites:
        asked["--site"] = ", ".join(sorted(request.sites)), ", ".join(deployment.sites)
    for option, (wanted, present) in asked.items():
        if wanted != present:
            raise SettingError(
                f"{option} is {wanted}, and the deployment in {deployment.folder} has "
                f"{present or 'none'}: leave it out, or choose another --deployment"
            )


def make_deployment(folder: Path, request: DeploymentRequest) -> Deployment:
    """Return a new deployment of the sites asked for, with ports that are free now.

    Args:
        folder: where it is to lie, absolute.
        request: its sites and what they are told.

    Raises:
        SettingError: the folder would go to every site, or the sites cannot be.
    """
    app = app_folder()
    if folder.is_relative_to(app) and folder != app / "deployment":
        raise SettingError(
            f"--deployment {folder} is in fedsilo's checkout, which goes to every site with a run: "
            f"choose a folder outside, or {app / 'deployment'}"
        )
    defaults: dict[str, Value] = {"device": "cpu"}
    for key, variable in (("data-dir", "FEDSILO_DATA"), ("cache-dir", "FEDSILO_CACHE")):
        if given := os.environ.get(variable):
            defaults[key] = str(Path(given).expanduser().resolve())
    sites = list(request.sites) or _silos(request)
    made = plan(folder, sites, free_ports(2 + len(sites)), defaults | request.own_config())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for member in made.members:
        home = made.home(member)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)  # the database holds all that passes
        (home / "flwr").mkdir(mode=0o700, exist_ok=True)
    made.write()
    return made


def _silos(request: DeploymentRequest) -> list[str]:
    """Return the names of an experiment's silos, as many as are asked for."""
    count = request.site_count
    overrides: dict[str, Value] = {"silos": count} if count else {}
    sources = RunSources(file=request.file, out=Path("/"))
    settings, _ = planned(request.experiment, sources, overrides=overrides)
    names = silo_names(settings.common)
    if count and len(names) != count:
        raise SettingError(
            f"--sites is {count}, and {request.experiment} has the silos "
            f"{', '.join(names) or 'that the sites name'}: name them by --site, or ask for as many"
        )
    return names


def make_secrets(deployment: Deployment, say: Say) -> None:
    """Make certificates and keys; if they are there, only look that nobody else may read them.

    Raises:
        DeploymentError: they could not be made, or others may read a key.
    """
    if deployment.secrets.is_dir():
        _refuse_open_keys(deployment.secrets)
        return
    command = [
        *("bash", str(app_folder() / MAKE_SECRETS), "--out", str(deployment.secrets)),
        *("--host", "localhost"),
        *(part for site in deployment.sites for part in ("--hospital", site)),
    ]
    tell(command, say)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeploymentError(f"no secrets were made: {last_line(done.stderr or done.stdout)}")
    say(done.stdout.strip())


def _refuse_open_keys(secrets: Path) -> None:
    """Refuse to start with a private key that others on this machine may read."""
    for path in sorted(secrets.glob("*.key")):
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            raise DeploymentError(
                f"{path} has mode {mode:o}, others may read it: chmod 600 it, and make a new key "
                "if somebody may have"
            )
