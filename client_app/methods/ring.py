"""Ring at a silo: mix with the neighbours' models that came, train, send."""

from __future__ import annotations

from fedsilo.client_app.methods.decentralised import DecentralisedSite


class RingSite(DecentralisedSite):
    """As every decentralised silo; who its neighbours are is the server's knowledge."""
