"""MATCHA at a silo: mix with whoever a round's matchings give it, train, send."""

from __future__ import annotations

from fedsilo.client_app.methods.decentralised import DecentralisedSite


class MatchaSite(DecentralisedSite):
    """As every decentralised silo; which neighbours come is the server's draw."""
