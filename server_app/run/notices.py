"""Builds the lines that a run prints before it begins: missing silos, and oddities of sites."""

from collections.abc import Iterator

from fedsilo.datasets.registry import data_set, silo_count, silo_names
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import counted
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SPLITS, SiteFacts
from fedsilo.server_app.records.many_sites import join_names
from fedsilo.strategies.meeting.participants import Participants

_NEARLY_ALL = 0.9  # a site with a larger share of all training samples decides every average


def notices(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield the lines that a run prints about its sites before it begins."""
    yield from who_is_missing(participants, common)
    if participants.are_simulated() and data_set(common.dataset).origin == "own":
        yield from describe_sites(participants)
    for reason in participants.refused:
        yield f"continuing without a SuperNode, because it cannot take part: {reason}"
    yield from what_is_odd(participants)


def describe_sites(participants: Participants) -> Iterator[str]:
    """Yield one line per site with its classes and sample counts, as read from its files."""
    for site, facts in participants.facts.items():
        if facts.label_counts:
            sizes = facts.sizes()
            samples = ", ".join(f"{sizes.get(split, 0)} {split}" for split in SPLITS)
            classes = join_names(
                facts.class_names or [str(label) for label in range(facts.classes)]
            )
            yield f"site {site}: classes {classes}; samples: {samples}"


def who_is_missing(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield a line on the silos that exist but do not take part."""
    simulated = participants.are_simulated()
    yield from data_set(common.dataset).notices(common) if simulated else []
    names = _known_silos(common, participants)
    if absent := [site for site in names if site not in participants.facts]:
        yield (
            f"{len(participants.facts)} of {len(names)} silos take part: "
            f"{join_names(participants.sites())}; "
            f"{'not' if participants.refused else 'no SuperNode for'} {join_names(absent)}"
        )


def _known_silos(common: CommonSettings, participants: Participants) -> list[str]:
    """Return the names of the silos that exist; empty if they cannot be known.

    If only the sites know their data, the silos are those of the operator's registry. A server's
    own files count only in a simulation, where they are the sites' data.
    """
    if silo_count(common) is None and not participants.are_simulated():
        registry = participants.terms.registry
        return sorted(registry.nodes) if registry else []
    try:
        return silo_names(common)
    except DataError:
        return []


def what_is_odd(participants: Participants) -> Iterator[str]:
    """Yield a line for each oddity of a site's data, such as a missing split or a single class.

    A site that states nearly all training samples is reported too, because it decides the averages.
    """
    # If no site has test samples, one line is enough; a line per site would only repeat it
    measured = any(_has_test(facts) for facts in participants.facts.values())
    if not measured:
        yield "no site has test samples: there will be no test results"
    yield from _heaviest(participants)
    for site, facts in participants.facts.items():
        if sum(1 for count in facts.label_counts.get("train", []) if count) == 1:
            yield f"site {site}: all training samples are of one class"
        if measured and not _has_test(facts):
            yield f"site {site}: it has no test samples, so it has no test results"
        if withheld := [split for split in SPLITS if split not in facts.measured]:
            yield f"site {site}: it withholds its metrics on {', '.join(withheld)}"
        if facts.dropped:
            reason = "they are missing or cannot be decoded"
            reason = "a value is missing" if facts.features else reason
            yield f"site {site}: {counted(facts.dropped, 'sample')} left out: {reason}"


def _has_test(facts: SiteFacts) -> bool:
    return bool(facts.sizes().get("test")) if facts.label_counts else "test" in facts.measured


def _heaviest(participants: Participants) -> Iterator[str]:
    """Yield a line on a site that states more than 90 % of all training samples, if one does.

    With fewer than three sites, or with agreed weights, there is no line.
    """
    sizes = {site: facts.sizes().get("train", 0) for site, facts in participants.facts.items()}
    site, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
    if len(sizes) >= 3 and sizes[site] > _NEARLY_ALL * total and not participants.agreed_samples():
        yield (
            f"site {site} states that it has {sizes[site]} of all {total} training samples, so it "
            "decides the averages: if that is wrong, agree on counts beforehand "
            "('run.site-weights')"
        )
