"""What a run says before it begins: who is missing or left out, and what is odd about the sites."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from fedsilo.datasets.registry import data_set, silo_count, silo_names
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SPLITS, SiteFacts
from fedsilo.server_app.records.many_sites import listed
from fedsilo.strategies.meeting.participants import Participants

_NEARLY_ALL = 0.9  # of all training samples


def _warn(console: Console, line: str) -> None:
    console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)


def say_who_is_missing(
    participants: Participants, common: CommonSettings, console: Console
) -> None:
    """Name the silos that there are and that do not take part."""
    for notice in who_is_missing(participants, common):
        _warn(console, notice)


def who_is_missing(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield what is to be said of silos that there are and that do not take part."""
    simulated = all(facts.simulated for facts in participants.facts.values())
    yield from data_set(common.dataset).notices(common) if simulated else []
    names = _known_silos(common, simulated)
    absent = [site for site in names if site not in participants.facts]
    if absent:
        yield (
            f"{len(participants.facts)} of {len(names)} silos take part: "
            f"{listed(participants.sites())}; "
            f"{'not' if participants.refused else 'no SuperNode for'} {listed(absent)}"
        )


def _known_silos(common: CommonSettings, simulated: bool) -> list[str]:
    """Return the silos that there are, empty where only the sites know.

    The files of a simulation's machine are the sites' own, those of another server are not.
    """
    if silo_count(common) is None and not simulated:
        return []
    try:
        return silo_names(common)
    except DataError:
        return []


def say_what_is_odd(participants: Participants, console: Console) -> None:
    """Name who is left out, and what a site's data cannot give: it takes part all the same."""
    for reason in participants.refused:
        _warn(console, f"going on without a SuperNode that cannot take part: {reason}")
    for notice in what_is_odd(participants):
        _warn(console, notice)


def what_is_odd(participants: Participants) -> Iterator[str]:
    """Yield what a site's data cannot give, and what a site decides by its own word alone."""
    # Without any test sample one line says so; only otherwise is a site without some odd
    measured = any(facts.sizes().get("test") for facts in participants.facts.values())
    if not measured:
        yield "no site has test samples: there will be no test figures"
    if heaviest := _heaviest(participants):
        yield heaviest
    for site, facts in participants.facts.items():
        if sum(1 for count in facts.label_counts["train"] if count) == 1:
            yield f"site {site}: all training samples are of one class"
        if measured and not facts.sizes().get("test"):
            yield f"site {site}: it has no test samples and no test figures"
        if withheld := [split for split in SPLITS if split not in facts.measured]:
            yield f"site {site}: it withholds its measurements on {', '.join(withheld)}"
        if facts.dropped:
            yield f"site {site}: {facts.dropped} samples are left out: {_why(facts)}"


def _heaviest(participants: Participants) -> str:
    """Name a site that by its own word alone decides nearly every average; empty: there is none."""
    sizes = {site: facts.sizes()["train"] for site, facts in participants.facts.items()}
    site, everybody = max(sizes, key=sizes.__getitem__), sum(sizes.values())
    if participants.agreed() or len(sizes) < 3 or sizes[site] <= _NEARLY_ALL * everybody:
        return ""
    return (
        f"site {site} says that it has {sizes[site]} of {everybody} training samples, and averages "
        "weigh by them: if that is not so, agree on counts beforehand ('site-weights')"
    )


def _why(facts: SiteFacts) -> str:
    return "a value is missing" if facts.features else "they are missing or cannot be decoded"
