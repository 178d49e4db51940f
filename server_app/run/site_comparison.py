"""Compare the sites before a run: the means of their columns, and equal samples.

Neither comparison stops a run. Their lines are printed at the start of a run and by ``fedsilo
doctor run``, and the unlike columns are also in the run's reports. Only at trust 'server' may a
server know the means of single sites, which it computes from the sums that sites send to
standardise a table. At the other levels, each hospital compares itself in its own log
(``client_app/session.py``). Single samples are compared only in a simulation with the user's own
data, because only then are all samples on one machine.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.core.one_line import format_count, one_line
from fedsilo.core.settings.common_settings import SERVER, CommonSettings
from fedsilo.core.site_facts import Sums
from fedsilo.datasets.registry import data_set, load_silo
from fedsilo.datasets.silo.measures import ColumnWords
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.maths.unlike_columns import UnlikeColumn, compare_sites
from fedsilo.strategies.meeting.participants import Participants

_SHOWN = 10  # columns with a line of their own
_MOST_BYTES = 2**30  # samples of more bytes take seconds to compare, so they are not compared


def find_unlike_columns(participants: Participants, common: CommonSettings) -> list[UnlikeColumn]:
    """Find the columns whose mean at one site suggests another unit than at the other sites.

    A site is compared with the site whose mean is the median of the other sites' means. A column is
    reported in these two cases:

    - The means differ by a factor of five or more. In addition, they are more than one standard
      deviation apart, or the standard deviations differ by a similar factor.
    - The means are more than three standard deviations apart, and a known change of unit explains
      this, such as mmol/l to mg/dl.

    A site needs enough values in a column: the largest 'sums-min-count' of the run and of the sites
    that send sums. The list is empty if the level of trust is not 'server', or if no site sends
    sums.
    """
    if common.trust != SERVER:
        return []
    sums: dict[str, Sums] = {}
    floor = common.sums_min_count
    features: tuple[str, ...] = ()
    for site, facts in participants.facts.items():
        if facts.sums is not None:
            sums[site], features = facts.sums, facts.features
            floor = max(floor, facts.floor)
    return compare_sites(features, sums, floor)


def unlike_columns_document(
    participants: Participants, common: CommonSettings
) -> list[dict[str, str]]:
    """Build the entry 'unlike-columns' of summary.json: columns whose unit may differ at one site.

    The mean of such a column at the site differs from the other sites' means by a factor of five or
    more, or a known change of unit explains the difference. ``find_unlike_columns`` has further
    conditions. The means themselves are left out, because reports show this entry, and a mean of
    few values could reveal a count.

    Returns:
        One mapping per column and site, or an empty list. The keys are:

        - "column": the column's name in the data,
        - "title": the column's name for readers,
        - "site": the name of the site,
        - "relation": how the means differ, in words,
        - "question": what the site should check.
    """
    found = find_unlike_columns(participants, common)
    entries = []
    for unlike, title in zip(found, _column_titles(found, common), strict=True):
        entry = {"column": unlike.column, "title": title, "site": unlike.site}
        entries.append(entry | {"relation": unlike.relation(), "question": unlike.question()})
    return entries


def unlike_columns(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield one line for each column and site where the mean is far from the other sites' means.

    A mean is far if it differs by a factor of five or more, or if a known change of unit explains
    the difference. ``find_unlike_columns`` has further conditions. The first ten means are
    described. If there are more, an eleventh line gives the number of the remaining ones. Nothing
    is yielded unless the level of trust is 'server', because the server does not know the means
    otherwise.
    """
    found = find_unlike_columns(participants, common)
    shown = found[:_SHOWN]
    for unlike, title in zip(shown, _column_titles(shown, common), strict=True):
        yield unlike.sentence("at the other sites", title)
    if len(found) > _SHOWN:
        yield f"{len(found) - _SHOWN} more means of columns are unlike those of the other sites"


def _column_titles(columns: Sequence[UnlikeColumn], common: CommonSettings) -> list[str]:
    """Return the title of each column (its name for readers), in the order of ``columns``.

    The data set's schema may give a column a title. Without one, the title is "column 'x'". Line
    ends are removed, and the title is cut to 120 characters.

    Args:
        columns: the columns whose mean at one site is far from the other sites' means.
        common: the run's settings, which name the data set.
    """
    known: Mapping[str, ColumnWords] = {}
    if columns:
        known = data_set(common.dataset).column_words(common)
    titles = []
    for unlike in columns:
        title = f"column '{unlike.column}'"
        if unlike.column in known:
            title = known[unlike.column].title
        titles.append(one_line(title, 120))
    return titles


def equal_samples(participants: Participants, common: CommonSettings) -> Iterator[str]:
    """Yield one line if sites have samples in common, with the number of these samples.

    The line names neither samples nor sites. Sites send one digest for each split, so only splits
    that are equal as a whole are found. For simulated sites with the user's own data, single
    samples are compared too, and the larger number is given. Nothing is yielded unless the level of
    trust is 'server', because sites send no digests otherwise.
    """
    if common.trust != SERVER:
        return
    shared = _count_in_equal_splits(participants)
    if participants.are_simulated() and data_set(common.dataset).origin == "own":
        # A split that is equal is counted sample by sample too
        shared = max(shared, _count_equal_samples(participants, common))
    if shared:
        yield (
            f"{format_count(shared, 'sample')} of equal content at more than one site: a site may "
            "test on samples that another site trains on; check whether the sites' files overlap"
        )


def _count_in_equal_splits(participants: Participants) -> int:
    """Count the samples in splits that are identical at two or more sites, found by their digests.

    The samples of such a split are counted once, however many sites have it. A split counts even if
    it has training data at one site and test data at another. Splits that overlap only in part are
    not found. Empty splits are ignored.
    """
    owners: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for site, facts in participants.facts.items():
        for split, digest in facts.fingerprints.items():
            size = facts.sizes.get(split, 0)
            if size:
                owners.setdefault(digest, set()).add(site)
                sizes[digest] = size
    return sum(sizes[digest] for digest, sites in owners.items() if len(sites) > 1)


def _count_equal_samples(participants: Participants, common: CommonSettings) -> int:
    """Count the distinct samples that more than one simulated site has, in any of their splits.

    Two samples are equal if both their inputs and their labels are equal. If the inputs of all
    sites together exceed 1 GiB, nothing is counted, and the result is 0. The same holds if a site's
    files cannot be read.
    """
    counts: Counter[bytes] = Counter()
    left = _MOST_BYTES
    for site in participants.sites():
        try:
            silo = load_silo(site, common)
        except DataError:  # the site was opened a moment ago, so its files are being changed
            return 0
        left -= sum(inputs.nbytes for inputs in silo.inputs().values())
        if left < 0:
            return 0
        counts.update(_digest_samples(silo))
    return sum(number > 1 for number in counts.values())


def _digest_samples(silo: Silo) -> set[bytes]:
    """Return a 16-byte BLAKE2b digest of each distinct sample in a silo's splits.

    A digest covers the sample's input and its label. Two samples have the same digest only if their
    inputs and their labels are equal.
    """
    digests = set()
    for split in silo.splits().values():
        inputs, labels = np.ascontiguousarray(split.inputs.numpy()), split.labels.tolist()
        for values, label in zip(inputs, labels, strict=True):
            digest = hashlib.blake2b(values.tobytes(), digest_size=16)
            digest.update(str(label).encode())
            digests.add(digest.digest())
    return digests
