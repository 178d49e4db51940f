"""Asking sites what their data are like, and reading what they say: a stranger's words until read.

Nothing is trained and no hello is said: of a hospital only what its site file lists as 'survey/'
leaves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsilo.datasets.silo.declared_silos import site_name_fault
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import CONFIG, SURVEY, SURVEYED
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.survey import Survey
from fedsilo.models.contract.versions import own_versions
from fedsilo.strategies.meeting.admission import Registry
from fedsilo.strategies.meeting.hello import reading
from fedsilo.strategies.meeting.participants import HELLO_TIMEOUT, grouped_refusals, wait_for_nodes
from fedsilo.strategies.wire.messaging import arriving


@dataclass(frozen=True)
class Surveyed:
    """What was answered: by site, sorted, and why others gave no answer."""

    answers: Mapping[str, Survey]
    refused: tuple[str, ...] = ()


def survey_sites(
    grid: Grid, settings: CommonSettings, silos: int | None = None, registry: Registry | None = None
) -> Surveyed:
    """Ask every connected node for a survey; there cannot be more of them than ``silos``.

    Raises:
        SiteError: fewer than 'min-sites' are connected, or none answers; names why.
    """
    content = RecordDict({CONFIG: ConfigRecord({"survey": True, **own_versions()})})
    nodes = wait_for_nodes(grid, settings, silos)
    messages = [Message(content, node, SURVEY) for node in nodes]
    replies = dict(arriving(grid, messages, HELLO_TIMEOUT))
    heard: list[tuple[int, Survey]] = []
    refused: list[str] = []
    for node in sorted(nodes):
        reply = replies.get(node)
        if reply is None or reply.has_error():
            refused.append(one_line("no answer" if reply is None else reply.error.reason))
            continue
        try:
            heard.append((node, read_survey(reply.content, settings.dataset)))
        except SiteError as error:
            refused.append(f"node {node}: {error}")
    answers = _known(heard, registry, refused)
    if not answers:
        raise SiteError(f"no site has answered the survey: {'; '.join(grouped_refusals(refused))}")
    return Surveyed(answers, tuple(refused))


def read_survey(content: RecordDict, dataset: str) -> Survey:
    """Return what a site has answered.

    Raises:
        SiteError: it cannot be read, is of another data set, or says what cannot be; one line.
    """
    with reading("its answer to the survey", content):
        if set(content) != {SURVEYED}:
            raise ValueError(f"it has other records than '{SURVEYED}'")
        answer = Survey.from_config(content.config_records[SURVEYED])
    if fault := site_name_fault(answer.about.site):
        raise SiteError(one_line(fault))
    if answer.about.dataset != dataset:
        raise SiteError(f"its answer is of data set '{answer.about.dataset}', not '{dataset}'")
    return answer


def _known(
    heard: Iterable[tuple[int, Survey]], registry: Registry | None, refused: list[str]
) -> dict[str, Survey]:
    """Return the answers by site; of two that say one name neither is known to be right."""
    heard = list(heard)
    simulated = all(answer.about.simulated for _, answer in heard)
    names = [answer.about.site for _, answer in heard]
    answers = {}
    for node, answer in sorted(heard, key=lambda one: one[1].about.site):
        site = answer.about.site
        if registry and not simulated and (fault := registry.fault(node, site)):
            refused.append(one_line(fault))
        elif names.count(site) > 1:
            refused.append(f"node {node} says that it is site '{site}', and so does another")
        else:
            answers[site] = answer
    return answers
