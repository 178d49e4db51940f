# ruff: noqa: F401
"""The commands of ``fedsilo`` as functions, with the same arguments, results and errors.

    from fedsilo.server_app.api import compare, load_run, simulate

    run = simulate("fedavg-digits", settings={"rounds": 5}, seed=1)
    run.metrics.query("split == 'test' and metric == 'accuracy'")

Every error is a ``fedsilo.models.contract.errors.FedsiloError`` of one line. The commands
``fedsilo deploy``, ``fedsilo doctor``, ``fedsilo hospital`` and ``fedsilo privacy`` are the
functions of ``deploying``, ``checking``, ``hospital`` and ``privacy``.
"""

from fedsilo.server_app.api import checking, deploying, hospital, privacy
from fedsilo.server_app.api.listing import (
    datasets,
    experiments,
    fetch,
    manifest,
    methods,
    settings,
    survey,
)
from fedsilo.server_app.api.running import new, pretrain, resume, simulate, watch
from fedsilo.server_app.studies.api.applying import (
    calibrate,
    card,
    export,
    finetune,
    monitor,
    predict,
)
from fedsilo.server_app.studies.api.comparing import (
    compare,
    crossvalidate,
    tune,
)
from fedsilo.server_app.studies.api.drawing import (
    attention,
    embeddings,
    explain,
    gradcam,
    histograms,
    plot,
    report,
)
from fedsilo.server_app.studies.finished_run import FinishedRun, load_run

Run = FinishedRun  # its name until 0.1


def __getattr__(name: str) -> object:
    """Raise an AttributeError that names the replacement of a removed function."""
    from fedsilo.models.contract.removed import COMMANDS

    instead = f": {COMMANDS[name]}" if name in COMMANDS else ""
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'{instead}")
