"""The server of a deployment in the foreground, as a service runs it.

    python -m fedsilo.deployment.service.serve /srv/deployment

``fedsilo deploy status``, ``run`` and ``add`` then work as after ``fedsilo deploy up``. Sites on
this machine are not started.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedsilo.core.errors import FedsiloError, SettingError, error_line
from fedsilo.core.one_line import format_count
from fedsilo.deployment.commands import make_secrets
from fedsilo.deployment.deployment import SERVER, DeploymentError, open_locked
from fedsilo.deployment.service.journal import LogLines, RunningRuns, run_logged
from fedsilo.deployment.worker.installed import refuse_other_flower


def serve(folder: Path) -> int:
    """Run the server of a deployment in the foreground, for a service, and return its exit code.

    Missing certificates and keys are made, and the registry and the configuration of ``flwr`` are
    written. Flower's SuperLink is started as a child process, with its output on stdout as log
    lines. deployment.json records this process as the server. It passes signals on to the
    SuperLink, and ends when the SuperLink ends.

    Raises:
        FedsiloError: there is no usable deployment, its server is already running, another
            command is changing the deployment, or Flower's version is not supported.
    """
    refuse_other_flower()
    with open_locked(folder) as deployment:
        running = deployment.process(SERVER)
        if running:
            raise DeploymentError(
                f"the server of {deployment.folder} already runs as process {running.pid}: end it "
                "by 'fedsilo deploy down'"
            )
        make_secrets(deployment)
        deployment.write_connection()
        deployment.write_registry()
        # This process counts as the server's: it passes signals on and ends with the server
        deployment.with_started(SERVER, os.getpid())
    # Outside the lock, which 'deploy add' needs while the server runs
    return run_logged(
        deployment.superlink_command(),
        LogLines(RunningRuns(deployment.runs)),
        sys.stdout,
        deployment.environment(SERVER),
        deployment.home(SERVER),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server of the deployment whose folder is the only argument, until it ends.

    Args:
        arguments: the command's arguments; None for those of this process.

    Returns:
        The server's exit code, or 1 after an error, which is printed to stderr. A missing or
        surplus argument is such an error.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        if len(arguments) != 1:
            raise SettingError(
                "the server's command takes the deployment's folder as its only argument, but got "
                f"{format_count(len(arguments), 'argument')}: name the folder"
            )
        return serve(Path(arguments[0]))
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
