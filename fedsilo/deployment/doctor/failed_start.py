"""Tells the server that a hospital's start has failed, so that its operator need not guess."""

from contextlib import closing, suppress

from fedsilo.deployment.doctor.credentials import Fleet
from fedsilo.deployment.doctor.findings import Refused
from fedsilo.deployment.doctor.site import SiteSetup
from fedsilo.deployment.node_times import interval_for

# Without these nobody can connect, so nothing can be told
_CONNECTION = ("authority", "key", "server", "clock", "admission")


def tell_server(setup: SiteSetup, check: str) -> None:
    """Tell the server which check made a hospital's start fail.

    The node connects for a moment with a heartbeat interval that is a code for the check. ``fedsilo
    deploy status`` at the server then names the check. A node that is already connected stays
    connected.

    Nothing is sent if the check concerns the connection itself ("authority", "key", "server",
    "clock" or "admission"), or if the server's address or the node id is unknown. If the server
    cannot be told, no error is raised.

    Args:
        setup: the hospital's setup, with its kit's files.
        check: the name of the failed check, such as "data folder".
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest

    if check in _CONNECTION or not setup.superlink or not setup.node:
        return
    with (
        suppress(Refused, OSError, ValueError),
        closing(Fleet(setup.superlink, *setup.secrets(), setup.now())) as fleet,
    ):
        interval = interval_for(check)
        activate = ActivateNodeRequest(public_key=fleet.public_key, heartbeat_interval=interval)
        # Refused for a node that is connected, which must not be disconnected
        if not fleet.refusal("ActivateNode", activate):
            fleet.refusal("DeactivateNode", DeactivateNodeRequest(node_id=setup.node))
