"""Ask sites to describe their data, and read the answers, which are untrusted until checked.

Nothing is trained and no hello is sent. Only the statistics that a hospital's site file lists as
'survey/' leave it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedsilo.core.errors import SiteError
from fedsilo.core.files.site_names import site_name_fault
from fedsilo.core.messages import SURVEY, SURVEYED
from fedsilo.core.one_line import site_reason
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.survey import Survey
from fedsilo.strategies.meeting.hello import NodeAnswer, ask_nodes, reading
from fedsilo.strategies.meeting.participants import grouped_refusals
from fedsilo.strategies.meeting.terms import Registry, Terms, split_sites
from fedsilo.strategies.meeting.waiting import wait_for_nodes


@dataclass(frozen=True)
class Surveyed:
    """The answers to a survey by site, sorted, and the reasons why nodes gave no usable answer."""

    answers: Mapping[str, Survey]
    refused: tuple[str, ...] = ()


def survey_sites(
    grid: Grid, settings: CommonSettings, silos: int | None = None, registry: Registry | None = None
) -> Surveyed:
    """Ask the connected nodes to describe their data, and return the usable answers by site.

    If 'server.sites' names sites, the answers of other sites are left out. With a registry, the
    nodes of other sites are not even asked.

    Args:
        grid: connects the server with the nodes.
        settings: the run's settings.
        silos: the largest possible number of nodes. None means any number.
        registry: the node of each registered site name. None lets any node take any name.

    Returns:
        The answers by site, and one line for each unusable answer.

    Raises:
        SiteError: too few or too many nodes are connected, or no answer is usable. In the last case
            the text gives the reasons.
        SettingError: 'server.sites' has an invalid name, a name twice, or a name that the registry
            lacks.
    """
    terms = Terms(registry, sites=split_sites(settings.sites))
    nodes = wait_for_nodes(grid, settings, silos, terms)
    read = partial(read_survey, dataset=settings.dataset)
    received, refused = ask_nodes(grid, nodes, SURVEY, read, settings.away_timeout)
    received = [one for one in received if not terms.is_outside(one.content.about.site)]
    answers = _answers_by_site(received, registry, refused)
    if not answers:
        raise SiteError(f"no site has answered the survey: {'; '.join(grouped_refusals(refused))}")
    return Surveyed(answers, tuple(refused))


def read_survey(content: RecordDict, dataset: str) -> Survey:
    """Read and check a site's untrusted answer to the survey.

    Raises:
        SiteError: the answer cannot be read, has an invalid site name, or is about another data set
            than ``dataset``. The error is one line.
    """
    with reading("its answer to the survey", content):
        if set(content) != {SURVEYED}:
            raise ValueError(f"it has other records than '{SURVEYED}'")
        answer = Survey.from_config(content.config_records[SURVEYED])
    fault = site_name_fault(answer.about.site)
    if fault:
        raise SiteError(site_reason(fault))
    if answer.about.dataset != dataset:
        raise SiteError(f"its answer is about data set '{answer.about.dataset}', not '{dataset}'")
    return answer


def _answers_by_site(
    received: Sequence[NodeAnswer[Survey]], registry: Registry | None, refused: list[str]
) -> dict[str, Survey]:
    """Return the usable answers in the order of site names, and list why others are unusable.

    With a registry, a node may answer only for the site under whose name it is registered. If all
    answers are from simulated sites, the registry is ignored, because they have no keys to
    register. If several nodes that pass this check claim the same name, none of their answers is
    used.

    Args:
        received: the readable answers with their nodes.
        registry: the node of each registered site name. None lets any node take any name.
        refused: the list to which this function appends one reason for each unusable answer.
    """
    if all(answer.content.about.simulated for answer in received):
        registry = None  # simulated sites have no keys
    admitted = []
    for answer in sorted(received, key=lambda answer: answer.content.about.site):
        fault = None
        if registry:
            fault = registry.fault(answer.node, answer.content.about.site)
        if fault:
            refused.append(site_reason(fault))
        else:
            admitted.append(answer)
    # Only now, so that a node that the registry refuses cannot block the site whose name it takes
    names = [answer.content.about.site for answer in admitted]
    answers = {}
    for answer in admitted:
        site = answer.content.about.site
        if names.count(site) > 1:
            refused.append(f"node {answer.node} says that it is site '{site}', but so does another")
        else:
            answers[site] = answer.content
    return answers
