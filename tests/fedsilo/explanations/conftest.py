"""Networks to explain are opened as a site of a run opens them."""

from tests.client_app.conftest import common, opened, resolved, silo, weights  # noqa: F401
