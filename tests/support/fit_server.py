"""A regression at trust 'sums' over the hospitals of ``two_worlds``, played message by message."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsilo.core.settings_schema import Value
from fedsilo.models.maths.glm import moments_length, sums_length
from fedsilo.models.maths.glm_steps import (
    FitProgress,
    FittedModel,
    first_progress,
    next_progress,
)
from fedsilo.models.methods.glm import (
    BETA,
    BETA_REST,
    CENTERS,
    DEVIATIONS,
    SUMS,
    UNCLIPPED,
    ScaleNotes,
    grid_over,
    join_parts,
)
from fedsilo.models.privacy.secure_sum import SAMPLES
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.wire.secure_keys import COUNTS
from tests.support.two_worlds import RUN, SITES, Federation

MODEL = FittedModel("logistic", ["age", "dose"])
FIT: dict[str, Value] = {
    **{key: value for key, value in RUN.items() if not key.startswith(("train.", "network."))},
    "method": "glm",
    "glm.columns": "age,dose",
    "server.evaluate-every": 0,
}


@dataclass
class FitServer:
    """A server that asks the questions of a fit, or others."""

    federation: Federation
    run: str = "r"
    settings: dict[str, Value] = field(default_factory=lambda: dict(FIT))
    progress: FitProgress = field(default_factory=lambda: first_progress(MODEL))
    round: int = 0  # the last answered round
    proofs: list[dict[str, list[str]]] = field(default_factory=list)  # one proof per round
    sites: tuple[str, ...] = SITES

    def arrays(self, progress: FitProgress) -> dict[str, Any]:
        """Return the arrays that ask the question of ``progress``."""
        beta = np.array(progress.beta or [0.0] * len(MODEL.names))
        length = sums_length(len(beta)) if progress.beta else moments_length(3)
        return {
            CENTERS: np.float32(progress.centers),
            DEVIATIONS: np.float32(progress.deviations),
            BETA: np.float32(beta),
            BETA_REST: np.float32(beta - np.float32(beta)),
            **dict.fromkeys(SUMS, np.zeros(length, np.float32)),
            UNCLIPPED: np.zeros(1, np.float32),
        }

    def ask(
        self,
        progress: FitProgress | None = None,
        round_: int | None = None,
        arrays: dict[str, Any] | None = None,
        **instruction: Any,
    ) -> dict[str, Any] | None:
        """Ask all hospitals; by default what an honest server asks. None if one refuses."""
        progress = progress or self.progress
        common = resolve(self.settings).common
        notes = ScaleNotes(not progress.beta, progress.scale, grid_over(common, len(self.sites)))
        number = round_ or self.round + 1
        self.federation.proves = True
        if number > 1:
            self.federation.proof = self.proofs[number - 2]
        return self.federation.sum(
            resolve(self.settings).as_mapping(),
            arrays or self.arrays(progress),
            names=(*SUMS, UNCLIPPED),
            **{
                "notes": notes.to_values(),
                "round": number,
                "run_name": self.run,
                **instruction,
            },
        )

    def step(self) -> dict[str, Any]:
        """Play the next round honestly; all hospitals must answer. Return its sums."""
        left = self.ask()
        assert left is not None, self.federation.last_error
        samples, failed = left[COUNTS]
        common = resolve(self.settings).common
        parts = {n: samples * (left[n] * (SAMPLES / samples)) for n in (*SUMS, UNCLIPPED)}
        vector = join_parts(common, samples, parts, grid_over(common, len(self.sites)))
        self.round += 1
        self.proofs.append(self.federation.proof)
        if not failed:
            scaled = None if vector is None else vector * self.progress.scale
            self.progress = next_progress(MODEL, self.progress, scaled)
        return left

    def changed(self, **changes: Any) -> FitProgress:
        """Return the next question with changes."""
        return replace(self.progress, **changes)
