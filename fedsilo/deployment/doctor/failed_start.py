"""Tells the server that a hospital's start has failed, so that its operator need not guess."""

from contextlib import closing, suppress

from fedsilo.deployment.doctor.credentials import Fleet
from fedsilo.deployment.doctor.findings import Refused
from fedsilo.deployment.doctor.site import SiteSetup
from fedsilo.deployment.node_times import interval_for

# Without these nobody can connect, so nothing can be told
_CONNECTION = ("authority", "key", "server", "clock", "admission")


def tell_server(setup: SiteSetup, check: str) -> None:
    """Tell the server which check made a hospital's start fail, so that its operator can see it.

    The node connects for a moment with a heartbeat interval that is a code for the check. Nothing
    is sent for checks of the connection itself, or if the server is unknown. If the server cannot
    be told, no error is raised.
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
