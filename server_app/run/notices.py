"""What a run says before it begins: which silos are missing, and what is odd about the sites."""

from collections.abc import Iterator

from fedsilo.datasets.registry import data_set, silo_count, silo_names
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import counted
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SPLITS, SiteFacts
from fedsilo.server_app.records.many_sites import listed
from fedsilo.strategies.meeting.participants import Participants

_NEARLY_ALL = 0.9  # of all training samples


def notices(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield all that a run says of its sites before it begins."""
    yield from who_is_missing(participants, common)
    if participants.are_simulated() and data_set(common.dataset).origin == "own":
        yield from describe_sites(participants)
    for reason in participants.refused:
        yield f"continuing without a SuperNode that cannot take part: {reason}"
    yield from what_is_odd(participants)


def describe_sites(participants: Participants) -> Iterator[str]:
    """Yield one line per site with its classes and samples, as its files were understood."""
    for site, facts in participants.facts.items():
        if facts.label_counts:
            sizes = facts.sizes()
            samples = ", ".join(f"{sizes.get(split, 0)} {split}" for split in SPLITS)
            classes = listed(facts.class_names or [str(label) for label in range(facts.classes)])
            yield f"site {site}: classes {classes}; samples: {samples}"


def who_is_missing(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield which silos exist and do not take part."""
    simulated = participants.are_simulated()
    yield from data_set(common.dataset).notices(common) if simulated else []
    names = _known_silos(common, participants)
    if absent := [site for site in names if site not in participants.facts]:
        yield (
            f"{len(participants.facts)} of {len(names)} silos take part: "
            f"{listed(participants.sites())}; "
            f"{'not' if participants.refused else 'no SuperNode for'} {listed(absent)}"
        )


def _known_silos(common: CommonSettings, participants: Participants) -> list[str]:
    """Return the silos that exist; where only the sites know their data, those registered.

    The files of a simulation's machine are the sites' own, those of another server are not.
    """
    if silo_count(common) is None and not participants.are_simulated():
        registry = participants.terms.registry
        return sorted(registry.nodes) if registry else []
    try:
        return silo_names(common)
    except DataError:
        return []


def what_is_odd(participants: Participants) -> Iterator[str]:
    """Yield what a site's data cannot give, and whose own count alone decides the averages."""
    # Without any test sample one line says so; only otherwise is a site without some odd
    measured = any(_has_test(facts) for facts in participants.facts.values())
    if not measured:
        yield "no site has test samples: there will be no test results"
    yield from _heaviest(participants)
    for site, facts in participants.facts.items():
        if sum(1 for count in facts.label_counts.get("train", []) if count) == 1:
            yield f"site {site}: all training samples are of one class"
        if measured and not _has_test(facts):
            yield f"site {site}: it has no test samples and no test results"
        if withheld := [split for split in SPLITS if split not in facts.measured]:
            yield f"site {site}: it withholds its measurements on {', '.join(withheld)}"
        if facts.dropped:
            reason = "they are missing or cannot be decoded"
            reason = "a value is missing" if facts.features else reason
            yield f"site {site}: {counted(facts.dropped, 'sample')} left out: {reason}"


def _has_test(facts: SiteFacts) -> bool:
    return bool(facts.sizes().get("test")) if facts.label_counts else "test" in facts.measured


def _heaviest(participants: Participants) -> Iterator[str]:
    """Yield a site whose own sample count decides nearly every average, if there is one."""
    sizes = {site: facts.sizes().get("train", 0) for site, facts in participants.facts.items()}
    site, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
    if len(sizes) >= 3 and sizes[site] > _NEARLY_ALL * total and not participants.agreed_samples():
        yield (
            f"site {site} says that it has {sizes[site]} of {total} training samples, and "
            "averages weigh by them: if that is wrong, agree on counts beforehand ('site-weights')"
        )
