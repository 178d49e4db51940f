"""Methods whose sites keep their networks and send one mean per large enough class.

FedProto sends mean embeddings (prototypes), and FedDistill mean logits; no weights leave a site.
All arrays are float32. A site sends the mean of a class if it has enough training samples of it
(``ClassMeans.sent_classes``), and the server expects exactly these means.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import numpy as np

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings_schema import keys_of
from fedsilo.models.maths.class_means import large_classes
from fedsilo.models.methods.feddistill import LOGITS, FedDistillSettings
from fedsilo.models.methods.fedproto import PROTOTYPE, FedProtoSettings
from fedsilo.models.networks.build import network_kind
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import Arrays, ArraySpec, Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.local import Local
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Specs


class ClassMeans(Local):
    """The common part of FedProto and FedDistill; a mean's array is named ``<kind><class>``."""

    kind: ClassVar[str]  # the prefix of the means' array names, such as ``prototype/``
    capabilities = Capabilities(initial_weights=True)

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of values in a mean."""

    def sent_classes(self, site: str) -> dict[int, int]:
        """Return the classes whose means ``site`` sends, each with its number of training samples.

        The site sends the mean of a class if it has enough training samples of this class. It needs
        at least 'class-min-count', and at least its own 'privacy.sums-min-count'. If no class has
        enough, the mapping is empty.
        """
        counts = self.participants.facts[site].label_counts["train"]
        return large_classes(counts, self._floor(site))

    def notices(self) -> list[str]:
        """Return one warning if 'class-min-count' has no effect at any site, or else an empty list.

        Each site has its own lower limit for the samples of a mean, 'privacy.sums-min-count'. The
        setting has no effect if it is below all of these limits.
        """
        least = int(self.settings.class_min_count)
        floor = min(facts.floor for facts in self.participants.facts.values())
        if least >= floor:
            return []
        key = keys_of(type(self.settings))["class_min_count"]
        return [
            f"setting '{key}' is {least}, which has no effect: no "
            f"mean over fewer than {floor} training samples leaves a site "
            "('privacy.sums-min-count'); raise the first or lower the second"
        ]

    def specs(self, site: str) -> dict[str, ArraySpec]:
        """Return the type and shape of each class mean that ``site`` sends, by name.

        A name is ``kind`` and then the class, as in ``prototype/3``. Each mean is float32 with the
        shape (``size``,). The mapping is empty if the site sends no means.
        """
        return {f"{self.kind}{label}": ArraySpec((self.size,)) for label in self.sent_classes(site)}

    def disclosures(self) -> Disclosures:
        """Describe the class means that sites send, for ``privacy.json``.

        ``means_that_leave`` gives the sentences. If no site has enough samples of any class, the
        only sentence says that no mean is sent.
        """
        if any(map(self.sent_classes, self.participants.sites())):
            return Disclosures(*self.means_that_leave())
        reason = f"there is no class that {self.sample_condition()}"
        return Disclosures(f"each round: no class mean, because {reason}")

    @abstractmethod
    def means_that_leave(self) -> list[str]:
        """Return sentences for ``privacy.json`` on the class means that sites send.

        It is called only if at least one site sends a mean.
        """

    def sample_condition(self) -> str:
        """Return the condition for a site to send a class mean, as the end of a sentence.

        The sentence begins with "each class that". An example of its end is "the site has at least
        10 training samples of (site b 20)". The first number is the lowest limit of any site. Each
        site with a higher limit follows in brackets, with its limit.
        """
        sites = self.participants.sites()
        lowest = min(map(self._floor, sites))
        higher = []
        for site in sites:
            if self._floor(site) > lowest:
                higher.append(f"site {site} {self._floor(site)}")
        words = f"the site has at least {lowest} training samples of"
        if higher:
            words += f" ({', '.join(higher)})"
        return words

    def describe_smallest_mean(self) -> str:
        """Describe the class mean over the fewest training samples, as the end of a sentence.

        The text has the number of samples, the site and the class, as in "of as few as 10 (site a,
        class 2)". For one sample it says that the mean is that of a single sample. If several means
        have the fewest samples, the first site by name is described, with its lowest class number.

        At least one site must send a mean.
        """
        means = []
        for site in self.participants.sites():
            for label, count in self.sent_classes(site).items():
                means.append((count, site, label))
        count, site, label = min(means)
        if count == 1:
            return f"which at site {site}, class {label}, is that of one single sample"
        return f"of as few as {count} (site {site}, class {label})"

    def _floor(self, site: str) -> int:
        return max(int(self.settings.class_min_count), self.participants.facts[site].floor)


class FedProto(ClassMeans):
    """Stores the global prototypes (Tan et al. 2022).

    ``train`` sends ``prototype/<class>`` (d,) for every class with a global prototype; in round 1
    there are no prototypes. The reply holds ``prototype/<class>`` (d,) for each class in
    ``sent_classes``. ``evaluate`` sends prototypes only if they classify (``inference``). A site
    that sends no prototype receives no prototypes. d is the tokens times the channels of the
    network.

    A global prototype is the mean of the prototypes received in the last round, weighted by the
    sites' counts of the class (eq. 6). Its further division by the number of sites is left out,
    because it would shrink prototypes as sites join. A class that nobody sent keeps its prototype.
    """

    settings: FedProtoSettings
    kind = PROTOTYPE

    def means_that_leave(self) -> list[str]:
        """Return one or two sentences for ``privacy.json`` on the prototypes that sites send.

        A prototype is the mean embedding of a class. The first sentence names the prototype over
        the fewest samples. The second appears only for the network "logistic". It warns that such a
        prototype is the exact mean of a table's rows.

        At least one site must send a prototype.
        """
        sentences = [
            f"each round: for each class that {self.sample_condition()}, the mean "
            f"embedding of those samples, {self.describe_smallest_mean()}; all sites that send a "
            "mean receive the mean over sites; if only one site sends a class, that is the site's "
            "own mean"
        ]
        if network_kind(self.common, self.shape) == "logistic":
            sentences.append(
                "with network 'logistic' an embedding is the row itself, so the exact mean of "
                "each such class's standardised rows leaves; unless 'data.standardise' is "
                "'declared', the mean of the site's other rows follows from it, however few rows "
                "these are"
            )
        return sentences

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train near the global prototypes, and average the prototypes that they return.

        A prototype is the mean embedding of a class. A site receives all global prototypes, and
        returns its own for ``sent_classes``. A site without such classes receives none, and neither
        does any site in round 1. The first message may also hold initial weights (``start``).
        ``merge_prototypes`` averages the replies, weighted by samples of the class. A class that no
        site sent keeps its global prototype.
        """
        send: dict[str, Arrays] = {}
        expect: dict[str, Specs] = {}
        before: dict[str, Arrays] = {}
        for site in ask.sites:
            send[site] = {**self._prototypes_for(site, state), **self.start(site, ask)}
            expect[site] = self.specs(site)
            # A class's first prototype does not update an earlier one
            known = expect[site].keys() & state.arrays.keys()
            before[site] = {name: state.arrays[name] for name in sorted(known)}
        replies = ask(TRAIN, send, expect=expect, reference=before)
        arrays = dict(state.arrays)
        self.merge_prototypes(replies, arrays)
        return replace(state, arrays=arrays)

    def merge_prototypes(self, replies: Replies, arrays: dict[str, NDArray]) -> None:
        """Replace the global prototypes in ``arrays`` by weighted means of the sites' prototypes.

        ``arrays`` is changed in place, under the names ``prototype/<class>``. In the mean, a site's
        weight is its number of training samples of the class (``_prototype_weight``). The mean is
        computed in float64 and stored as float32. If no reply has a prototype of a class, its
        global prototype stays.
        """
        for label in range(self.shape.outputs):
            name = f"{PROTOTYPE}{label}"
            sent, weights = [], []
            for site, reply in sorted(replies.items()):
                weight = self._prototype_weight(site, label)
                if weight:
                    sent.append(reply.arrays[name].astype(np.float64))
                    weights.append(weight)
            if sent:  # a class that nobody sent keeps its prototype
                arrays[name] = np.average(sent, axis=0, weights=weights).astype(np.float32)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return the global prototypes that ``site`` needs to measure the final model.

        A prototype is the mean embedding of a class. If 'inference' is "prototype", a sample gets
        the class of the nearest prototype. All prototypes are then returned for a site that sends
        any itself. If 'inference' is "head", or if the site sends none, nothing is returned, and
        the site measures its own network.
        """
        if self.settings.inference == "head":
            return {}
        return self._prototypes_for(site, state)

    def _prototypes_for(self, site: str, state: State) -> Arrays:
        """Return all global prototypes, or no arrays if ``site`` sends no prototype itself."""
        if not self.sent_classes(site):
            return {}
        return with_prefix(PROTOTYPE, arrays_below(PROTOTYPE, state.arrays))

    def _prototype_weight(self, site: str, label: int) -> float:
        """Return the weight of a site's prototype, its number of training samples of the class.

        The weight is 0 if the site does not send the class. If the file 'run.site-weights' has an
        agreed number of samples for the site, the weight is multiplied by agreed / reported
        samples, and may be fractional. Reporting more samples thus does not raise a site's total
        weight.
        """
        count, agreed = self.sent_classes(site).get(label, 0), self.participants.agreed_samples()
        if site not in agreed:
            return count
        return count * agreed[site] / self.participants.facts[site].sizes["train"]

    @property
    def size(self) -> int:
        """The number of values in all tokens of a sample."""
        return self.blueprint.tokens * self.blueprint.channels


class FedDistill(ClassMeans):
    """Stores each site's mean logits and sends every site the other sites' mean.

    This is Seo et al. 2022, after Jeong et al. 2018. ``train`` sends ``logits/<class>`` (classes,),
    the unweighted mean over all other sites that send the class; in round 1 there are no logits.
    The reply holds ``logits/<class>`` (classes,) for each class in ``sent_classes``. ``evaluate``
    sends nothing.

    The state holds each site's logits as ``logits/<site>/<class>`` until the site sends newer ones,
    so a site that misses a round still counts for the others.
    """

    settings: FedDistillSettings
    kind = LOGITS

    def means_that_leave(self) -> list[str]:
        """Describe in one sentence the mean logits that sites send, and the sites that get them.

        The sentence has the condition for sending a class (``sample_condition``) and the mean over
        the fewest samples. With one site, nobody receives logits. With two, the other site receives
        them unchanged. With more, each site receives a mean over the other sites. At least one site
        must send a mean.
        """
        recipients = {1: "nobody gets them", 2: "the other site gets them unchanged"}
        means = (
            f"each round: for each class that {self.sample_condition()}, the mean "
            f"logits of those samples, {self.describe_smallest_mean()}; "
        )
        everybody = "each site gets the mean over the other sites that send the class"
        return [means + recipients.get(len(self.participants.sites()), everybody)]

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train on the other sites' mean logits, and store the logits that they return.

        For each class in ``sent_classes``, a site receives the unweighted mean of the other sites'
        newest logits. In round 1 it receives none. After training it returns its own mean logits of
        these classes, which replace those in the state. The logits of a site that did not reply
        stay in the state, and still count. The first message to a site may hold initial weights
        (``start``).
        """
        send: dict[str, Arrays] = {}
        expect: dict[str, Specs] = {}
        for site in ask.sites:
            send[site] = {**self._logits_for(site, state), **self.start(site, ask)}
            expect[site] = self.specs(site)
        replies = ask(TRAIN, send, expect=expect)
        arrays = dict(state.arrays)
        for site, reply in replies.items():
            for label in self.sent_classes(site):
                arrays[f"{LOGITS}{site}/{label}"] = reply.arrays[f"{LOGITS}{label}"]
        return replace(state, arrays=arrays)

    def _logits_for(self, site: str, state: State) -> Arrays:
        """Return the mean logits to send to ``site``, one array for each class that it also sends.

        An array is named ``logits/<class>``, and is float32 with the shape (classes,). It is the
        unweighted mean over all other sites whose logits of this class are in the state, from any
        earlier round. A class that no other site has sent is left out.
        """
        mean_logits = {}
        # The site's own logits are left out: they would only pull it towards its own answers
        for label in self.sent_classes(site):
            logits = []
            for other in self.participants.sites():
                name = f"{LOGITS}{other}/{label}"
                if other != site and name in state.arrays:
                    logits.append(state.arrays[name].astype(np.float64))
            if logits:
                mean_logits[f"{LOGITS}{label}"] = np.mean(logits, axis=0).astype(np.float32)
        return mean_logits

    @property
    def size(self) -> int:
        """The number of classes, because a mean consists of logits."""
        return self.shape.outputs
