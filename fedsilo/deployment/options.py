"""The options of ``deploy up`` and ``hospital start``, each defined once, with its help.

The functions of the API take them by ``Unpack``, so Python and the command line have the same
options. The modules of this folder receive the options as one mapping. Options that were not given
or are None are missing from the mapping.
"""

from collections.abc import Sequence
from typing import Annotated, TypedDict

from fedsilo.core.arguments import MaybePath, Option, SimulationFile

Texts = Sequence[str] | None
NodeConfig = Annotated[
    Sequence[str],
    Option("settings of the SuperNode, for example allow-folds=true", value="KEY=VALUE"),
]


class DeploymentOptions(TypedDict, total=False):
    """The options of a deployment; an existing deployment must match them."""

    sites: Annotated[int | None, "number of silos into which the experiment's data are cut"]
    site: Annotated[Texts, "the name of a site, instead of --sites"]
    host: Annotated[
        str | None, "HOST or HOST:PORT by which hospitals on other machines reach the server"
    ]
    data_dir: Annotated[MaybePath, "the folder of the sites' data"]
    device: Annotated[str | None, "device of all sites (default: cpu)"]
    file: SimulationFile
    node_config: NodeConfig


class RuleOptions(TypedDict, total=False):
    """The options that a hospital's rules are made from, before its first start."""

    trust: Annotated[str | None, "the hospital's level of trust: server, sums or nobody"]
    method: Annotated[Texts, "a method that runs may ask for (default: any); may be repeated"]
    dataset: Annotated[Texts, "a data set that runs may ask for (default: any); may be repeated"]
    rule: Annotated[Texts, "another key of the site file, such as max-epsilon=3.0; may be repeated"]


class HospitalOptions(RuleOptions, total=False):
    """The options that a hospital's operator gives with a kit."""

    folder: Annotated[MaybePath, "the folder for the opened kit (default: next to the zip)"]
    data_dir: Annotated[MaybePath, "the folder of the hospital's data"]
    device: Annotated[str | None, "auto, cpu, cuda or cuda:N (default: auto)"]
    node_config: NodeConfig


class ServiceOptions(TypedDict, total=False):
    """The options of a systemd service. All except ``user`` are only for a hospital's service."""

    user: Annotated[str | None, "the user of the service (default: the owner of its folder)"]
    data_dir: Annotated[MaybePath, "the folder of the hospital's data"]
    device: Annotated[str | None, "auto, cpu, cuda or cuda:N (default: auto)"]
    node_config: NodeConfig
