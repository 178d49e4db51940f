"""Which settings keep the promise of the level of trust that a run is made for."""

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import needs_sums_only, why_not_private
from fedsilo.models.contract.settings import AUTO, NOBODY, SUMS, CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, defaults


def statistics_noise(common: CommonSettings) -> float:
    """Return the noise multiplier of class means, prototypes and measurements."""
    return common.statistics_noise or common.noise_multiplier


def check_privacy_settings(common: CommonSettings, table: bool = False) -> None:
    """Refuse settings of privacy that contradict each other, by a ``SettingError``.

    ``table`` says whether the data are a table, whose features are standardised by figures that
    may be made of patients.
    """
    _check_trust(common, table)
    if common.secure_aggregation != "none":
        _check_secure_settings(common)
    clip, noise = common.sample_clip_norm, common.noise_multiplier
    if bool(clip) != bool(noise):
        raise SettingError(
            f"setting 'sample-clip-norm' is {clip:g} and 'noise-multiplier' is {noise:g}: "
            "differential privacy needs both above 0; set both, or neither"
        )
    if not clip:
        _refuse_without_effect(common)
        return
    if reason := why_not_private(common.method):
        raise SettingError(
            f"method '{common.method}' {reason}: set 'sample-clip-norm' and 'noise-multiplier' to "
            "0, or choose another method"
        )
    if table and common.standardise != "declared":
        raise SettingError(
            f"setting 'sample-clip-norm' is {clip:g} and 'standardise' is '{common.standardise}': "
            "means and deviations of a site's own rows have no noise; set 'standardise' to "
            "'declared'"
        )
    if common.class_weights == "balanced":
        raise SettingError(
            f"setting 'sample-clip-norm' is {clip:g} and 'class-weights' is 'balanced': the counts "
            "of patients that they are made of have no noise; set 'class-weights' to numbers, or "
            "to 'none'"
        )
    if common.compresses():
        raise SettingError(
            f"setting 'sample-clip-norm' is {clip:g}, and updates travel in fewer bytes, which "
            "nobody has measured of noisy ones: set 'wire-precision' and 'wire-down' to 'fp32'"
        )
    if common.precision == "fp16":
        raise SettingError(
            f"setting 'sample-clip-norm' is {clip:g} and 'precision' is 'fp16': gradients of "
            "single samples are not scaled, and would be lost; set 'precision' to 'bf16', or to "
            "'fp32'"
        )
    if common.epoch_steps or common.gradient_checkpointing:
        key = "epoch-steps" if common.epoch_steps else "gradient-checkpointing"
        raise SettingError(
            f"setting 'sample-clip-norm' is {clip:g} and '{key}' is set: private batches are drawn "
            f"for each step alone, a gradient at a time; leave '{key}' as it is by default"
        )


def _refuse_without_effect(common: CommonSettings) -> None:
    values, usual = as_mapping(common), defaults(CommonSettings)
    for key in ("max-epsilon", "delta", "statistics-noise"):
        if values[key] != usual[key]:
            raise SettingError(
                f"setting '{key}' is {values[key]:g} and without 'sample-clip-norm' and "
                f"'noise-multiplier' there is no epsilon: set both, or remove '{key}'"
            )


def _check_trust(common: CommonSettings, table: bool) -> None:
    """Refuse a run that is made for a level of trust whose promise its settings break."""
    if common.trust == SUMS and common.secure_aggregation == "none":
        raise SettingError(
            "setting 'trust' is 'sums' and 'secure-aggregation' is 'none': the server would see "
            "what single sites answer; set it to 'secagg'"
        )
    if common.trust == SUMS and common.is_private():
        raise SettingError(
            "setting 'trust' is 'sums' and 'sample-clip-norm' is set: each site reports its own "
            "epsilon; set 'trust' to 'nobody', or 'sample-clip-norm' to 0"
        )
    if common.trust == NOBODY and not common.is_private():
        raise SettingError(
            "setting 'trust' is 'nobody' and 'sample-clip-norm' is 0: nothing that leaves is "
            "differentially private; set 'sample-clip-norm' and 'noise-multiplier'"
        )
    if common.trust == SUMS and table and common.standardise == "pooled":
        raise SettingError(
            "setting 'trust' is 'sums' and 'standardise' is 'pooled': a site would send exact sums "
            "of its own rows; set it to 'declared' or 'site'"
        )


def _check_secure_settings(common: CommonSettings) -> None:
    if not needs_sums_only(common.method):
        raise SettingError(
            f"method '{common.method}' needs more of the sites' arrays than a sum: set "
            "'secure-aggregation' to 'none', or choose another method"
        )
    if not common.clip_norm:
        raise SettingError(
            "setting 'secure-aggregation' is 'secagg' and 'clip-norm' is 0: a sum has room for "
            "numbers of a known size alone; set 'clip-norm'"
        )
    if common.aggregation not in (AUTO, "mean"):
        raise SettingError(
            f"setting 'aggregation' is '{common.aggregation}' and 'secure-aggregation' is "
            "'secagg': of a sum only the mean is known; set one of the two back"
        )
    if common.compresses():
        raise SettingError(
            "setting 'secure-aggregation' is 'secagg', and updates travel in fewer bytes: masks "
            "cancel in whole sums alone; set 'wire-precision' and 'wire-down' to 'fp32'"
        )
    if common.site_weights:
        raise SettingError(
            "setting 'secure-aggregation' is 'secagg' and 'site-weights' names a file: sites weigh "
            "themselves by their own samples, which nobody else knows; leave 'site-weights' empty"
        )
