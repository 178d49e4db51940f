"""``fedsilo doctor site``: checks a hospital's node by the arguments that start it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, RecordDict

from fedsilo.client_app.privacy.signing import KnownKeys, own_code
from fedsilo.client_app.site.identity import NODE_FIELDS, prefix_refusals
from fedsilo.client_app.site.limits import MEGABYTE, limits_of
from fedsilo.client_app.site.node import own_cache, own_folder_of
from fedsilo.client_app.site.policy import NODE_LIMITS, SITE_FILE, SiteFile
from fedsilo.core.errors import unknown_key
from fedsilo.core.files.site_names import site_name_fault
from fedsilo.core.messages import ARRAYS, CONFIG, KEPT_STATE, METRICS, NUM_EXAMPLES, SECONDS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, build
from fedsilo.datasets.registry import data_set
from fedsilo.deployment.deployment import Deployment
from fedsilo.deployment.doctor import credentials, machine
from fedsilo.deployment.doctor.findings import Check, Failed, Passed, Verdict, require
from fedsilo.deployment.rules import effective_rules, explain_rules
from fedsilo.deployment.worker.installed import refuse_other_flower
from fedsilo.models.tasks.task import task_named
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.secure_keys import SECURE, SENT

if TYPE_CHECKING:
    from fedsilo.client_app.opening import OpenedSite
    from fedsilo.core.site_facts import SiteFacts

_PLACES = ("site", "state-dir", SITE_FILE)
_NODE_KEYS = (*_PLACES, *NODE_FIELDS, *NODE_LIMITS)
_DAYS = 14  # a certificate must stay valid for this many days
_DISK, _MEMORY = 1.0, 1.0  # gigabytes that must be free
_NEEDED = (NUM_EXAMPLES, SECONDS, KEPT_STATE)  # metrics that every reply has


@dataclass(frozen=True)
class SiteSetup:
    """The arguments that start a hospital's node, and the experiment that it would run."""

    node_config: Mapping[str, Value]
    superlink: str = ""  # the server's address; empty if it is not known
    authority: Path | None = None  # the authority's certificate, which signed the server's
    key: Path | None = None  # the hospital's private key
    host: str = "127.0.0.1"  # host and port of the SuperNode's own Runtime API
    port: int = 9094
    settings: RunSettings | None = None  # settings of the experiment; None if none is named
    node: int = 0  # the hospital's node id at the server; 0 if it is not known
    now: Callable[[], datetime] = machine.utc_now

    @classmethod
    def of(cls, deployment: Deployment, site: str, settings: RunSettings | None) -> SiteSetup:
        """Build the description of a deployment's local site, which the doctor's checks read.

        It has the site's node config, its private key, the authority's certificate, the port that
        the site itself listens on, and the server's address on this machine. A site that is not
        registered yet gets the node id 0. Whether the files exist is not checked.

        Args:
            deployment: the deployment.
            site: the name of a site on this machine.
            settings: the settings of a run, or None if no experiment is named.
        """
        ports = deployment.ports
        return cls(
            deployment.node_config[site],
            superlink=f"127.0.0.1:{ports['fleet']}",
            authority=deployment.secrets / "ca.crt",
            key=deployment.private_key(site),
            port=ports[site],
            settings=settings,
            node=int(deployment.nodes.get(site, "0")),
        )

    @property
    def name(self) -> str:
        """The hospital's name.

        The name is empty if the node config does not set it.
        """
        return str(self.node_config.get("site", ""))

    @property
    def context(self) -> Context:
        """The context that Flower would give to the ClientApp."""
        run: dict[str, Value] = {}
        if self.settings:
            run = self.settings.as_mapping()
        return Context(0, 0, dict(self.node_config), RecordDict(), run)

    @cached_property
    def rules(self) -> SiteFile:
        """Return the rules that apply at the site, computed at the first access.

        If both the site file and the node config set a limit, the stricter value applies.

        Raises:
            FedsiloError: the site file or the node config cannot be used, or a needed cap on
                epsilon is missing.
        """
        return effective_rules(self.context)

    @cached_property
    def site(self) -> OpenedSite:
        """Open the site's data, limits and settings as the first message of a run would.

        The first access loads the data. Later accesses return the same object.

        Raises:
            Skipped: no experiment is named.
            FedsiloError: the rules, the data or the settings cannot be used.
        """
        from fedsilo.client_app.opening import open_site  # PyTorch, which takes seconds

        self.required_settings()
        return open_site(self.rules.restrict(self.context))

    def required_settings(self) -> RunSettings:
        """Return the settings of the experiment, for a check that cannot do without them.

        Raises:
            Skipped: no experiment is named.
        """
        reason = "no experiment is named, so its data set and settings cannot be checked"
        return require(self.settings, reason)

    def secrets(self) -> tuple[Path, Path]:
        """Return the paths of the authority's certificate and the hospital's key.

        Checks call this only after they have found both files. If a path is None, that is a bug,
        and an assertion fails.
        """
        assert self.authority is not None
        assert self.key is not None
        return self.authority, self.key

    def is_online(self) -> bool:
        """Return whether the hospital's node is connected to the server now.

        The errors are those of ``credentials.is_online``.
        """
        return credentials.is_online(self.superlink, *self.secrets(), self.node, self.now())

    @property
    def own_folder(self) -> Path:
        """The folder for keys and private state that the hospital keeps over all runs.

        Raises:
            Skipped: the node config does not set 'state-dir'.
        """
        return require(own_folder_of(self.node_config, self.name), "there is no 'state-dir'")

    def folder(self, key: str) -> Path | None:
        """Return the folder that the node config names under ``key``, such as 'data-dir'.

        ``~`` is expanded. The result is None if the key is missing or empty. Whether the folder
        exists is not checked.
        """
        named = str(self.node_config.get(key, ""))
        if not named:
            return None
        return Path(named).expanduser()


