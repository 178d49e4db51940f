"""Check that the privacy settings agree with each other and with the run's level of trust."""

from collections.abc import Iterator

from fedsilo.core.errors import SettingError
from fedsilo.core.methods import needs_sums_only, why_not_private
from fedsilo.core.settings.common_settings import AUTO, NOBODY, SUMS, CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults
from fedsilo.core.tasks import TASKS


def statistics_noise(common: CommonSettings) -> float:
    """Return the noise multiplier for a site's statistics, such as class means and metrics.

    It is 'privacy.statistics-noise'. If this setting is 0, it is 'privacy.noise-multiplier'.
    """
    return common.statistics_noise or common.noise_multiplier


def check_privacy_settings(common: CommonSettings, table: bool = False) -> None:
    """Check that no privacy setting contradicts another setting.

    The level of trust is checked first, then secure aggregation, then differential privacy.

    Args:
        common: the run's common settings.
        table: whether the data are a table. A table is standardised by means and deviations, which
            may reveal patients. A task with a numeric outcome always counts as a table.

    Raises:
        SettingError: two settings contradict each other. Only the first contradiction is named.
    """
    table = table or TASKS[common.task].numeric  # a numeric outcome is standardised like a column
    contradictions = [*_find_broken_trust(common, table)]
    if common.secure_aggregation != "none":
        contradictions += _find_unsummable(common)
    contradictions += _find_not_private(common, table)
    if contradictions:
        raise SettingError(contradictions[0])


def _find_not_private(common: CommonSettings, table: bool) -> Iterator[str]:
    """Yield an error message for each setting that contradicts private training (DP-SGD).

    'privacy.sample-clip-norm' and 'privacy.noise-multiplier' must both be set or both be 0. If the
    norm is 0, settings that would then have no effect give messages too. If it is set, each of
    these gives a message:

    - A method that sends values without noise (``why_not_private``).
    - For a table, a value of 'data.standardise' other than 'declared'.
    - Class weights 'balanced', compressed updates, or precision 'fp16'.
    - 'train.epoch-steps' or gradient checkpointing, in one message.

    Args:
        common: the run's common settings.
        table: whether the data are a table.
    """
    clip, noise = common.sample_clip_norm, common.noise_multiplier
    if bool(clip) != bool(noise):
        yield (
            f"setting 'privacy.sample-clip-norm' is {clip:g} and 'privacy.noise-multiplier' is "
            f"{noise:g}: differential privacy needs both above 0; set both, or neither"
        )
    if not clip:
        yield from _find_without_effect(common)
        return
    # Noise is on from here, so each message is about something that would go around the noise
    reason = why_not_private(common.method)
    if reason:
        yield (
            f"method '{common.method}' {reason}: set 'privacy.sample-clip-norm' and "
            "'privacy.noise-multiplier' to 0, or choose another method"
        )
    if table and common.standardise != "declared":
        yield (
            "setting 'data.standardise' must be 'declared' with 'privacy.sample-clip-norm', but "
            f"is '{common.standardise}': means and deviations of a site's rows have no noise; set "
            "'data.standardise' to 'declared'"
        )
    if common.class_weights == "balanced":
        yield (
            f"setting 'privacy.sample-clip-norm' is {clip:g}, but 'train.class-weights' is "
            "'balanced': these weights come from counts of patients without noise; set "
            "'train.class-weights' to numbers, or to 'none'"
        )
    if common.compresses():
        yield (
            f"setting 'privacy.sample-clip-norm' is {clip:g}, but updates travel in fewer bytes, "
            "which has not been tested with noise: set 'server.wire-precision' and "
            "'server.wire-down' to 'fp32'"
        )
    if common.precision == "fp16":
        yield (
            f"setting 'privacy.sample-clip-norm' is {clip:g}, but 'machine.precision' is 'fp16': "
            "gradients of single samples are not scaled and would become 0; set "
            "'machine.precision' to 'bf16', or to 'fp32'"
        )
    if common.epoch_steps or common.gradient_checkpointing:
        key = "train.epoch-steps" if common.epoch_steps else "network.gradient-checkpointing"
        yield (
            f"setting 'privacy.sample-clip-norm' is {clip:g}, but '{key}' is set: private batches "
            f"are drawn anew for each step, a gradient at a time; leave '{key}' as it is by default"
        )


