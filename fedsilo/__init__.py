"""Cross-silo federated learning for hospitals, as one package.

    import fedsilo

    run = fedsilo.simulate("fedavg-digits", settings={"rounds": 5}, seed=1)
    run.metrics.query("split == 'test' and metric == 'accuracy'")

Each command of the command line is a function here, which is imported when it is first used. Every
error is a ``fedsilo.FedsiloError`` of one line.

In an installed fedsilo the five folders are next to this file. In a checkout they are at the top of
the repository, one level up, which this file adds to where the package is looked for. It does so
first and at once: a thread that imports a part of a package does not wait for another one's import.
"""

import os.path
from typing import TYPE_CHECKING

if not os.path.isdir(f"{__path__[0]}/server_app"):
    __path__.append(os.path.dirname(__path__[0]))

# Editors and mypy read these imports; a test compares them with the table of commands
if TYPE_CHECKING:
    from fedsilo.api.applying import (
        calibrate,
        card,
        export,
        finetune,
        monitor,
        predict,
    )
    from fedsilo.api.checking import run as doctor_run
    from fedsilo.api.checking import server as doctor_server
    from fedsilo.api.checking import site as doctor_site
    from fedsilo.api.comparing import compare, crossvalidate, tune
    from fedsilo.api.deploying import add as deploy_add
    from fedsilo.api.deploying import backup as deploy_backup
    from fedsilo.api.deploying import down as deploy_down
    from fedsilo.api.deploying import logs as deploy_logs
    from fedsilo.api.deploying import renew as deploy_renew
    from fedsilo.api.deploying import restore as deploy_restore
    from fedsilo.api.deploying import revoke as deploy_revoke
    from fedsilo.api.deploying import run as deploy_run
    from fedsilo.api.deploying import service as deploy_service
    from fedsilo.api.deploying import status as deploy_status
    from fedsilo.api.deploying import up as deploy_up
    from fedsilo.api.drawing import (
        attention,
        embeddings,
        explain,
        gradcam,
        histograms,
        overlays,
        plot,
        report,
    )
    from fedsilo.api.hospital import audit
    from fedsilo.api.hospital import counts as hospital_counts
    from fedsilo.api.hospital import keys as hospital_keys
    from fedsilo.api.hospital import service as hospital_service
    from fedsilo.api.hospital import start as hospital_start
    from fedsilo.api.listing import datasets as list_datasets
    from fedsilo.api.listing import (
        experiments,
        fetch,
        manifest,
        methods,
        settings,
        survey,
    )
    from fedsilo.api.privacy import plan as privacy_plan
    from fedsilo.api.running import fit, new, pretrain, resume, simulate, watch
    from fedsilo.api.running import runs as list_runs
    from fedsilo.core.errors import FedsiloError
    from fedsilo.runs.finished_run import FinishedRun as Run
    from fedsilo.runs.finished_run import load_run

    __version__: str
else:  # hidden from mypy, which would accept any name

    def __getattr__(name: str) -> object:
        """Import a function when it is first used, so that ``import fedsilo`` stays quick.

        Raises:
            AttributeError: there is no such function; for a removed one the message names its
                replacement.
        """
        from fedsilo.api.table import find_public

        found = find_public(name)
        globals()[name] = found  # so that this function is called once for each name
        return found


__all__ = [
    "FedsiloError",
    "Run",
    "__version__",
    "attention",
    "audit",
    "calibrate",
    "card",
    "compare",
    "crossvalidate",
    "deploy_add",
    "deploy_backup",
    "deploy_down",
    "deploy_logs",
    "deploy_renew",
    "deploy_restore",
    "deploy_revoke",
    "deploy_run",
    "deploy_service",
    "deploy_status",
    "deploy_up",
    "doctor_run",
    "doctor_server",
    "doctor_site",
    "embeddings",
    "experiments",
    "explain",
    "export",
    "fetch",
    "finetune",
    "fit",
    "gradcam",
    "histograms",
    "hospital_counts",
    "hospital_keys",
    "hospital_service",
    "hospital_start",
    "list_datasets",
    "list_runs",
    "load_run",
    "manifest",
    "methods",
    "monitor",
    "new",
    "overlays",
    "plot",
    "predict",
    "pretrain",
    "privacy_plan",
    "report",
    "resume",
    "settings",
    "simulate",
    "survey",
    "tune",
    "watch",
]


def __dir__() -> list[str]:
    """List the functions, for the completion of a shell or a notebook."""
    return sorted({*globals(), *__all__})