def _software(setup: SiteSetup) -> Passed:
    found = machine.check_software()
    refuse_other_flower()
    return found


def _node_config(setup: SiteSetup) -> Verdict:
    if not setup.name:
        return Failed("the node config names no 'site'", "--node-config 'site=\"NAME\"'")
    fault = site_name_fault(setup.name)
    if fault:
        return Failed(fault, "choose another 'site' in the node config")
    limits = {}
    for key, value in setup.node_config.items():
        if key not in _NODE_KEYS:
            raise unknown_key(key, _NODE_KEYS)
        if key in NODE_LIMITS:
            limits[key] = value
    # Each raises an error for a value of the wrong type or range; the results are not needed
    build(SiteFile, limits)
    build(CommonSettings, {"machine.device": setup.node_config.get("device", "auto")})
    state = setup.folder("state-dir")
    if state is None:
        return Failed(
            "the node config names no 'state-dir', so private state would be lost at a restart",
            "--node-config 'state-dir=\"/a/folder\"'",
        )
    return f"site {setup.name}, state in {state}"


def _rules(setup: SiteSetup) -> Verdict:
    path, is_named = setup.folder(SITE_FILE), SITE_FILE in setup.node_config
    # A missing file must not pass as "no rules": the hospital meant to limit something
    if path and not machine.has_site_file(path):
        return Failed(f"site file {path} is missing", "copy it there, or remove 'site-file'")
    rules = setup.rules
    if rules.audit_log:
        machine.check_writable_folder(Path(rules.audit_log).parent, "the audit log's folder")
    said = "there is none, but floors and quotas still apply"
    if is_named:
        said = f"{path} can be read"
    return Passed(said, tuple(explain_rules(rules, is_named)))


def _certificate(setup: SiteSetup) -> str:
    authority = require(setup.authority, "no --root-certificates are named")
    return credentials.check_lasting_certificate(authority, setup.now(), _DAYS)


def _key(setup: SiteSetup) -> str:
    key = require(setup.key, "no --auth-supernode-private-key is named")
    credentials.check_secret(key, credentials.OPENSSH_KEY, private=True)
    return f"only the owner can read {key}"


