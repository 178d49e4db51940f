"""Checks that decide whether a run can begin, and notices that a run prints about its sites.

A check returns None if it finds no problem. Otherwise it returns or raises an error that says what
to do. ``PLAN_CHECKS`` run before any site is asked, and ``SITE_CHECKS`` run once the sites have
answered. A run stops at the first error; ``fedsilo doctor run`` reports all errors. Single sites
are checked by ``strategies/meeting/checks.py``.

``NOTICES`` yield lines that a run prints before it begins. They never stop the run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fedsilo.core.errors import DataError, FedsiloError, RunDirectoryError, SettingError
from fedsilo.core.methods import METHODS
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SPLITS, SiteFacts
from fedsilo.datasets.registry import cut_of, data_set, load_silo, silo_count, silo_names
from fedsilo.models.tasks.task import task_class, task_of
from fedsilo.server_app.config.resources import free_memory
from fedsilo.server_app.records.run_directory import SILOS, RunDirectory, silos_document
from fedsilo.server_app.records.summary import join_names
from fedsilo.server_app.run.site_comparison import equal_samples, unlike_columns
from fedsilo.strategies.loop.round_loop import refuse_site_count
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.registry import strategy_class

Case = TypeVar("Case")  # the argument of a check: a ``Plan`` or a ``Beginning``
Problem = FedsiloError | None
Check = Callable[[Case], Problem]

_PROCESS = 0.4e9  # bytes of memory that a site's process needs once it has imported PyTorch
_NEARLY_ALL = 0.9  # a site with a larger share of all training samples decides every average
_UNREADABLE = "they are missing or cannot be decoded"


def find_problems(checks: Sequence[Check[Case]], case: Case) -> Iterator[FedsiloError]:
    """Run all checks in order, and yield each FedsiloError that a check returns or raises.

    The checks after an error still run. Exceptions of other types are not caught.

    Args:
        checks: functions that get ``case``. Each returns None or a FedsiloError, or raises a
            FedsiloError.
        case: what the checks examine: a plan, or the sites that have answered.
    """
    for check in checks:
        try:
            problem = check(case)
        except FedsiloError as error:  # a check may read a file and raise the reader's error
            problem = error
        if problem is not None:
            yield problem


def raise_first(checks: Sequence[Check[Case]], case: Case) -> None:
    """Run the checks in order, and raise the first error. The checks after it do not run."""
    for problem in find_problems(checks, case):
        raise problem


# --- Before any site is asked ---


@dataclass(frozen=True)
class Plan:
    """The plan of a run of simulated sites, before any site is asked.

    Attributes:
        common: the common settings of the run.
        resources: the cores and GPUs for the sites, in the form of ``RESOURCES``; only used for
            Ray.
        engine: the engine, or ``auto`` if none is chosen yet.
        ray_address: the address of a running Ray cluster; empty for none.
    """

    common: CommonSettings
    resources: Mapping[str, Value] = field(default_factory=dict)
    engine: str = "auto"
    ray_address: str = ""

    def uses_ray(self) -> bool:
        """Return whether the sites run in Ray: engine "ray", or "auto" with a Ray address."""
        return self.engine == "ray" or (self.engine == "auto" and bool(self.ray_address))


def check_purpose(plan: Plan) -> Problem:
    """Return a SettingError unless the setting 'run.purpose' is "train".

    With any other purpose, such as "survey", the command for a run would train nothing. For
    "train", the result is None.
    """
    if plan.common.purpose == "train":
        return None
    return SettingError(
        f"setting 'run.purpose' is '{plan.common.purpose}', but a run needs 'train': remove the "
        "setting, or use 'fedsilo survey'"
    )


def check_weights(plan: Plan) -> Problem:
    """Check that the weight files that the run needs exist, and return None.

    These settings are checked:

    - 'train.initial-weights' must name an existing file, unless it is empty or begins with "timm:".
    - 'vit.backbone-weights' must be "timm", "random" or an existing file. It may be empty for
      network "resnet22" but not for "vit". For all other networks it is ignored.

    Raises:
        SettingError: a file is missing, or network "vit" has no 'vit.backbone-weights'.
    """
    common = plan.common
    if common.initial_weights and not common.initial_weights.startswith("timm:"):
        from fedsilo.datasets.weights.initial_weights import initial_file

        initial_file(common)
    if common.network == "vit" or (common.network == "resnet22" and common.backbone_weights):
        from fedsilo.datasets.weights.backbones import weights_file

        weights_file(common)
    return None


def check_cut(plan: Plan) -> Problem:
    """Check that splitting the images into silos leaves no silo empty.

    A silo is the data of one simulated site. Without this check, every site would later report the
    same error. If fedsilo does not split the data set's images at random, nothing is checked. The
    function raises its errors, so the result is always None.

    Raises:
        FedsiloError: a silo would be empty, the data are missing or unusable, or the settings ask
            for a split that these data do not allow.
    """
    cut_of(plan.common)
    return None


def check_vectorised(plan: Plan) -> Problem:
    """Return a SettingError if 'machine.vectorised' is above 1 but the engine is not "inline".

    The setting is the number of sites to train as one batch. The engine "auto" counts as "inline"
    if the plan has no Ray address. The result is None if the setting is allowed with the engine.
    """
    count = plan.common.vectorised
    if count <= 1 or (plan.engine in ("auto", "inline") and not plan.uses_ray()):
        return None
    return SettingError(
        f"setting 'machine.vectorised' is {count}, but only engine 'inline' trains several sites "
        "as one: use --engine inline, or set 'machine.vectorised' to 1"
    )


def check_ray_address(plan: Plan) -> Problem:
    """Return a SettingError if the plan has a Ray address but an engine that never uses Ray.

    The engines "ray" and "auto" accept a Ray address. For these engines, or without an address, the
    result is None.
    """
    if not plan.ray_address or plan.uses_ray():
        return None
    return SettingError(
        f"--ray-address needs the engine 'ray', but --engine is {plan.engine}: remove one of them"
    )


def check_first_silo(plan: Plan) -> Problem:
    """Check that the data of the first silo and the run's initial weights load, and return None.

    A silo is the data of one site, and the first one in the data set's list is loaded. Only runs in
    Ray are checked, because errors in Ray come late and are hard to read. Nothing is checked if
    fedsilo generates the data set ("made-up"), or if the silos' names are unknown. Weights are
    loaded if 'train.initial-weights' is set, or if network "resnet22" has 'vit.backbone-weights'.

    Raises:
        FedsiloError: the data or the weights cannot be loaded.
    """
    common = plan.common
    if not plan.uses_ray() or data_set(common.dataset).origin == "made-up":
        return None
    names = silo_names(common)
    if not names:
        return None
    silo = load_silo(names[0], common)
    if common.initial_weights or (common.network == "resnet22" and common.backbone_weights):
        from fedsilo.strategies.loop.method import starting_network

        starting_network(common, silo.shape)
    return None


def check_memory(plan: Plan) -> Problem:
    """Return a SettingError if the processes that Ray starts need more than the free memory.

    Ray starts a process for each site. The number of Ray's cores, divided by
    'client-resources-num-cpus' and rounded down, is the most. If that setting is 0, the most is one
    process per core. Each process is assumed to need 0.4 GB of this machine's memory.

    Returns:
        The error, or None if the processes fit. The result is also None if the plan does not use
        Ray, or has the address of a running Ray cluster.
    """
    if not plan.uses_ray() or plan.ray_address:
        return None
    resources = plan.resources
    share = float(resources["client-resources-num-cpus"])
    # Ray counts all cores of the machine
    cores = int(resources["init-args-num-cpus"]) or os.cpu_count() or 1
    at_once = cores
    if share:
        at_once = int(cores / share)
    at_once = min(int(resources["num-supernodes"]), at_once)
    # A Ray actor is a process that imports PyTorch; the data and the model come on top
    needed, free = at_once * _PROCESS, free_memory()
    if needed <= free:
        return None
    return SettingError(
        f"Ray would start {at_once} processes, which need about {needed / 1e9:.1f} GB of memory, "
        f"but {free / 1e9:.1f} GB are free: use --engine inline, which needs one process"
    )


# Checks of the files that a simulation reads
DATA_CHECKS: tuple[Check[Plan], ...] = (
    check_weights,
    check_cut,
    check_first_silo,
)
PLAN_CHECKS: tuple[Check[Plan], ...] = (
    check_purpose,
    check_vectorised,
    check_ray_address,
    *DATA_CHECKS,
    check_memory,
)


# --- Once the sites have answered ---


@dataclass(frozen=True)
class Beginning:
    """A run whose sites have answered, before its first round.

    Attributes:
        common: the common settings of the run, with the chosen aggregation in place of 'auto'.
        participants: the sites that take part, with the facts that they reported.
        directory: the run directory; None for a rehearsal, which starts no run.
    """

    common: CommonSettings
    participants: Participants
    directory: RunDirectory | None = None


def check_site_count(beginning: Beginning) -> Problem:
    """Check that enough sites take part for the run's settings.

    Each round asks 'server.sites-per-round' sites, or all if that is 0. The function raises its
    errors, so the result is always None.

    Raises:
        SettingError: fewer sites take part than 'server.sites-per-round', or each round asks too
            few sites. 'server.aggregation' "trimmed" needs 3 and "multikrum" 5. Secure aggregation
            needs 3, and a number that fits 'secure.threshold'.
    """
    refuse_site_count(beginning.common, len(beginning.participants.sites()))
    return None


def check_same_sites(beginning: Beginning) -> Problem:
    """Return a RunDirectoryError if a resumed run has other sites, data or agreed weights.

    The facts that sites state are compared with those in silos.json, which the run wrote when it
    began. Only the versions of software may differ. A missing site is never accepted. A new site is
    accepted if the method lets sites join late. The result is None if nothing differs, if the run
    is new, or if there is no silos.json.
    """
    common, directory = beginning.common, beginning.directory
    if directory is None or not common.resume or not (directory.path / SILOS).is_file():
        return None
    path = directory.path / SILOS
    before, now = directory.read_json(SILOS), silos_document(beginning.participants)
    # Hospitals may install another release while a run is interrupted
    for facts in (*before.values(), *now.values()):
        facts.pop("software", None)
    if strategy_class(common.method).capabilities.late_join:
        for site in now.keys() - before.keys():
            del now[site]
    # Agreed weights first, because the comparison of all facts would not say what differs
    for site in before.keys() & now.keys():
        was, is_now = before[site].get("agreed"), now[site].get("agreed")
        if was != is_now:
            return RunDirectoryError(
                f"'run.site-weights' agrees on {is_now or 'nothing'} for site {site}, but {path} "
                f"has {was or 'nothing'}: resume with the same file, or choose another 'run.name'"
            )
    if before != now:
        return RunDirectoryError(
            f"the sites or their data differ from those in {path}: resume with the same sites and "
            "data, or choose another 'run.name'"
        )
    return None


def check_early_stopping(beginning: Beginning) -> Problem:
    """Return a SettingError if no site can report the validation metric for early stopping.

    Without this check, the run would train all its rounds and then find no best round.

    Returns:
        The error, or None if the metric is "none". The result is also None if at least one site
        measures on validation samples with suitable labels. AUC, for example, needs samples of all
        classes. If the server has no exact counts of a site's labels, they are taken as suitable.
    """
    common, metric = beginning.common, beginning.common.early_stopping_metric
    # Sites without validation samples never report, so they do not count here
    measuring = []
    for facts in beginning.participants.facts.values():
        if "val" in facts.measured_splits:
            measuring.append(facts)
    if metric == "none" or any(_may_report(metric, facts, common) for facts in measuring):
        return None
    if measuring:
        return SettingError(
            f"'server.early-stopping-metric' is '{metric}', but no site's validation samples "
            f"define it for task '{common.task}' (docs/run-directory.md): choose 'loss', or remove "
            "'server.early-stopping-metric'"
        )
    return SettingError(
        "'server.early-stopping-metric' is set, but no site measures on validation samples: set "
        "'split.val-folds', or remove 'server.early-stopping-metric'"
    )


def _may_report(metric: str, facts: SiteFacts, common: CommonSettings) -> bool:
    """Return whether a site's validation labels suffice to define ``metric``.

    The run's task decides. In classification, for example, AUC needs samples of all classes. The
    result is True if the server does not know the exact label counts, as with differential privacy.
    It is also True if the method is a plugin, because a plugin may define a metric differently.
    """
    counts = facts.label_counts.get("val")
    # Without exact counts nothing is known. A plugin's method may measure in its own way
    if counts is None or common.is_private() or common.method not in METHODS:
        return True
    return task_of(common).may_report(metric, counts, facts.classes)


SITE_CHECKS: tuple[Check[Beginning], ...] = (
    check_site_count,
    check_same_sites,
    check_early_stopping,
)


# --- Lines that stop nothing ---


def missing_silos(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield a line with the names of the silos that do not take part, if there are any.

    A silo is a site's part of the data set. If 'server.sites' names the run's sites, other silos do
    not count as missing. If the server does not know the silos' names, no silo counts as missing.

    In a simulation, the data set's own notices come before this line. An example is a line on
    hospitals without images.
    """
    if participants.are_simulated():
        yield from data_set(common.dataset).notices(common)
    terms = participants.terms
    names = [site for site in _known_silos(common, participants) if not terms.is_outside(site)]
    absent = [site for site in names if site not in participants.facts]
    if absent:
        why = "no SuperNode for"
        # A refused node cannot be told apart from a missing one: it may have named no site
        if participants.refused:
            why = "not"
        yield (
            f"{len(participants.facts)} of {len(names)} silos take part: "
            f"{join_names(participants.sites())}; {why} {join_names(absent)}"
        )


