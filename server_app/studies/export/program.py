"""The program that is exported: its inputs, its outputs, and test vectors that check it.

Test vectors are made up: no patient's row or image leaves with a model.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.models.contract.errors import ExportError
from fedsilo.models.contract.seeding import generator
from fedsilo.models.maths.standardisation import standardised
from fedsilo.models.networks.probability_model import ProbabilityModel
from fedsilo.server_app.studies.predict.model import SiteModel

VECTORS = 8
TOLERANCE = 1e-4  # of a probability
INPUTS, PROBABILITIES = "inputs", "probabilities"
_CPU = Compute(torch.device("cpu"), bf16=False)


@dataclass(frozen=True)
class Program:
    """A model ready to be exported, on the CPU."""

    model: SiteModel
    module: ProbabilityModel  # from inputs to probabilities
    vectors: Tensor  # (8, *input_shape), made-up inputs
    answers: Tensor  # (8, classes), fedsilo's own predictions for them, without dropout

    def difference(self, answers: Tensor, of: int = VECTORS) -> float:
        """Return the largest difference of answers (of, classes) to the first vectors from ours.

        Raises:
            ExportError: it exceeds the tolerance.
        """
        most = (answers.double() - self.answers[:of].double()).abs().max().item()
        if not most <= TOLERANCE:
            raise ExportError(
                f"the exported program's probabilities differ by {most:.2g} from fedsilo's, and "
                f"{TOLERANCE:g} is the most: nothing was written; report it with the versions of "
                "'fedsilo settings'"
            )
        return most

    def interface(self) -> dict[str, Any]:
        """Return what goes in and what comes out, for JSON."""
        silo, pixels = self.model.silo, self.model.pixel_figures()
        return {
            "inputs": {
                "name": INPUTS,
                "type": str(self.vectors.dtype).removeprefix("torch."),
                "shape": ["batch", *self.vectors.shape[1:]],
                "meaning": _meaning(self.vectors, pixels is not None),
                **({"features": list(silo.features)} if silo.features else {}),
            },
            "outputs": {
                "name": PROBABILITIES,
                "type": "float32",
                "shape": ["batch", len(self.model.classes)],
                "classes": list(self.model.classes),
                "meaning": "class probabilities of one pass without dropout",
            },
        }


def open_program(model: SiteModel) -> Program:
    """Return a model's program; the model itself is not changed."""
    network = copy.deepcopy(model.network).cpu()
    module = ProbabilityModel(network, model.silo.figures, model.pixel_figures())
    module.requires_grad_(False)
    vectors = made_up_inputs(model)
    # The silo's own preparation, not the module's: the two are to be compared
    logits = over_batches(network, _prepared(model, vectors), _CPU, network)
    return Program(model, module, vectors, torch.softmax(logits, dim=1))


def made_up_inputs(model: SiteModel) -> Tensor:
    """Return eight synthetic inputs: noise, or numbers around a table's means with one missing."""
    rng, inputs = generator(0, "export-vectors"), model.silo.train.inputs
    shape = (VECTORS, *model.silo.task.input_shape)
    if figures := model.silo.figures:
        spread = torch.randn(shape, generator=rng, dtype=torch.float64)
        rows = (torch.from_numpy(figures.mean) + spread * torch.from_numpy(figures.std)).float()
        rows[0, 0] = torch.nan
        return rows
    if inputs.dtype in (torch.uint8, torch.int16):
        kinds = torch.iinfo(inputs.dtype)
        return torch.randint(kinds.min, kinds.max + 1, shape, generator=rng).to(inputs.dtype)
    return 255 * torch.rand(shape, generator=rng)


def _prepared(model: SiteModel, vectors: Tensor) -> Tensor:
    """Return raw inputs prepared as a silo of the run does it."""
    if figures := model.silo.figures:
        return standardised(vectors, figures)
    if pixels := model.pixel_figures():
        return (vectors / 255 - pixels[0]) / pixels[1]
    return vectors


def _meaning(vectors: Tensor, pixels: bool) -> str:
    if vectors.ndim == 2:
        return "a table's features in this order as they are read; a missing value is NaN"
    if vectors.dtype == torch.uint8:
        return "pixels 0 to 255, decoded and of this size"
    if vectors.dtype == torch.int16:
        return "pixels of 16 bits less 32768, decoded and of this size"
    return "pixels 0 to 255, of this size" + ("" if pixels else ", as they are read")
