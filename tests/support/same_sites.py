"""Methods whose hospitals run another method's code, so that an attack on both is the same."""

from collections.abc import Iterable

from fedsilo.core.methods import site_class
from tests.support.soak import in_soak

# Method -> whose site it has; they differ at the server alone
SAME_SITES = {
    **dict.fromkeys(("cyclic", "fedadagrad", "fedadam", "fedavgm", "fedswa", "fedyogi"), "fedavg"),
    "fedbn": "fedper",
    "ring": "matcha",
}


def one_of_each_site(names: Iterable[str]) -> list[object]:
    """Return names of attacks that end with a method's; repeated sites are left to the soak."""
    for method, other in SAME_SITES.items():
        assert site_class(method) is site_class(other), f"{method} has a site of its own"
    listed = list(names)
    own = [name for name in listed if name.rpartition(" ")[2] not in SAME_SITES]
    return in_soak(listed, but=own)
