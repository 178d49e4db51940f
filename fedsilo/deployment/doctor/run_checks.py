"""``fedsilo doctor run``: asks the sites for their facts as a run would, but trains nothing."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import FedsiloError
from fedsilo.core.one_line import as_word, format_count, one_line
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployed_run import meet
from fedsilo.deployment.deployment import Deployment
from fedsilo.deployment.doctor.findings import (
    Check,
    Failed,
    Finding,
    Passed,
    Status,
    require,
)
from fedsilo.deployment.flower_commands import list_missing_sites, list_online_sites, server_runs
from fedsilo.engines.inline_engine import inline_grid
from fedsilo.engines.planning import plan_run, planned_settings
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.run.checks import PLAN_CHECKS, Plan, find_problems
from fedsilo.server_app.run.meeting import Meeting
from fedsilo.server_app.run.meeting import meet as meet_simulated
from fedsilo.strategies.meeting.terms import split_sites

_REFUSED = (
    "fix it at that site, where 'fedsilo doctor site' says more, or lower 'run.min-sites' and run "
    "without the site"
)
_MAX_LENGTH = 600  # characters; a longer refusal of a site is cut


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """The experiment, settings and sites that ``fedsilo doctor run`` checks."""

    experiment: str
    sources: RunSources  # the sources of its settings
    seed: int | None = None  # None for the experiment's seed
    supernodes: int | None = None  # number of simulated sites; None for the experiment's
    deployment: Deployment | None = None  # the deployment with the sites; None to simulate them

    @cached_property
    def plan(self) -> tuple[RunSettings, Mapping[str, Value]]:
        """Compute the run's settings, and the resources of a simulation, once for this object.

        The experiment has the settings. ``sources``, such as a TOML file, override them, and then
        ``seed`` overrides the seed. For a deployment, the resources are an empty mapping, and no
        data are needed. The resources of a simulation include ``num-supernodes``, the number of
        simulated sites. A simulation's data must be on this machine.

        Raises:
            SettingError: a source of settings cannot be read, or a setting or resource is invalid.
            DataError: the silos of a simulation cannot be listed, for example because the data
                set is not on this machine. A deployment does not raise this error.
        """
        seed: dict[str, Value] = {}
        if self.seed is not None:
            seed["seed"] = self.seed
        if self.deployment:
            return planned_settings(self.experiment, self.sources, seed), {}
        return plan_run(self.experiment, self.sources, supernodes=self.supernodes, overrides=seed)

    @cached_property
    def meeting(self) -> Meeting:
        """Ask the run's sites about their data, and return their answers and reasons for refusals.

        The first access asks the deployment's sites. If there is no deployment, simulated sites
        are made in this process and asked instead. Later accesses return the same answers. If
        asking raises an error, the next access asks again.
        """
        if self.deployment:
            return meet(self.experiment, self.deployment, self.sources, self.seed)
        settings, resources = self.plan
        with inline_grid(settings, int(resources["num-supernodes"])) as grid:
            return meet_simulated(grid, settings)

    @property
    def met(self) -> Meeting:
        """Return the answers that the sites have already given to the check ``sites``.

        Unlike ``meeting``, this property never asks the sites. An attempt that failed is not
        repeated, because it would take the same time again.

        Raises:
            Skipped: the check ``sites`` has not run, or could not ask the sites.
        """
        require("meeting" in vars(self), "the sites could not be asked")
        return self.meeting


def _settings(setup: RunSetup) -> str:
    common = setup.plan[0].common
    rounds = format_count(common.rounds, "round")
    clip, noise = common.sample_clip_norm, common.noise_multiplier
    privacy = "without differential privacy"
    if clip:
        privacy = f"patients' gradients clipped to {clip:g}, noise {noise:g}"
    return f"{setup.experiment}: {common.method} on {common.dataset}, {rounds}, {privacy}"


def _plan(setup: RunSetup) -> Sequence[Finding] | str:
    """Check that a simulation's settings fit together, and that the files they name exist.

    Returns:
        A failed finding for each problem that would end the simulation at its start. If there is no
        problem, the result is one sentence that says so.

    Raises:
        Skipped: the run is for a deployment, whose sites have the files themselves.
    """
    require(not setup.deployment, "the sites of a deployment have the files themselves")
    settings, resources = setup.plan
    plan = Plan(settings.common, resources)
    # All problems, unlike the start of a run, which ends at the first
    failed = []
    for problem in find_problems(PLAN_CHECKS, plan):
        failed.append(Finding("plan", Status.FAILED, str(problem)))
    return failed or "settings fit together, and the files that they name are here"


def _members(setup: RunSetup) -> Passed | Failed:
    """Check that the server of a deployment is running, and that the run's local sites are online.

    The run's sites are those in 'server.sites'. All sites are checked if that setting is empty or
    cannot be read. A hospital on another machine that is not online is only listed as a detail.

    Returns:
        ``Failed`` if the server is down, or if a site on this machine is down or offline. Otherwise
        ``Passed``.

    Raises:
        Skipped: no deployment is named.
        DeploymentError: the server does not answer.
    """
    deployment = require(setup.deployment, "no deployment is named, so the sites are simulated")
    again = f"fedsilo deploy up --deployment {as_word(deployment.folder)}"
    if not server_runs(deployment):
        return Failed(f"the server of {deployment.folder} is down", again)
    wanted: Collection[str] = ()
    with suppress(FedsiloError):
        wanted = split_sites(setup.plan[0].common.sites)
    wanted = wanted or (*deployment.sites, *deployment.hospitals)
    seen = list_online_sites(deployment)
    gone = [site for site in list_missing_sites(deployment, seen) if site in wanted]
    if gone:
        return Failed(f"{', '.join(gone)} of {deployment.folder} are down or offline", again)
    # Only reported, because this machine cannot start a process at another hospital
    away = [site for site in deployment.hospitals if site in wanted and site not in seen]
    details = []
    if away:
        details.append(f"not online: {', '.join(away)}")
    sites = format_count(len(set(seen).intersection(wanted)), "site")
    return Passed(f"the server and {sites} of {deployment.folder} are online", tuple(details))


def _sites(setup: RunSetup) -> Sequence[Finding]:
    """Ask the run's sites about their data and software, and return a finding for each site.

    The finding of a site that answered has passed, and describes the answer. The finding of a site
    that refused the run or did not answer has failed, and gives the reason.

    Raises:
        Skipped: the server of the deployment is not running.
        FedsiloError: the sites could not be asked.
    """
    if setup.deployment:
        require(server_runs(setup.deployment), "the server is down")
    findings = []
    for site, facts in setup.meeting.sites.items():
        findings.append(Finding("sites", Status.PASSED, _describe_site(site, facts), about=site))
    for reason in setup.meeting.refused:
        said = one_line(reason, _MAX_LENGTH)
        findings.append(Finding("sites", Status.FAILED, said, _REFUSED))
    return findings


def _describe_site(site: str, facts: Mapping[str, Any]) -> str:
    """Describe a site's data and software in one line.

    The line begins with the name of the data distribution, if that is not the site's name. Then
    follow the number of samples in each split, the number of samples left out (if any), and the
    label counts of each split. Last come the software versions, each cut to 12 characters. If the
    numbers of samples are unknown, the line says so.

    Args:
        site: the site's name, which is not part of the line.
        facts: the site's entry in silos.json: sample counts, label counts, left-out samples and,
            for a real hospital, software versions.
    """
    sizes = ", ".join(f"{size} {split}" for split, size in facts["sizes"].items())
    text = sizes or "does not say how many samples it has"
    if facts["distribution"] != site:
        text = f"{facts['distribution']}: {text}"
    if facts["dropped"]:
        text += f", {facts['dropped']} left out"
    labels = " ".join(f"{split} {counts}" for split, counts in facts["label_counts"].items())
    text += f"; labels: {labels}"
    # A simulated site states no software of its own
    for name, value in (facts.get("software") or {}).items():
        text += f", {name} {value[:12]}"
    return text


def _enough(setup: RunSetup) -> Passed | Failed:
    meeting = setup.met
    there, needed = len(meeting.sites), meeting.needed
    if there < needed:
        fix = "fix the sites"
        if there:
            fix = f"fix the others, or set 'run.min-sites' to {there}"
        return Failed(
            f"{there} of {meeting.asked} sites can take part, but 'run.min-sites' needs {needed}",
            fix,
        )
    return Passed(
        f"{there} of {meeting.asked} sites can take part; {needed} are needed", meeting.notices
    )


def _method(setup: RunSetup) -> Passed | Failed:
    meeting = setup.met
    require(meeting.sites, "no site can take part")
    if meeting.fault:
        return Failed(meeting.fault, "change the experiment's settings, or leave those sites out")
    details = [f"leaves each site: {sentence}" for sentence in meeting.leaves]
    if meeting.noise:
        details.append(f"noise that is not differential privacy: {meeting.noise}")
    return Passed("can start with these sites", tuple(details))


CHECKS: tuple[Check[RunSetup], ...] = (
    Check("settings", _settings),
    Check("plan", _plan, ("settings",)),
    Check("members", _members),
    Check("sites", _sites, ("settings",)),
    Check("enough", _enough, ("settings",)),
    Check("method", _method, ("settings",)),
)