def _signing(setup: SiteSetup) -> Verdict:
    folder = setup.own_folder
    own = require(own_code(folder), "the signing key is made at the first start")
    details = []
    for site, key in sorted(KnownKeys(folder).read().items()):
        if not key.compared:
            details.append(f"the key of {site} was not compared, so there is no sum with {site}")
        # The key has changed since people compared it, so somebody may stand in for that site
        elif key.received not in ("", key.compared):
            return Failed(
                f"{site} signs with key {key.received}, but {key.compared} was compared",
                f"ask {site} by telephone, then 'fedsilo hospital keys'",
            )
        else:
            details.append(f"the key of {site} was compared on {key.day}")
    return Passed(f"the site signs with key {own}", tuple(details))


def _server(setup: SiteSetup) -> str:
    address = require(setup.superlink, "no --superlink is named")
    authority = require(
        setup.authority, "no --root-certificates are named to check the server with"
    )
    credentials.check_handshake(address, authority)
    return f"{address} answers with a certificate of {authority}"


def _clock(setup: SiteSetup) -> str:
    require(setup.key, "no key is named to ask the server with")
    return credentials.check_clock(setup.superlink, *setup.secrets(), setup.now())


def _admission(setup: SiteSetup) -> str:
    node = require(setup.node, "the node id of this hospital is not known; name its --kit")
    state = "not connected"
    if setup.is_online():
        state = "online"
    return f"registered at the SuperLink as node {node}, {state}"


def _port(setup: SiteSetup) -> str:
    # The path of the key, in the command line of the SuperNode, tells it from other programs
    own = str(setup.key or "")
    return machine.check_port(setup.host, setup.port, "the SuperNode's Runtime API", own)


def _disk(setup: SiteSetup) -> str:
    folders: list[Path] = []
    for key in ("state-dir", "cache-dir"):
        named = setup.folder(key)
        if named is None:
            continue
        # Before the first start the folder itself does not exist yet
        existing = machine.find_existing_folder(named)
        if existing not in folders:
            folders.append(existing)
    for folder in folders:
        machine.check_writable_folder(folder, "folder")
    return machine.check_disk_space(folders, _DISK)


def _memory(setup: SiteSetup) -> str:
    return machine.check_memory(_MEMORY, setup.rules.max_memory * MEGABYTE / machine.GIGABYTE)


def _data_folder(setup: SiteSetup) -> str:
    reason = "the node config names no 'data-dir'; some data sets need none"
    folder = machine.check_data_folder(require(setup.folder("data-dir"), reason))
    return f"{folder} exists and is not empty"


def _data(setup: SiteSetup) -> Passed:
    silo = setup.site.silo
    lines = []
    names = task_named(silo.task).stratum_names(silo.class_names())
    for split, label_counts in silo.label_counts().items():
        counts = []
        for name, count in zip(names, label_counts, strict=True):
            counts.append(f"{count} of {name}")
        lines.append(f"{split}: {', '.join(counts)}")
    lines += _unlike_columns(setup)
    sizes = ", ".join(f"{len(split)} {name}" for name, split in silo.splits().items())
    left_out = ""
    if silo.dropped:
        left_out = f"; {silo.dropped} left out as missing, out of range or broken"
    dataset = setup.required_settings().common.dataset
    cache = own_cache(setup.context) or "the usual cache"
    return Passed(f"{sizes} samples of {dataset}{left_out}, cached in {cache}", tuple(lines))


def _unlike_columns(setup: SiteSetup) -> list[str]:
    """Describe each column of the site's table whose values are unlike the schema's statistics.

    The schema may state each column's mean and standard deviation. ``compare_with`` finds the
    columns whose training data differ so much from them that the unit may be another. Columns with
    fewer than 'privacy.sums-min-count' known values are left out. If the schema has no means, the
    list is empty.
    """
    silo = setup.site.silo
    if silo.declared is None:
        return []
    from fedsilo.models.maths.standardisation import sums_of  # PyTorch
    from fedsilo.models.maths.unlike_columns import compare_with

    common = setup.site.settings
    words = data_set(common.dataset).column_words(common)
    lines = []
    own = sums_of(silo.train.inputs)
    for unlike in compare_with(silo.features, own, silo.declared, common.sums_min_count):
        lines.append(unlike.sentence("in the schema", words[unlike.column].title))
    return lines


