"""What a run says that a hospital which trusts nobody answers."""

from typing import Any

CHECKED: dict[str, Any] = {
    "privacy.trust": "nobody",
    "data.standardise": "declared",
    "rounds": 40,
    "train.local-steps": 4,
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 4.0,
    "network.name": "mlp",
    "network.dropout": 0.1,
    "train.mc-passes": 2,
}
UEFL = {"uefl.codes": 2, "uefl.codeword-start": "gaussian", "uefl.refresh": "none"}
