"""Standardise a site's table, as networks take it, with the run's means and deviations."""

import dataclasses

from flwr.app import RecordDict

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import STANDARDISED
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.maths.standardisation import pooled_statistics, standardise, sums_of
from fedsilo.strategies.wire.records import unpack


def ready_silo(silo: Silo, settings: CommonSettings, content: RecordDict) -> Silo:
    """Return a site's data, ready for a network: standardised and without missing values.

    The features of a table are standardised, and its missing values become 0. Images are returned
    unchanged. A numeric outcome stays in its unit, but the result records its mean and deviation.
    'data.standardise' decides whether means and deviations are the site's own, the schema's, or
    those in the server's message ``content``.

    Raises:
        SettingError: 'data.standardise' is 'declared', but the schema declares no statistics.
        SiteError: 'data.standardise' is 'pooled', but the message lacks the pooled statistics.
    """
    if not silo.columns():
        return silo
    return standardise_silo(silo, find_standardisation(silo, settings, content))


def find_standardisation(
    silo: Silo, settings: CommonSettings, content: RecordDict
) -> FeatureStatistics:
    """Return the mean and standard deviation of each column, (columns,), that standardise the data.

    Columns are the features of a table and a numeric outcome. 'data.standardise' decides where the
    statistics come from. With "site", they come from the site's training samples, and with
    "declared" from the schema. With "pooled" they come from the server's message, and describe all
    sites.

    Raises:
        SettingError: 'data.standardise' is 'declared', but the schema declares no statistics.
        SiteError: 'data.standardise' is 'pooled', but the message lacks the pooled statistics.
    """
    if settings.standardise == "site":
        return pooled_statistics([sums_of(silo.column_values())])
    if settings.standardise == "declared":
        if silo.declared is None:
            raise SettingError(
                "setting 'data.standardise' is 'declared', but the schema gives no mean and std "
                "for every numeric column: add them, or set it to 'pooled'"
            )
        return silo.declared
    if STANDARDISED not in content.array_records:
        raise SiteError(
            "a message lacks the pooled mean and std: server and site run different versions of "
            "fedsilo"
        )
    record = content.array_records[STANDARDISED]
    return FeatureStatistics(unpack(record["mean"]), unpack(record["std"]))


def standardise_silo(silo: Silo, standardisation: FeatureStatistics) -> Silo:
    """Return a copy of the silo in which all splits are standardised and missing values are 0.

    The copy records the statistics of its features and of a numeric outcome. Numeric outcomes stay
    in their unit, because the task standardises them in the loss. ``silo`` itself is not changed.

    Args:
        silo: the site's data.
        standardisation: the mean and deviation of each column of ``silo.columns()``, (columns,)
            each.
    """
    count, outcome = len(silo.features), None
    if len(silo.columns()) > count:
        outcome = FeatureStatistics(standardisation.mean[count:], standardisation.std[count:])
    if not count:
        return dataclasses.replace(silo, outcome=outcome)
    rows = FeatureStatistics(standardisation.mean[:count], standardisation.std[:count])
    train, val, test = (
        Split(standardise(split.inputs, rows), split.labels) for split in silo.splits().values()
    )
    return dataclasses.replace(
        silo, train=train, val=val, test=test, standardisation=rows, outcome=outcome
    )
