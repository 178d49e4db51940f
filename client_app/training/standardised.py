"""Standardise a site's table by the run's mean and standard deviation, as networks take it."""

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
    """Return the silo as networks take it: a table standardised, with missing values as 0.

    Raises:
        SettingError: 'data.standardise' is 'declared', but the schema declares no mean and
            deviation.
        SiteError: the message lacks the pooled statistics.
    """
    if not silo.features:
        return silo
    return standardise_silo(silo, find_standardisation(silo, settings, content))


def find_standardisation(
    silo: Silo, settings: CommonSettings, content: RecordDict
) -> FeatureStatistics:
    """Find the mean and standard deviation by which this site standardises its features.

    'data.standardise' says whose: the site's own, the schema's, or those that the server pooled.

    Raises:
        SettingError: the schema declares none.
        SiteError: the server sent none.
    """
    if settings.standardise == "site":
        return pooled_statistics([sums_of(silo.train.inputs)])
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
    """Return the silo with its features standardised by ``standardisation``."""
    train, val, test = (
        Split(standardise(split.inputs, standardisation), split.labels)
        for split in silo.splits().values()
    )
    return dataclasses.replace(
        silo, train=train, val=val, test=test, standardisation=standardisation
    )
