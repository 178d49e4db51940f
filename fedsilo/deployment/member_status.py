"""``fedsilo deploy status``: which members of a deployment run, and when the server saw each."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedsilo.deployment.deployment import SERVER, Deployment, read_deployment
from fedsilo.deployment.flower_commands import list_online_sites, server_runs
from fedsilo.deployment.node_times import NodeTimes, read_node_times


@dataclass(frozen=True)
class MemberStatus:
    """The state of one member of a deployment: the server or a site."""

    member: str  # ``server`` or the site
    pid: int | None  # id of its process; None if the process does not run on this machine
    seen: str  # the site's state at the server, online or offline; empty for the server itself
    log: Path | None  # log file of its process; None if the hospital is on another machine
    times: NodeTimes | None = None  # the site's connections; None if unknown

    @property
    def last_seen(self) -> str:
        """Describe a site's connection to the server in words, with the time of its last change.

        The text is empty for the server itself. If the times are not known, it is "online" or
        "offline". Otherwise it is the first that applies:

        - "never connected"
        - "online since TIME"
        - "offline", if the end of the newest connection is not known, because the server was down
        - "cannot start: CHECK (TIME)", if the newest start failed a check
        - "offline since TIME"

        A time has the form "2026-03-03 09:41:07 UTC".
        """
        times = self.times
        if not self.seen or times is None:
            return self.seen
        if times.connected is None:
            return "never connected"
        if self.seen == "online":
            return f"online since {_time(times.connected)}"
        # A server that is down has not seen its newest connections end
        if times.left is None or times.left < times.connected:
            return self.seen
        if times.fault:
            return f"cannot start: {times.fault} ({_time(times.left)})"
        return f"offline since {_time(times.left)}"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def status(folder: Path) -> list[MemberStatus]:
    """Return the state of all members of a deployment, as ``fedsilo deploy status`` shows it.

    The order is: the server, the sites on this machine, the hospitals on other machines. If the
    server does not run, all sites count as offline.

    Returns:
        One entry for each member. A hospital on another machine has neither a process id nor a log.
        A site has the times of its connections if the server's database has them.

    Raises:
        DeploymentError: the folder does not contain a deployment, or the server runs but does not
            answer.
    """
    deployment = read_deployment(folder)
    # The process of a server in a container is not known here, so its health is asked for instead
    online_sites: list[str] = []
    if server_runs(deployment):
        online_sites = list_online_sites(deployment)
    members = [MemberStatus(SERVER, _pid(deployment, SERVER), "", deployment.log(SERVER))]
    by_node = read_node_times(deployment)
    for site in (*deployment.sites, *deployment.hospitals):
        state = "offline"
        if site in online_sites:
            state = "online"
        log = None
        if site in deployment.sites:
            log = deployment.log(site)
        times = by_node.get(deployment.nodes.get(site, ""))
        members.append(MemberStatus(site, _pid(deployment, site), state, log, times))
    return members


def _pid(deployment: Deployment, member: str) -> int | None:
    process = deployment.process(member)
    if process is None:
        return None
    return process.pid
