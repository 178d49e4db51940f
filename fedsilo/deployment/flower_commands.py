"""Calls Flower's ``flwr`` command, asks for the state of sites, and waits for members."""

import http.client
import json
import shlex
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import reason_of
from fedsilo.core.processes import tool
from fedsilo.deployment.deployment import FEDERATION, SERVER, Deployment, DeploymentError

Say = Callable[[str], None]
_START_LIMIT = 90.0  # seconds; a member that takes longer to start counts as failed


def flwr(deployment: Deployment, *arguments: str, say: Say | None = None) -> dict[str, Any]:
    """Run a ``flwr`` command for the deployment's server, and return its JSON answer.

    The call waits until the command ends, without a time limit. A command that reports no success
    in its answer counts as failed.

    Args:
        deployment: the deployment, whose server must be running for most commands.
        arguments: the words after ``flwr``, such as "run". "--format json" is added.
        say: prints the command before it is run. None means that nothing is printed.

    Raises:
        DeploymentError: the command failed. The message has Flower's error, or the last line of
            output. If the server's certificate is at fault, the message says that instead.
        ProcessError: ``flwr`` is not installed.
    """
    command = [tool("flwr"), *arguments, "--format", "json"]
    if say:
        print_command(command, say)
    environment = deployment.environment(SERVER)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        answer = {"error-message": last_line(done.stdout + done.stderr)}
    # The answer states an error, or the last line of the output if that was not JSON
    if not answer.get("success"):
        is_healthy(deployment)  # raises a clearer error if the certificate is the cause
        reason = " ".join(str(answer.get("error-message", answer)).split())
        raise DeploymentError(f"'flwr {' '.join(arguments[:2])}' failed: {reason}")
    return answer


def unknown_nodes(deployment: Deployment) -> list[str]:
    """List the ids of nodes that the server has registered, but that belong to no site.

    The ids are sorted as strings. A node is a hospital's connection, with its own key.

    Raises:
        DeploymentError: the server does not answer.
    """
    known = deployment.nodes.values()
    unknown = []
    for node, state in states_by_node(deployment).items():
        if node not in known and state != "unregistered":
            unknown.append(node)
    return sorted(unknown)


def states_by_node(deployment: Deployment) -> dict[str, str]:
    """Return the status of each node that was ever registered at the server, by node id.

    A status is "registered", "online", "offline" or "unregistered", as ``flwr supernode list``
    shows it. The errors are those of ``flwr``.
    """
    nodes = flwr(deployment, "supernode", "list", FEDERATION)["nodes"]
    return {str(node["node-id"]): str(node["status"]) for node in nodes}


def node_states(deployment: Deployment) -> dict[str, str]:
    """Return the status of each site at the server, such as "online", by the site's name.

    The sites on this machine come first, then the hospitals on other machines. If a site has no
    node, or the server does not know the node, the status is "unregistered".

    Raises:
        DeploymentError: the server does not answer.
    """
    by_node = states_by_node(deployment)
    by_site = {}
    for site in (*deployment.sites, *deployment.hospitals):
        node = deployment.nodes.get(site, "")
        by_site[site] = by_node.get(node, "unregistered")
    return by_site


def list_online_sites(deployment: Deployment) -> list[str]:
    """List the sites that the server reports as online, including hospitals on other machines.

    Raises:
        DeploymentError: the server does not answer.
    """
    return [site for site, state in node_states(deployment).items() if state == "online"]


def list_missing_sites(deployment: Deployment, seen: Sequence[str] | None = None) -> list[str]:
    """List the sites on this machine that are not online, or whose process is not running.

    The process is checked too, because the server notices the end of a killed process only after a
    while. Hospitals on other machines are not included.

    Args:
        deployment: the deployment.
        seen: the sites that are online. None means that the server is asked.

    Raises:
        DeploymentError: the server was asked but does not answer.
    """
    if seen is None:
        seen = list_online_sites(deployment)
    # The server notices only after a while that a process was killed, so the process counts too
    return [site for site in deployment.sites if site not in seen or not deployment.process(site)]


