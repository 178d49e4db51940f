"""``fedsilo finetune``: a run's model on a new task, compared with the same network from scratch.

All networks are trained on the pooled training images of the sites on this machine. Validation
images choose the epoch; test images are read once, for the metrics of that epoch.
"""

import math
from collections.abc import Callable, Sequence

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.datasets.io.atomic_files import build_folder
from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.studies.finetune.request import SEGMENTATION, FinetuneRequest
from fedsilo.server_app.studies.finetune.results import FinetuneResult, StartResult, write_results
from fedsilo.server_app.studies.finetune.settings import network_of, settings_of
from fedsilo.server_app.studies.finetune.tasks import Downstream, Segmentation, chosen_sites
from fedsilo.server_app.studies.finetune.training import Study, start, train
from fedsilo.server_app.studies.finetune.weights import SCRATCH, RunModel, Source, open_start

Say = Callable[[str], None]


def finetune(request: FinetuneRequest, say: Say) -> FinetuneResult:
    """Train each start over the seeds and write the folder; ``say`` gets each line of progress.

    Raises:
        FedsiloError: a run has not ended or does not fit, settings or data cannot be used, the
            folder exists already, or training diverged; then nothing is written.
    """
    request.check()
    sources = [open_start(weights, request) for weights in request.weights]
    study = _study(request, [source for source in sources if source])
    sizes = ", ".join(f"{count} {name}" for name, count in study.data.sizes().items())
    say(f"{study.settings.dataset}, {', '.join(study.data.sites)}: {sizes} images")
    starts = tuple(_train_start(study, source, say) for source in sources)
    build_folder(request.out, lambda folder: write_results(folder, study, starts, request.images))
    return FinetuneResult(study, starts)


def _study(request: FinetuneRequest, sources: Sequence[Source]) -> Study:
    """Return network, settings and data of all starts; ``sources`` are those not from scratch."""
    labels = [source.label for source in sources]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise SettingError(
            f"two of --weights are named '{twice[0]}': rename the folder of one, so that their "
            "lines can be distinguished"
        )
    network = network_of(request.task, request.network, sources, distil=request.distil_epochs > 0)
    run_models = [source for source in sources if isinstance(source, RunModel)]
    settings = settings_of(request, network, run_models)
    downstream = (Segmentation if request.task == SEGMENTATION else Downstream)(network)
    data = downstream.data(settings, chosen_sites(settings, request.sites))
    compute = choose_compute(settings.device, settings.precision, settings.threads)
    return Study(
        downstream, settings, data, compute, request.seeds, request.epochs, request.distil_epochs
    )


def _train_start(study: Study, source: Source | None, say: Say) -> StartResult:
    """Train one start over the seeds."""
    label, headline = source.label if source else SCRATCH, study.downstream.headline
    transfer, trained = None, []
    for seed in range(study.seeds):
        network, transfer = start(study, source, seed)
        if transfer and seed == 0:
            say(f"{label}: {transfer.summary()}")
        result = train(study, network, seed)
        trained.append(result)
        value = result.val.get(headline, math.nan)
        say(
            f"{label}, seed {seed}: epoch {result.epoch} of {study.epochs} is best, "
            f"validation {headline} {value:.3f}; {result.seconds:.0f} s"
        )
    method = source.method if isinstance(source, RunModel) else ""
    return StartResult(label, method, transfer, tuple(trained))
