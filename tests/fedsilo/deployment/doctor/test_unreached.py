"""A server that gRPC does not reach says nothing about a hospital's key."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedsilo.core.processes import free_ports
from fedsilo.deployment.doctor.findings import Refused
from fedsilo.deployment.doctor.wire import is_online, same_clock

NOW = datetime.now(UTC)


def test_a_proxy_that_stops_grpc_is_the_cause_and_not_the_key(
    secrets: Path, fleet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(Refused) as caught:
        is_online(f"localhost:{fleet}", *keys(secrets), 7, NOW)
    assert "through the proxy that $https_proxy names" in str(caught.value)
    assert "registration" not in str(caught.value)
    with pytest.raises(Refused, match="through the proxy"):
        same_clock(f"localhost:{fleet}", *keys(secrets), NOW)


def test_a_server_that_is_gone_is_the_cause_and_not_a_proxy_that_is_bypassed(
    secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost")
    with pytest.raises(Refused) as caught:
        is_online(
            f"localhost:{free_ports(1)[0]}",
            secrets / "ca.crt",
            secrets / "north.key",
            7,
            NOW,
        )
    assert "gRPC does not reach server localhost" in str(caught.value)
    assert "proxy" not in str(caught.value)


def keys(secrets: Path) -> tuple[Path, Path]:
    """Return the authority's certificate and the hospital's key."""
    return secrets / "ca.crt", secrets / "north.key"