def server_runs(deployment: Deployment) -> bool:
    """Return whether the deployment's server is running, as a local process or in a container.

    A local process is known from deployment.json. A server in a container counts as running if the
    deployment has an address for hospitals and the server answers a health request.

    Raises:
        DeploymentError: the server's certificate is not valid, or the authority's file is
            missing or cannot be used.
    """
    if deployment.process(SERVER):
        return True
    return bool(deployment.address) and is_healthy(deployment)


def is_healthy(deployment: Deployment) -> bool:
    """Return whether the deployment's server answers a health request on this machine.

    The request is an HTTPS GET of /health on 127.0.0.1, with a time limit of two seconds. It
    bypasses any proxy, and the certificate is checked against the deployment's authority. If the
    connection fails, the answer is not HTTP, or it has an error status, the result is False.

    Raises:
        DeploymentError: the server's certificate is not valid, or the authority's file (ca.crt) is
            missing or cannot be used.
    """
    authority = deployment.secrets / "ca.crt"
    fault = file_fault(authority)  # a pipe would be waited for
    if fault:
        raise DeploymentError(f"{authority} {fault}: restore the server's own file")
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # also ssl.SSLError, for a file that holds no certificate
        raise DeploymentError(
            f"cannot use {authority} ({reason_of(error)}): restore the server's own file"
        ) from None
    # Without the proxy that the environment may name, because the server is on this machine
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with direct.open(f"https://127.0.0.1:{deployment.ports['http']}/health", timeout=2):
            return True
    except OSError as error:  # URLError is one
        reason = getattr(error, "reason", None)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DeploymentError(
                f"the server's certificate is not valid: {reason.verify_message}; 'fedsilo deploy "
                "renew server' renews it, then 'fedsilo deploy down' and 'up'"
            ) from None
        return False
    except http.client.HTTPException:  # the port is another program's, which speaks no HTTP
        return False


def wait_for(deployment: Deployment, missing: Callable[[Deployment], Sequence[str]]) -> None:
    """Wait until no member is missing any more, for at most 90 seconds.

    The function calls ``missing`` every 0.3 seconds, and returns as soon as its list is empty. This
    may be at the first call. Errors that ``missing`` raises are not caught.

    Args:
        deployment: the deployment, whose processes are checked and whose logs explain a failure.
        missing: takes the deployment, and returns a list of the members that are still missing.

    Raises:
        DeploymentError: the process of a missing member has ended, or a member is still missing
            after 90 seconds. The message has the last line of the member's log.
    """
    limit = time.monotonic() + _START_LIMIT
    failed, failure = "", ""
    while not failed:
        awaited = missing(deployment)
        if not awaited:
            return
        # A member whose process has ended will not come, so waiting for the limit is useless
        ended = [member for member in awaited if deployment.process(member) is None]
        if ended:
            failed, failure = ended[0], "ended at its start"
        elif time.monotonic() > limit:
            failed, failure = awaited[0], f"did not start in {_START_LIMIT:.0f} s"
        else:
            time.sleep(0.3)
    path = deployment.log(failed)
    last = last_line(path.read_text(encoding="utf-8", errors="replace"))
    raise DeploymentError(
        f"{failed} {failure}: {last} (whole log: {path}; to find causes: fedsilo doctor)"
    )


def wait_until_left(deployment: Deployment, site: str, say: Say) -> None:
    """Wait until the server notices that a site, whose process was killed, is no longer online.

    The server admits one process per site, so the site can be started again only afterwards. The
    server is asked once a second, and the function returns as soon as the site is not online. If
    the site is online at first, ``say`` prints a line about the wait. After 90 seconds, the
    function returns without an error.

    Raises:
        DeploymentError: the server does not answer.
    """
    limit = time.monotonic() + _START_LIMIT
    if site in list_online_sites(deployment):
        say(f"{site} ended without signing off: waiting up to a minute until the server notices")
    while site in list_online_sites(deployment) and time.monotonic() < limit:
        time.sleep(1.0)


def print_command(command: Sequence[str], say: Say) -> None:
    """Pass a command to ``say`` as a line that a user could type in a shell."""
    say(f"$ {shlex.join(command)}")


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, without the white space around it.

    If all lines are blank, the result is "no output".
    """
    for line in reversed(text.splitlines()):
        if line.strip():
            return line.strip()
    return "no output"
