"""What all methods of a comparison must have in common, so that they alone make a difference."""

from collections.abc import Mapping

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings


def refuse_mixed_optimisers(experiments: Mapping[str, CommonSettings]) -> None:
    """Refuse methods if one's optimiser continues over rounds and another's restarts in each.

    One method may be compared with itself under both.

    Args:
        experiments: name -> the settings that all methods share.

    Raises:
        SettingError: names two such experiments.
    """
    first, *others = experiments
    for other in others:
        one, two = experiments[first], experiments[other]
        if one.method != two.method and _goes_on(one) != _goes_on(two):
            on, afresh = (first, other) if _goes_on(one) else (other, first)
            raise SettingError(
                f"the optimiser of experiment '{on}' continues over rounds and that of '{afresh}' "
                "starts again in each: methods are compared with one rule for all; set "
                f"'optimiser-state' to 'run' ('epoch-steps' of '{on}' is "
                f"{experiments[on].epoch_steps}), or to 'round' where 'epoch-steps' is 0"
            )


def _goes_on(common: CommonSettings) -> bool:
    return common.epoch_steps > 0 or common.optimiser_state == "run"
