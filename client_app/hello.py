"""A site's hello at the start of a run: counts and fingerprints, no data."""

from fedsilo.client_app.session import SiteSession
from fedsilo.core.errors import RefusedError
from fedsilo.core.settings.common_settings import SERVER, SUMS
from fedsilo.core.site_facts import SiteFacts, Sums
from fedsilo.core.versions import installed_software
from fedsilo.datasets.weights.backbones import backbone_digest
from fedsilo.models.maths.standardisation import sums_of


def site_facts(session: SiteSession) -> SiteFacts:
    """Build the site's answer to a hello: name, task, label counts, fingerprints and software.

    A hello is the server's question before round 1. The run's trust decides what is left out:

    - At trust 'sums' label counts are left out, because the server may learn only sums over sites.
    - At any trust but 'server' the fingerprints (digests of the data) are left out, because anyone
      who guesses the data could check the guess. The number of unusable samples is then 0.

    A simulated site reports no software.

    Raises:
        RefusedError: the site has too few rows for the feature sums that the run asks for.
        SettingError: the weights of the pretrained backbone are missing.
    """
    silo, trust = session.silo, session.settings.trust
    software: dict[str, str] = {}
    if not session.simulated:
        software = installed_software() | {"device": str(session.compute.device)}
    label_counts = session.reported
    if trust == SUMS:
        label_counts = {}
    fingerprints, dropped = silo.fingerprints, silo.dropped
    if trust != SERVER:
        fingerprints, dropped = {}, 0
    return SiteFacts(
        site=silo.name,
        distribution=silo.distribution,
        input_shape=silo.shape.input_shape,
        classes=silo.shape.outputs,
        label_counts=label_counts,
        fingerprints=fingerprints,
        simulated=session.simulated,
        features=silo.features,
        sums=feature_sums(session),
        dropped=dropped,
        schema=silo.schema,
        backbone=backbone_digest(session.settings),
        class_names=silo.classes,
        floor=session.settings.sums_min_count,
        measured=session.measured_splits(),
        software=software,
        task=silo.task,
    )


def feature_sums(session: SiteSession) -> Sums | None:
    """Compute the count, the sum and the sum of squares of each feature and of a numeric label.

    Only the known values in the training rows enter. The server combines the sums of all sites into
    one mean and standard deviation. Returns None if 'data.standardise' is not 'pooled', or if the
    data have neither features nor a numeric label.

    Raises:
        RefusedError: the site has fewer training rows than 'privacy.sums-min-count'. The same
            minimum holds for the known values of each column that has any.
    """
    silo, settings = session.silo, session.settings
    columns = silo.columns()
    if not columns or settings.standardise != "pooled":
        return None
    sums, least, rows = sums_of(silo.column_values()), settings.sums_min_count, len(silo.train)
    few = ""
    for feature, count in zip(columns, sums.count, strict=True):
        if not few and 0 < count < least:
            few = f"{int(count)} training rows have a value of '{feature}'"
    if rows < least:
        few = f"it has {rows} training rows"
    if few:
        raise RefusedError(
            f"site {silo.name} sends no sums: {few}, but at least {least} are needed "
            "('privacy.sums-min-count'), by the run or, if that is more, by the hospital itself; "
            "leave the site out, or set 'data.standardise' to 'declared'"
        )
    return sums
