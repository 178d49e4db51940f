"""What tests do to the processes of a deployment."""

import time

from fedsilo.server_app.deploy.deployment import Deployment
from fedsilo.server_app.run.processes import runs


def kill(deployment: Deployment, member: str) -> None:
    """Kill a member's process and all that it started, as a power cut would."""
    process = deployment.process(member)
    assert process
    tree = [process, *process.children(recursive=True)]
    for one in tree:
        one.kill()
    while any(runs(one) for one in tree):
        time.sleep(0.05)