def _requests(setup: SiteSetup) -> Verdict:
    """Check whether the hospital would refuse the run, and describe the data that would leave.

    The checks have the order of a real run: the request, the limits, the method's demands on the
    site's data, and the records to be sent. The request is checked only if the site has a site
    file. Nothing is trained or sent.

    Returns:
        ``Failed`` if the method cannot use the site's data. Otherwise ``Passed``, with one sentence
        for each kind of data that would leave. A last sentence names the splits whose metrics would
        not leave, if there are any.

    Raises:
        FedsiloError: the rules refuse a request. A run would get the same error.
        Skipped: no experiment is named.
    """
    from fedsilo.client_app.hello import site_facts
    from fedsilo.client_app.session import SiteSession

    settings = setup.required_settings()
    common, context = settings.common, setup.rules.restrict(setup.context)
    # The order is that of a real run: request, limits, the site's identity, data to be sent
    with prefix_refusals(setup.name):
        if SITE_FILE in setup.node_config:
            setup.rules.refuse_request(common, 1)
        limits_of(context).refuse_settings(common)
        facts = site_facts(SiteSession.admit(setup.site))
        unfit = settings.own.why_unfit(facts)
        if unfit:
            return Failed(unfit)
        names, sentences = _describe_sent_data(settings, facts)
        setup.rules.refuse_names(names)
    withheld = [split for split in facts.sizes if split not in facts.measured]
    if withheld:
        sentences.append(f"no metrics on {', '.join(withheld)} leave")
    said = f"no request of {common.method} on {common.dataset} would be refused"
    return Passed(said, tuple(sentences))


def _describe_sent_data(settings: RunSettings, facts: SiteFacts) -> tuple[list[str], list[str]]:
    """List the records that a site would send in the first round, and describe the data.

    To find them, the server's part of the method runs in this process, with this site as the only
    one. It stops when it asks the site for the first time. Nothing is trained.

    Returns:
        The sorted names of the records, such as ``arrays/head.weight``, as the site file's rule
        'records' names them. The second list has a sentence for each kind of data, such as
        "leaves ...".
    """
    from fedsilo.strategies.loop.ask import first_question
    from fedsilo.strategies.meeting.participants import Participants

    # The server's side of the method runs here, with this site as the only one, until it asks for
    # the first time. Its question states which arrays it expects
    alone = Participants({facts.site: facts}, {facts.site: 1})
    method = strategy_class(settings.common.method)(settings.common, settings.own, alone)
    state = method.initial_state()
    question = first_question(lambda ask: method.round(state, ask), [facts.site])
    names = {f"{METRICS}/{key}" for key in _NEEDED}
    for array in question.expect.get(facts.site, {}):
        names.add(f"{ARRAYS}/{array}")
    for key in facts.to_config():
        names.add(f"{CONFIG}/{key}")
    if settings.common.secure_aggregation != "none":
        for key in SENT:
            names.add(f"{SECURE}/{key}")
    sentences = [f"leaves {sentence}" for sentence in method.leaves()]
    return sorted(names), sentences


def _gpu(setup: SiteSetup) -> Verdict:
    from fedsilo.deployment.doctor import gpu  # PyTorch

    return gpu.check_gpu(str(setup.node_config.get("device", "auto")))


CHECKS: tuple[Check[SiteSetup], ...] = (
    Check("software", _software),
    Check("node config", _node_config),
    Check("site file", _rules, ("node config",)),
    Check("authority", _certificate),
    Check("key", _key),
    Check("signing", _signing, ("node config",)),
    Check("server", _server, ("authority",)),
    Check("clock", _clock, ("server", "key")),
    Check("admission", _admission, ("clock",)),
    Check("port", _port),
    Check("disk", _disk, ("node config",)),
    Check("memory", _memory, ("site file",)),
    Check("data folder", _data_folder),
    Check("data", _data, ("site file",)),
    Check("requests", _requests, ("data",)),
    Check("gpu", _gpu, ("node config",)),
)