def _known_silos(common: CommonSettings, participants: Participants) -> list[str]:
    """Return the names of all silos, or an empty list if the server cannot know the names.

    A silo is one site's part of the data set, and the data set lists the silos' names. If the sites
    are real hospitals and this machine cannot find out how many silos exist, the site names in the
    operator's registry are returned instead, sorted. The list is empty if that registry does not
    exist, or if the data set's list cannot be read.
    """
    if silo_count(common) is None and not participants.are_simulated():
        registry = participants.terms.registry
        if registry is None:
            return []
        return sorted(registry.nodes)
    try:
        return silo_names(common)
    except DataError:
        return []


def own_silos(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield a line for each simulated site that has the user's own data, to let the user check it.

    The line gives the classes and the number of samples. An example is "site a: classes no, yes;
    samples: 80 train, 10 val, 10 test". Nothing is yielded for real sites or for built-in data
    sets. A site without label counts is skipped. Classes without names are numbered from 0.
    """
    if not participants.are_simulated() or data_set(common.dataset).origin != "own":
        return
    for site, facts in participants.facts.items():
        if not facts.label_counts:
            continue
        sizes = facts.sizes
        samples = ", ".join(f"{sizes.get(split, 0)} {split}" for split in SPLITS)
        names = facts.class_names
        if not names:
            names = tuple(str(number) for number in range(facts.classes))
        noun = task_class(facts.task).label_noun
        words = format_count(len(names), noun).partition(" ")[2]
        yield f"site {site}: {words} {join_names(names)}; samples: {samples}"


def refused_nodes(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield one line for each node that cannot take part, with the reason."""
    for reason in participants.refused:
        yield f"continuing without a SuperNode, because it cannot take part: {reason}"


def heaviest_site(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield one line if a single site reports more than 90 % of all training samples.

    Such a site decides averages that are weighted by samples. A site that sends no label counts is
    taken to have 0 samples. Nothing is yielded for fewer than three sites, or if weights were
    agreed beforehand ('run.site-weights').
    """
    sizes = {}
    for name, facts in participants.facts.items():
        sizes[name] = facts.sizes.get("train", 0)
    site, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
    if len(sizes) >= 3 and sizes[site] > _NEARLY_ALL * total and not participants.agreed_samples():
        yield (
            f"site {site} states that it has {sizes[site]} of all {total} training samples, so it "
            "decides the averages: if that is wrong, agree on counts beforehand "
            "('run.site-weights')"
        )


def odd_sites(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield one line for each unusual property of a site's data.

    For each site, these properties are reported in this order:

    - training labels that the task calls unusual, such as a single class in classification,
    - no test samples,
    - splits on which the site withholds its metrics,
    - samples that are left out: files missing or damaged, or a table's values missing or out of
      range.

    If no site has test samples, the first line of all says so. The lines of single sites on test
    samples are then left out.
    """
    some_have_test = any(_has_test(facts) for facts in participants.facts.values())
    task = task_of(common)
    if not some_have_test:
        yield "no site has test samples: there will be no test results"
    for site, facts in participants.facts.items():
        odd = task.odd_counts(facts.label_counts.get("train", []))
        if odd:
            yield f"site {site}: {odd}"
        # If no site has test samples, these lines would only repeat the one above
        if some_have_test and not _has_test(facts):
            yield f"site {site}: it has no test samples, so it has no test results"
        withheld = [split for split in SPLITS if split not in facts.measured]
        if withheld:
            yield f"site {site}: it withholds its metrics on {', '.join(withheld)}"
        if facts.dropped:
            reason = _UNREADABLE
            # Only a table has features
            if facts.features:
                reason = "a value is missing or out of range"
            yield f"site {site}: {format_count(facts.dropped, 'sample')} left out: {reason}"


def _has_test(facts: SiteFacts) -> bool:
    """Return whether a site has test samples.

    If the site sent no label counts, the splits on which it measures decide (``measured``).
    """
    if not facts.label_counts:
        return "test" in facts.measured
    return bool(facts.sizes.get("test"))


Notice = Callable[[Participants, CommonSettings], Iterator[str]]
NOTICES: tuple[Notice, ...] = (
    missing_silos,
    own_silos,
    refused_nodes,
    heaviest_site,
    odd_sites,
    unlike_columns,
    equal_samples,
)
# 'fedsilo doctor run' lists sites and refusals itself
DOCTOR_NOTICES: tuple[Notice, ...] = (
    missing_silos,
    heaviest_site,
    odd_sites,
    unlike_columns,
    equal_samples,
)


def find_notices(
    notices: Sequence[Notice], participants: Participants, common: CommonSettings
) -> Iterator[str]:
    """Call each of ``notices`` in order, and yield all their lines."""
    for notice in notices:
        yield from notice(participants, common)