def _find_without_effect(common: CommonSettings) -> Iterator[str]:
    """Yield an error message for each setting that is changed but has no effect without DP-SGD.

    The settings are 'privacy.max-epsilon', 'privacy.delta' and 'privacy.statistics-noise'. The
    caller has checked that DP-SGD is off.
    """
    values, usual = as_mapping(common), defaults(CommonSettings)
    for key in ("privacy.max-epsilon", "privacy.delta", "privacy.statistics-noise"):
        if values[key] != usual[key]:
            yield (
                f"setting '{key}' is {values[key]:g}, but there is no epsilon without "
                "'privacy.sample-clip-norm' and 'privacy.noise-multiplier': set both, or remove "
                f"'{key}'"
            )


def _find_broken_trust(common: CommonSettings, table: bool) -> Iterator[str]:
    """Yield an error message for each setting that breaks the promise of 'privacy.trust'.

    - Trust 'sums' needs secure aggregation and forbids DP-SGD. For a table it forbids
      'data.standardise' 'pooled'.
    - Trust 'nobody' needs DP-SGD.
    - Other levels break nothing.
    """
    if common.trust == SUMS and common.secure_aggregation == "none":
        yield (
            "setting 'privacy.trust' is 'sums', but 'secure.aggregation' is 'none': the server "
            "would see replies of single sites; set it to 'secagg'"
        )
    if common.trust == SUMS and common.is_private():
        yield (
            "setting 'privacy.trust' is 'sums', but 'privacy.sample-clip-norm' is set: each site "
            "reports its own epsilon; set 'privacy.trust' to 'nobody', or "
            "'privacy.sample-clip-norm' to 0"
        )
    # Without noise, exact values that depend on single patients would leave
    if common.trust == NOBODY and not common.is_private():
        yield (
            "setting 'privacy.trust' is 'nobody', but 'privacy.sample-clip-norm' is 0: nothing "
            "that leaves is differentially private; set 'privacy.sample-clip-norm' and "
            "'privacy.noise-multiplier'"
        )
    if common.trust == SUMS and table and common.standardise == "pooled":
        yield (
            "setting 'privacy.trust' is 'sums', but 'data.standardise' is 'pooled': a site would "
            "send exact sums of its own rows; set it to 'declared' or 'site'"
        )


def _find_unsummable(common: CommonSettings) -> Iterator[str]:
    """Yield an error message for each setting that secure aggregation does not allow.

    The caller has checked that 'secure.aggregation' is on. Each of these gives a message:

    - A method that needs more than a sum over sites (``needs_sums_only``).
    - A 'secure.clip-norm' of 0.
    - An aggregation other than the mean.
    - Compressed updates.
    - Site weights from a file.
    """
    if not needs_sums_only(common.method):
        yield (
            f"method '{common.method}' needs more than the sum of the sites' arrays: set "
            "'secure.aggregation' to 'none', or choose another method"
        )
    if not common.clip_norm:
        yield (
            "setting 'secure.clip-norm' must be above 0 with 'secure.aggregation' 'secagg', but is "
            "0: a sum has room only for numbers of a known size; set 'secure.clip-norm'"
        )
    if common.aggregation not in (AUTO, "mean"):
        yield (
            f"setting 'server.aggregation' is '{common.aggregation}', but 'secure.aggregation' is "
            "'secagg': a sum gives the mean only; set one of the two back"
        )
    if common.compresses():
        yield (
            "setting 'secure.aggregation' is 'secagg', but updates travel in fewer bytes: masks "
            "cancel only in sums of whole updates; set 'server.wire-precision' and "
            "'server.wire-down' to 'fp32'"
        )
    if common.site_weights:
        yield (
            "setting 'secure.aggregation' is 'secagg', but 'run.site-weights' names a file: sites "
            "weigh themselves by their own samples, which nobody else knows; leave "
            "'run.site-weights' empty"
        )
