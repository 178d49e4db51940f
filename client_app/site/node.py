"""What a node's own config says of it: whether it is simulated, and where its own files lie."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context

OWN = ".own"  # in the 'state-dir'; no run can be called so, for its name begins with a dot


def is_simulated(context: Context) -> bool:
    """Tell whether this is a site of a simulation: by its own node config, never by a message."""
    own = {"site", "state-dir"} & context.node_config.keys()
    return "partition-id" in context.node_config and not own


def own_folder(context: Context, site: str) -> Path | None:
    """Return the folder of what a hospital keeps over all runs; None: it named no 'state-dir'.

    The ledger, the secret seed, the run book and the audit log lie there: no run's name reaches it.
    """
    if "state-dir" not in context.node_config:
        return None
    return Path(str(context.node_config["state-dir"])) / OWN / site


def own_cache(context: Context) -> str:
    """Return a real site's cache: its node config's, else its environment's, else its own.

    An empty text means the environment's, or the usual one, where no folder is named at all.
    """
    if "cache-dir" in context.node_config:
        return str(context.node_config["cache-dir"])
    if os.environ.get("FEDSILO_CACHE") or "state-dir" not in context.node_config:
        return ""
    return str(Path(str(context.node_config["state-dir"])) / OWN / "cache")
