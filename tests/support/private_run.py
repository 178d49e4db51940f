"""What a run says that a hospital which trusts nobody answers."""

from typing import Any

CHECKED: dict[str, Any] = {
    "trust": "nobody",
    "standardise": "declared",
    "rounds": 40,
    "local-steps": 4,
    "sample-clip-norm": 1.0,
    "noise-multiplier": 4.0,
    "network": "mlp",
    "dropout": 0.1,
    "mc-passes": 2,
}
UEFL = {"uefl.codes": 2, "uefl.codeword-start": "gaussian", "uefl.refresh": "none"}
