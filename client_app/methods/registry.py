"""A site's side of each method of the table in ``fedsilo.models.contract.methods``."""

from __future__ import annotations

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.models.contract.methods import method_part


def method_class(name: str) -> type[SiteMethod]:
    """Return the class that answers for method ``name`` at a site."""
    method: type[SiteMethod] = method_part("client_app", name, "Site")
    return method
