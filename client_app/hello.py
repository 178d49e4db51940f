"""What a site says of itself at the start of a run: counts and fingerprints, no data."""

from fedsilo.client_app.session import SiteSession
from fedsilo.datasets.weights.backbones import backbone_digest
from fedsilo.models.contract.errors import RefusedError
from fedsilo.models.contract.settings import SERVER, SUMS
from fedsilo.models.contract.site_facts import SiteFacts, Sums
from fedsilo.models.contract.versions import installed_software
from fedsilo.models.maths.standardisation import sums_of


def site_facts(session: SiteSession) -> SiteFacts:
    """Return what the site says of itself.

    Where a run is made for sites that do not trust the server with single answers, digests and
    numbers of broken samples are not sent: anyone who guesses the data could check the guess. Where
    they trust it with sums alone, nor are label counts: of samples it learns sums in each round.

    Raises:
        RefusedError: its rows are too few for the sums that the run asks for.
        SettingError: the weights of its network are missing.
    """
    silo, software = session.silo, {}
    open_ = session.settings.trust == SERVER
    if not session.simulated:
        software = installed_software() | {"device": str(session.compute.device)}
    return SiteFacts(
        site=silo.name,
        distribution=silo.distribution,
        input_shape=silo.task.input_shape,
        classes=silo.task.classes,
        label_counts=session.told() if session.settings.trust != SUMS else {},
        fingerprints=silo.fingerprints if open_ else {},
        simulated=session.simulated,
        features=silo.features,
        sums=feature_sums(session),
        dropped=silo.dropped if open_ else 0,
        schema=silo.schema,
        backbone=backbone_digest(session.settings),
        class_names=silo.classes,
        floor=session.settings.sums_min_count,
        measured=session.measured_splits(),
        software=software,
    )


def feature_sums(session: SiteSession) -> Sums | None:
    """Return what this site sends towards pooled figures of a table, or None.

    Raises:
        RefusedError: so few rows are behind a sum that it says too much of each of them.
    """
    silo, settings = session.silo, session.settings
    if not silo.features or settings.standardise != "pooled":
        return None
    sums, least, rows = sums_of(silo.train.inputs), settings.sums_min_count, len(silo.train)
    few = [f"it has {rows} training rows"] if rows < least else []
    few += [
        f"{int(count)} training rows have a value of '{feature}'"
        for feature, count in zip(silo.features, sums.count, strict=True)
        if 0 < count < least
    ]
    if few:
        raise RefusedError(
            f"site {silo.name} sends no sums: {few[0]} and at least {least} are needed "
            "('sums-min-count'); leave the site out, or set 'standardise' to 'declared'"
        )
    return sums
