"""Secure aggregation: ask for weights so that the server learns only their sum.

Four more phases surround the training phase (``fedsilo.core.messages``). Before it, signed keys
are collected and passed on, then shares that only their receivers can open. After it, sites sign
the list of sites whose weights arrived, and then send the shares that remove the masks from the
sum. Everything stays in memory, so a round that a crashed server had begun starts again with new
keys. The protocol is figure 4 of Bonawitz et al. 2017, with every site a neighbour of every other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from flwr.app import ConfigRecord

from fedsilo.core.array_names import with_prefix
from fedsilo.core.errors import SiteError, WithheldError
from fedsilo.core.messages import (
    ARRAYS,
    EVALUATE,
    SECURE_AGREE,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    STANDARDISED,
    TRAIN,
)
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import SUMS
from fedsilo.models.privacy.summed_metrics import summed_metrics
from fedsilo.strategies.loop.ask import Ask, Question, Replies, TooFewSitesError
from fedsilo.strategies.loop.round import Round
from fedsilo.strategies.loop.secure_round import SecureSum
from fedsilo.strategies.wire.records import NDArray, from_record
from fedsilo.strategies.wire.reply import Arrays, Reply
from fedsilo.strategies.wire.secure_keys import (
    LONGEST_KEY,
    LONGEST_SEALED,
    LONGEST_SHARE,
    SECURE,
    read_texts,
    read_token,
    read_tokens,
    read_whole,
    refuse_invalid_key,
)
from fedsilo.strategies.wire.signatures import bound_to, is_signed, key_words, list_words


class SecureAsk(Ask):
    """An ``Ask`` over secure aggregation: the server learns a sum over sites, not single replies.

    A reply to ``train`` holds no arrays. Only the mean of the sites' arrays is known.

    Args:
        ask: the round that asks the questions of each phase.
    """

    def __init__(self, ask: Round) -> None:
        self.ask = ask
        self.common = ask.method.common
        self.sites = ask.sites
        self.stateful_sites = ask.stateful_sites

    def put(self, question: Question) -> Replies:
        """Ask sites to train, but learn only the mean of their weights, weighted by samples.

        At trust 'sums' the metrics of training and evaluation are summed through secure aggregation
        too. Any other question, or one without sites, goes to ``Round.put`` unchanged. If no site
        has a finite value of a metric, the metric is left out and reported to the hooks.

        Returns:
            The replies of the sites in the sum, without arrays. Their attributes are ``sums`` (the
            mean arrays), ``exact`` (the mean updates in float64), ``means`` (the mean metrics) and
            ``failed`` (the number of sites that could not answer).

        Raises:
            SettingError: rounding to integers would distort the mean too much.
            SiteError: too few sites replied, the masks cannot be removed, or the sums without masks
                are impossible (``SecureSum.mean``).
        """
        send, phase, ask = question.send, question.phase, self.ask
        only_sums = self.common.trust == SUMS
        if not send or not (phase == TRAIN or (phase == EVALUATE and only_sums)):
            return ask.put(question)
        # Masks cancel only if all sites receive the same arrays
        everything: dict[str, NDArray] = {}
        for arrays in send.values():
            everything |= arrays
        # The model may be only a part of the arrays sent, so the specs come from the expected reply
        specs = next(iter(question.expect.values()), {})
        outputs = ask.method.participants.shape().outputs
        sum_ = SecureSum(ask.number + ask.ends, self.common, specs, len(send), outputs)
        sum_.take_keys(self._put(sum_, SECURE_KEYS, send))
        metrics = question.metrics  # the metrics that each single reply must have
        if only_sums:
            metrics = ()
            measured: tuple[str, ...] = ()
            if phase in ask.measuring:
                measured = ask.method.task.always
            summed = summed_metrics(phase == TRAIN, measured, sum_.splits)
            sum_.metrics = sorted([*summed, *question.metrics])
        asked = [*sum_.masked_specs(), *sum_.metrics]
        # The masks depend on everything that a site received, so a server that sends sites
        # different arrays gets only noise
        sum_.bound = bound_to(sum_.context, self._arrays_received(everything), asked)
        sum_.take_shares(self._put(sum_, SECURE_SHARES, sum_.keys))
        masked = replace(
            question,
            send=dict.fromkeys(sum_.sealed, everything),
            expect=dict.fromkeys(sum_.sealed, sum_.masked_specs()),
            reference={},
            metrics=metrics,
            fault=None,
            records=self._records_for_sum(sum_, phase),
        )
        sum_.take_masked(ask.put(masked))
        sum_.take_signatures(self._put(sum_, SECURE_AGREE, sum_.replies))
        unmasking = self._put(sum_, SECURE_UNMASK, sum_.signatures)
        # The masks are removed here, so from now on the server knows the sums
        sums, means = sum_.mean(unmasking, everything)
        ask.proof = sum_.proof
        self._judge_failures(sum_, phase, len(send))
        for name in sum_.metrics:
            if name not in means:
                line = f"no site has a finite value of '{name}': it is left out"
                ask.hooks.call("answer_failed", ask.number, phase, "unknown", "unusable", line)
                ask.hooks.call("site_failed", ask.number, phase, "unknown", line)
        if means:
            ask.hooks.call("sums_measured", ask.number, phase, means)
        replies = Replies(sum_.replies)
        replies.sums, replies.means, replies.failed = sums, means, sum_.failed
        replies.exact = sum_.exact
        return replies

    def _records_for_sum(self, sum_: SecureSum, phase: str) -> dict[str, ConfigRecord]:
        """Build the record that each site receives with the question whose answers are summed.

        A record names the sites, metrics and arrays in the sum (``SecureSum.record``). If the
        server must prove its sums, each record also has the values by which a site can check the
        newest earlier sum.

        Args:
            sum_: the secure sum, whose sites have shared their keys.
            phase: the phase of the question.

        Returns:
            The record by site.
        """
        records = {}
        for site in sum_.sealed:
            record = sum_.record(phase, site)
            if sum_.proves:
                record.update(self.ask.proof)
            records[site] = record
        return records

    def _judge_failures(self, sum_: SecureSum, phase: str, asked: int) -> None:
        """Report how many sites in the sum could not answer, and check that enough sites could.

        Such a site adds 0 to the sum without naming itself, so only their number is known. The
        hooks get it as one failure of site "unknown". If the number is 0, the function returns
        without any check. Otherwise at least 'run.min-sites' sites must have answered. If this
        setting is 0 or above ``asked``, ``asked`` sites must have answered.

        Args:
            sum_: the secure sum after unmasking.
            phase: the phase whose replies were summed.
            asked: the number of sites that the phase asked.

        Raises:
            TooFewSitesError: fewer sites than needed could answer.
        """
        if not sum_.failed:
            return
        answered = len(sum_.replies) - sum_.failed
        needed = min(self.common.min_sites or asked, asked)
        number = format_count(sum_.failed, "site")
        reason = (
            f"{number} of {len(sum_.replies)} could not answer and added 0 to the sum: each "
            "site's own log says why"
        )
        # The sites keep the cause to themselves, so that a sum cannot reveal a single patient
        self.ask.hooks.call(
            "answer_failed", self.ask.number, phase, "unknown", WithheldError.code, reason
        )
        if answered < needed:
            raise TooFewSitesError(
                f"round {self.ask.number}, phase {phase}: {reason} -- {answered} of {asked} sites "
                f"answered but {needed} are needed ('run.min-sites'): repair the sites and begin "
                "a run with another 'seed', lower 'train.learning-rate' if training has diverged, "
                "or set 'run.min-sites' to fewer",
                reason,
            )
        self.ask.hooks.call("site_failed", self.ask.number, phase, "unknown", reason)

    def _arrays_received(self, arrays: Arrays) -> dict[str, NDArray]:
        """Return all arrays that a site receives, named ``<record>/<array>``.

        These are the given ``arrays``. If the data are a table that is standardised over all sites,
        the mean and standard deviation of each feature are added. The server has pooled them from
        the sums that the sites sent before round 1.
        """
        sent = with_prefix(f"{ARRAYS}/", arrays)
        if self.ask.standardisation:
            sent |= with_prefix(f"{STANDARDISED}/", from_record(self.ask.standardisation))
        return sent

    def _put(self, sum_: SecureSum, phase: str, sites: Iterable[str]) -> Replies:
        """Ask ``sites`` a question of secure aggregation, and return the usable replies.

        Each message holds the record that the site needs in this phase, but no arrays. A reply is
        unusable if ``_find_fault`` finds a fault in its record.

        Args:
            sum_: the secure sum, which makes the records and checks the replies.
            phase: "secure-keys", "secure-shares", "secure-agree" or "secure-unmask".
            sites: the names of the sites to ask.

        Raises:
            SiteError: fewer replies are usable than 'run.min-sites' demands.
        """
        records = {site: sum_.record(phase, site) for site in sites}
        nothing: dict[str, Arrays] = dict.fromkeys(records, MappingProxyType({}))
        fault = partial(_find_fault, sum_, phase)
        return self.ask.put(Question(phase, nothing, {}, fault=fault, records=records))


def _find_fault(sum_: SecureSum, phase: str, reply: Reply) -> str | None:
    """Explain why a record of secure aggregation is unusable, or return None if it is usable.

    The record must be of this round. The round has four phases of secure aggregation, in this
    order. Each has a further check:

    - ``secure-keys``: two valid public keys, with the site's signature of them.
    - ``secure-shares``: one encrypted share for every other site with keys, and a hash of the
      site's mask.
    - ``secure-agree``: the site's signature of the list of sites whose arrays arrived.
    - ``secure-unmask``: one share for each site that the reply names. It must name the site itself.
      Each named site must have sent shares.

    Args:
        sum_: the secure sum, which has the values from earlier phases.
        phase: the phase that the site has answered.
        reply: the site's reply.
    """
    record = reply.secure
    try:
        if read_whole(record, "round") != sum_.round:
            return f"record '{SECURE}' belongs to round {record['round']!r}, not {sum_.round}"
        if phase == SECURE_KEYS:
            _check_keys(sum_, reply)
        elif phase == SECURE_SHARES:
            _check_names(read_texts(record, "to"), set(sum_.keys) - {reply.site})
            _check_number(read_tokens(record, "sealed", LONGEST_SEALED), len(sum_.keys) - 1)
            read_token(record, "check", LONGEST_KEY)
        elif phase == SECURE_AGREE:
            # The signature covers what the site has agreed to, so the server cannot change it
            _check_signature(sum_, reply)
        else:
            of = read_texts(record, "of")
            _check_names(of, set(sum_.sealed) & {*of, reply.site})
            _check_number(read_tokens(record, "shares", LONGEST_SHARE), len(of))
    except SiteError as error:
        return str(error)
    return None


def _check_keys(sum_: SecureSum, reply: Reply) -> None:
    record = reply.secure
    mask = read_token(record, "mask-key", LONGEST_KEY)
    seal = read_token(record, "seal-key", LONGEST_KEY)
    public = read_token(record, "public", LONGEST_KEY)
    terms = read_token(record, "terms", LONGEST_KEY)
    signature = read_token(record, "signature", LONGEST_KEY)
    # An invalid key would fail later at every other site, which would hide whose it is
    refuse_invalid_key(mask)
    refuse_invalid_key(seal)
    (splits,) = read_texts({"splits": [record.get("splits")]}, "splits")
    read_whole(record, "samples")
    said = key_words(sum_.common.run_name, sum_.round, reply.site, (mask, seal), terms, splits)
    if not is_signed(public, said, signature):
        raise SiteError("its signature does not match its keys: is it from another run or round?")


def _check_signature(sum_: SecureSum, reply: Reply) -> None:
    said = list_words(sum_.context, list(sum_.replies), list(sum_.seals.values()))
    public, _ = sum_.signers[reply.site]
    if not is_signed(public, said, read_token(reply.secure, "signature", LONGEST_KEY)):
        raise SiteError("its signature does not match the list of sites whose weights arrived")


def _check_names(names: Sequence[str], wanted: set[str]) -> None:
    if set(names) != wanted or len(names) != len(wanted):
        raise SiteError(f"record '{SECURE}' names other sites than those that take part")


def _check_number(listed: Sequence[bytes], wanted: int) -> None:
    if len(listed) != wanted:
        raise SiteError(f"record '{SECURE}' must have {wanted} entries, but has {len(listed)}")
