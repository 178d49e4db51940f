"""What every method does at a site: unpack, measure the incoming model, train, measure, reply.

A method says how its network is built from what came, what it keeps at home and what it sends;
the order of steps, the metrics and the private state's timing are the same for all.
"""

from __future__ import annotations

import resource
import sys
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from client_app.methods.learner import Learner
from client_app.privacy.protection import protect
from client_app.training.certainty import EvidenceWatch
from client_app.training.evaluation import SiteNetwork, Watch, measure
from datasets.silo.silos import Silo
from models.contract.errors import DataError, SettingError, SiteError
from models.contract.messages import (
    ARRAYS,
    EVALUATE,
    INCOMING,
    KEPT_STATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    TRAINED,
    TRAINING,
    measurement,
)
from models.contract.settings import CommonSettings
from models.maths.dirichlet import evidences

if TYPE_CHECKING:
    from client_app.explain.explanation import Explanation
    from models.networks.prompted_vit import PromptedViT


class SiteMethod(Learner):
    """One method at one site, for one message."""

    @classmethod  # most methods take every site
    def admit(cls, silo: Silo, common: CommonSettings, settings: Any) -> None:
        """Refuse to take part at all, by a ``SiteError``: asked before anything leaves the site."""

    @classmethod
    def consent(cls, settings: Any) -> tuple[str, str] | None:
        """Return what a real hospital must agree to: a key of its node config, and why."""
        return None

    @abstractmethod
    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the arrays that leave the site after training; may be empty."""

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the arrays that the site keeps for itself after training; may be empty."""
        return {}

    def answer(self) -> RecordDict:
        """Answer a phase: one that trains here, other phases by the method named after them."""
        phase = self.request.instruction.phase
        if phase in TRAINING:
            return self.train()
        handler = getattr(self, f"phase_{phase}", None)
        if handler is None:
            raise SiteError(
                f"site {self.silo.name}: method '{self.common.method}' has no phase "
                f"'{phase}'; server and site run different versions of fedsilo"
            )
        records: RecordDict = handler()
        return records

    def train(self) -> RecordDict:
        """Measure the incoming model, train it on this silo, measure it again, reply."""
        network = self.open_network()
        instruction = self.request.instruction
        metrics = self.measured(network, INCOMING, ("val", "test")) if instruction.evaluate else {}
        metrics[measurement(TRAINED, "train", "loss")] = self.fit(network)
        if instruction.evaluate:
            metrics |= self.measured(network, TRAINED, ("val",))
        if kept := self.kept(network) | self._paced:
            self.keep(kept)
        arrays = self.outgoing(network) if instruction.returns else {}
        return self.reply(metrics | self.told, arrays)

    def keep(self, arrays: dict[str, Tensor]) -> None:
        """Store private state for this phase; the reply will say that there is some.

        Raises:
            SiteError: the last step of training left values that are not finite.
        """
        for name, array in arrays.items():
            if not array.isfinite().all():
                raise SiteError(
                    f"training diverged, '{name}' holds values that are not finite: lower "
                    "'learning-rate'; nothing of it was kept"
                )
        self.state.store(self.request.instruction, arrays)
        self.kept_state = True

    def measure_only(self) -> RecordDict:
        """Measure the incoming model on validation and test data, and reply."""
        network = self.open_network()
        return self.reply(self.measured(network, INCOMING, ("val", "test")))

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Return the measurements of ``network`` on ``splits``, by MetricRecord key."""
        found: dict[str, float] = {}
        held = self.silo.splits()
        for split in splits:
            if not len(held[split]):
                continue  # the server knows from the site's label counts
            values = measure(
                network,
                held[split],
                self.common,
                self.compute,
                (self.request.instruction.round, self.silo.name, model, split),
                self.watch(network, split),
            )
            found |= {measurement(model, split, key): value for key, value in values.items()}
        return found

    def watch(self, network: SiteNetwork, split: str) -> Watch | None:
        """Return what the method itself measures on ``split``; None: nothing.

        An evidential network is asked for its vacuity, and at the end, of enough test samples, for
        how its accuracy goes with its certainty.
        """
        if not evidences(cast(nn.Module, network)):
            return None
        labels = self.silo.splits()[split].labels
        final = self.request.instruction.phase == EVALUATE and split == "test"
        enough = len(labels) >= self.common.sums_min_count
        return EvidenceWatch(network, labels, final and enough)

    def explain(self, split: str, row: int) -> Explanation:
        """Say why the model that came answers as it does for one sample of this silo.

        An image's is by where a prompted ViT looked, or by a convolutional network's Grad-CAM.

        Raises:
            SettingError: the method explains nothing.
            DataError: the split has no such row.
        """
        if self.silo.features:
            raise SettingError(f"method '{self.common.method}' does not explain its answers")
        chosen = self.silo.splits()[split]
        self.refuse_row(split, row)
        names = self.silo.class_names()
        title = f"{self.silo.name}, {split} row {row}: truth {names[int(chosen.labels[row])]}"
        network = self.open_network()
        if self.common.network != "vit":
            from client_app.explain.gradcam import explain_by_grad_cam

            return explain_by_grad_cam(network, chosen, self.compute, row, title, names)
        from client_app.explain.attention import explain_by_attention

        vit = cast("PromptedViT", network)
        return explain_by_attention(vit, chosen, self.compute, row, title, names)

    def refuse_row(self, split: str, row: int) -> None:
        """Refuse a row that ``split`` does not have, by a ``DataError``."""
        count = len(self.silo.splits()[split])
        if not 0 <= row < count:
            raise DataError(
                f"site {self.silo.name} has {count} {split} rows, counted from 0: there is no row "
                f"{row}"
            )

    def reply(
        self, metrics: dict[str, float], arrays: dict[str, Tensor] | None = None
    ) -> RecordDict:
        """Pack a reply; ``seconds`` is the time since the message was opened.

        This is the one way out of a site: no array leaves but by ``protect``.
        """
        leaving, counted = protect(self, arrays or {})
        record = MetricRecord(
            {
                **metrics,
                **counted,
                NUM_EXAMPLES: len(self.silo.train),
                SECONDS: time.perf_counter() - self.started,
                PEAK_MEMORY: peak_memory_bytes(),
                KEPT_STATE: int(self.kept_state),
            }
        )
        records = RecordDict({METRICS: record})
        if leaving:
            records[ARRAYS] = ArrayRecord(
                {
                    name: Array(tensor.detach().float().cpu().contiguous().numpy())
                    for name, tensor in sorted(leaving.items())
                }
            )
        return records

    def dp_reference(self) -> dict[str, Tensor]:
        """Return what clipping measures the outgoing arrays from, by name: all that came."""
        return self.request.arrays()

    def presentable(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return noised arrays in the form that the server checks; it may see nothing but them."""
        return arrays


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held: on the GPU if it used one, else RSS."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
