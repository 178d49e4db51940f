"""Asking sites of unlike speed: a round ends when enough have answered, as another ask.

Who has not answered by then stays at work and is not asked again until it has (FedBuff, Nguyen et
al. 2022). In a simulation a virtual clock says who comes when: a site trains when its reply is due,
on what its own round has sent. In a deployment the first replies count, and the order that the run
directory has of a round goes before that of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedsilo.models.contract.messages import TRAIN, state_key
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.ask import Question, Replies
from fedsilo.strategies.loop.asking import GridAsk, Session
from fedsilo.strategies.loop.late import Late, discounted
from fedsilo.strategies.wire.messaging import Unanswered
from fedsilo.strategies.wire.reply import Arrays, Spill


@dataclass
class Quorum:
    """What the rounds of a run with a quorum have in common."""

    # By site, how long a round takes it on the virtual clock; empty in a deployment
    seconds: Mapping[str, float] = field(default_factory=dict)
    # By round, the sites whose answers it counted, where a run directory has them
    order: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # By node, the message that it has not answered yet; of this process
    pushed: dict[int, str] = field(default_factory=dict)


def quorum_of(common: CommonSettings, sites: int) -> int:
    """Return how many of so many sites end a round by answering: at least 'min-sites'."""
    return max(math.ceil(round(common.round_quorum * sites, 9)), common.min_sites)


class QuorumAsk(GridAsk):
    """A ``GridAsk`` whose replies to ``train`` are those in time, and late ones at less weight.

    Args:
        quorum: the run's.
        late: who is at work since an earlier round; None before the first.
    """

    late: Late

    def __init__(
        self,
        quorum: Quorum,
        late: Late | None,
        session: Session,
        round_: int,
        sites: Sequence[str],
        spill: Spill,
    ) -> None:
        super().__init__(session, round_, sites, spill)
        self.quorum = quorum
        self.late = late or Late()

    def put(self, question: Question) -> Replies:
        """Ask as ``GridAsk`` does, but of a training phase wait for enough sites alone."""
        if question.phase != TRAIN or not question.send:
            return super().put(question)
        before, round_, seconds = self.late, self.round, self.quorum.seconds
        kept, known = self.session.kept, dict(self.session.kept)
        # All are sent the same, so that what a round has sent is kept once
        now = {name: array for arrays in question.send.values() for name, array in arrays.items()}
        work = {
            site: before.at_work.get(site, (round_, before.now + seconds.get(site, 0.0)))
            for site in sorted(question.send)
        }
        sent = {**before.sent, round_: now}
        asked = {site: began for site, (began, _) in work.items() if began < round_}
        end, sites = self._answered_by({site: due for site, (_, due) in work.items()}, asked)
        replies = super().put(
            replace(
                question,
                send={site: sent[work[site][0]] for site in sites},
                expect={site: question.expect[site] for site in sites},
                reference={
                    site: {name: sent[work[site][0]][name] for name in question.reference[site]}
                    for site in sites
                    if site in question.reference
                },
                asked=asked,
            )
        )
        self.unanswered = None
        for site in replies.keys() & asked.keys() & kept.keys():
            if self.session.common.late_replies != "discounted":
                kept[site] = known.get(site, 0)  # no use is made of it
            elif replies[site].keeps_state():
                kept[site] = state_key(asked[site], self._step)
        done = {site: work.pop(site) for site in self.answered}
        self.session.hooks.call("sites_answered", round_, done)
        sent = {began: sent[began] for began, _ in work.values()}
        self.late = Late(end, work, sent)
        return self._counted(replies, before.sent, now)

    def _answered_by(
        self, due: Mapping[str, float], asked: Mapping[str, int]
    ) -> tuple[float, list[str]]:
        """Return when the round ends, and who has answered by then or, if not known, may answer."""
        common = self.session.common
        counted = [s for s in due if common.late_replies == "discounted" or s not in asked]
        needed = min(quorum_of(common, len(due)), len(counted))
        if self.quorum.seconds:
            end = sorted(due[site] for site in counted)[needed - 1]
            return end, [site for site, second in due.items() if second <= end]
        known = [site for site in self.quorum.order.get(self.round, ()) if site in due]
        if len(set(known) & set(counted)) >= needed:
            return 0.0, known
        nodes = self.session.participants.nodes
        self.unanswered = Unanswered(self.quorum.pushed, {nodes[s] for s in counted}, needed)
        return 0.0, list(due)

    def _counted(self, replies: Replies, sent: Mapping[int, Arrays], now: Arrays) -> Replies:
        """Return what counts of ``replies``: those in time, and late ones discounted."""
        if self.session.common.late_replies != "discounted":
            timely = replies.of(site for site, reply in replies.items() if not reply.asked)
            question, _ = self._answered[-1]
            self._answered[-1] = question, timely
            return timely
        moved = {
            site: discounted(reply, sent[reply.asked], now, self.round - reply.asked)
            if reply.asked
            else reply
            for site, reply in replies.items()
        }
        return Replies(moved)
