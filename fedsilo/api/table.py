"""The table of commands: the function and the example of each.

The command line and ``import fedsilo`` offer what this table lists. The module of a function is
imported only when the function is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, cast

from fedsilo.core.settings import removed


@dataclass(frozen=True)
class Command:
    """A command: its function as ``module:function``, and an example of its arguments.

    ``plan`` is the function that yields the lines of ``--dry-run``; empty without this option.
    """

    function: str
    example: str
    plan: str = ""

    def load(self) -> Callable[..., Any]:
        """Import the module of the function, and return the function."""
        return cast(Callable[..., Any], resolve_name(self.function))


# Panel of the help -> its commands; a command of two words is in the group of its first word
COMMANDS: Mapping[str, Mapping[str, Command]] = {
    "Run": {
        "new": Command("fedsilo.api.running:new", "new trial"),
        "simulate": Command(
            "fedsilo.api.running:simulate",
            "simulate uefl-digits --engine inline --set rounds=5",
            plan="fedsilo.api.running:plan_simulation",
        ),
        "resume": Command("fedsilo.api.running:resume", "resume runs/uefl-digits"),
        "watch": Command("fedsilo.api.running:watch", "watch runs/uefl-digits"),
        "fit": Command(
            "fedsilo.api.running:fit",
            "fit logistic --dataset heart-synthetic --columns age,sex,cp,thalach",
        ),
        "pretrain": Command(
            "fedsilo.api.running:pretrain", "pretrain fedavg-skin --set data.dir=data"
        ),
    },
    "Compare": {
        "compare": Command(
            "fedsilo.api.comparing:compare",
            "compare fedavg-heart local-heart --seeds 3 --markdown table.md",
            plan="fedsilo.api.comparing:plan_comparison",
        ),
        "tune": Command("fedsilo.api.comparing:tune", "tune local-heart --trials 4"),
        "crossvalidate": Command(
            "fedsilo.api.comparing:crossvalidate",
            "crossvalidate picsr-heart fedavg-heart --folds 5 --repeats 5",
        ),
    },
    "Look at finished runs": {
        "runs": Command("fedsilo.api.running:runs", "runs --method mix --state failed --delete"),
        "plot": Command("fedsilo.api.drawing:plot", "plot runs/uefl-digits"),
        "attention": Command(
            "fedsilo.api.drawing:attention",
            "attention runs/skin --site rosendahl --images 3",
        ),
        "overlays": Command("fedsilo.api.drawing:overlays", "overlays runs/vessels --site north"),
        "histograms": Command(
            "fedsilo.api.drawing:histograms",
            "histograms runs/mammograms --split train",
        ),
        "embeddings": Command(
            "fedsilo.api.drawing:embeddings",
            "embeddings runs/fedavg runs/moon --limit 200",
        ),
        "gradcam": Command(
            "fedsilo.api.drawing:gradcam",
            "gradcam runs/fedavg --site s1a --rows 0,3,7",
        ),
        "report": Command(
            "fedsilo.api.drawing:report",
            "report runs/heart --for clinic --out heart.html",
        ),
    },
    "Use a model": {
        "explain": Command(
            "fedsilo.api.drawing:explain",
            "explain runs/hearts --site va --row 0",
        ),
        "finetune": Command(
            "fedsilo.api.applying:finetune",
            "finetune --task classification --weights runs/fedefm --weights scratch --out tuned",
        ),
        "predict": Command(
            "fedsilo.api.applying:predict",
            "predict runs/skin --images new --out new.csv",
        ),
        "calibrate": Command(
            "fedsilo.api.applying:calibrate",
            "calibrate runs/heart --site va --coverage 0.9",
        ),
        "monitor": Command(
            "fedsilo.api.applying:monitor",
            "monitor runs/heart --data new.csv --site va --out monitor.html",
        ),
        "export": Command(
            "fedsilo.api.applying:export",
            "export runs/heart --format pt2 --out heart-model",
        ),
        "card": Command("fedsilo.api.applying:card", "card runs/heart"),
    },
    "Deploy": {
        "deploy up": Command("fedsilo.api.deploying:up", "deploy up --sites 6"),
        "deploy add": Command("fedsilo.api.deploying:add", "deploy add north south"),
        "deploy renew": Command("fedsilo.api.deploying:renew", "deploy renew north"),
        "deploy revoke": Command("fedsilo.api.deploying:revoke", "deploy revoke north"),
        "hospital start": Command(
            "fedsilo.api.hospital:start",
            "hospital start north.zip --trust sums --data-dir /data",
        ),
        "hospital counts": Command(
            "fedsilo.api.hospital:counts", "hospital counts --kit north --draw-again"
        ),
        "hospital keys": Command(
            "fedsilo.api.hospital:keys", "hospital keys north --compared south"
        ),
        "audit": Command("fedsilo.api.hospital:audit", "audit audit.jsonl --since 2026-03-03"),
        "deploy status": Command("fedsilo.api.deploying:status", "deploy status"),
        "deploy logs": Command("fedsilo.api.deploying:logs", "deploy logs s1a --lines 100"),
        "deploy run": Command(
            "fedsilo.api.deploying:run",
            "deploy run uefl-digits --set split.silos=6 --set rounds=3 --set "
            "uefl.iteration-rounds=1",
            plan="fedsilo.api.deploying:plan_deployed_run",
        ),
        "deploy down": Command("fedsilo.api.deploying:down", "deploy down"),
        "deploy service": Command(
            "fedsilo.api.deploying:service", "deploy service --deployment /srv/hearts --install"
        ),
        "hospital service": Command(
            "fedsilo.api.hospital:service", "hospital service north --data-dir /data --install"
        ),
        "deploy backup": Command(
            "fedsilo.api.deploying:backup", "deploy backup monday.backup --passphrase-file secret"
        ),
        "deploy restore": Command(
            "fedsilo.api.deploying:restore", "deploy restore monday.backup --deployment new"
        ),
        "doctor site": Command(
            "fedsilo.api.checking:site",
            "doctor site picsr-heart --deployment hearts --site va",
        ),
        "doctor server": Command(
            "fedsilo.api.checking:server", "doctor server --deployment hearts"
        ),
        "doctor run": Command("fedsilo.api.checking:run", "doctor run uefl-digits --set rounds=3"),
    },
    "Data and settings": {
        "privacy plan": Command(
            "fedsilo.api.privacy:plan",
            "privacy plan fedavg-heart --samples 199 --samples 30 --epsilon 1",
        ),
        "fetch": Command("fedsilo.api.listing:fetch", "fetch heart --data-dir data"),
        "datasets": Command("fedsilo.api.listing:datasets", "datasets --data-dir data"),
        "manifest": Command("fedsilo.api.listing:manifest", "manifest folder data/skin"),
        "survey": Command("fedsilo.api.listing:survey", "survey fedavg-heart --set data.dir=data"),
        "settings": Command("fedsilo.api.listing:settings", "settings"),
        "experiments": Command("fedsilo.api.listing:experiments", "experiments"),
        "methods": Command("fedsilo.api.listing:methods", "methods"),
    },
}

# A command of two words is listed under its first
GROUPS: Mapping[str, str] = {
    "deploy": "Run a server and hospitals as processes, with TLS",
    "doctor": "Find what prevents a run, and how to fix it",
    "hospital": "Run a hospital's node from its kit",
    "privacy": "Plan differential privacy before a run",
}

# Names in ``fedsilo`` that are not commands, then commands that have another name there
_OTHERS = {
    "FedsiloError": "fedsilo.core.errors:FedsiloError",
    "Run": "fedsilo.runs.finished_run:FinishedRun",
    "__version__": "fedsilo.core.versions:FEDSILO",
    "load_run": "fedsilo.runs.finished_run:load_run",
}
# Because ``fedsilo.datasets`` and ``fedsilo.runs`` are packages
RENAMED = {"datasets": "list_datasets", "runs": "list_runs"}


def public_names() -> dict[str, str]:
    """Map each name that ``import fedsilo`` offers to the ``module:name`` that defines it.

    A command's name has underscores in place of spaces: 'deploy up' is ``deploy_up``. Two commands
    have the names in ``RENAMED`` instead, because packages have their usual names: 'runs' is
    ``list_runs``, and 'datasets' is ``list_datasets``.
    """
    names = dict(_OTHERS)
    for commands in COMMANDS.values():
        for name, command in commands.items():
            names[RENAMED.get(name, name.replace(" ", "_"))] = command.function
    return names


def find_public(name: str) -> Any:
    """Import and return the function or value that ``fedsilo`` offers under ``name``.

    Raises:
        AttributeError: the name is unknown. If a command of this name was removed or renamed, the
            message names its replacement.
    """
    names = public_names()
    if name in names:
        return resolve_name(names[name])
    instead = ""
    if name in removed.COMMANDS:
        instead = f": {removed.COMMANDS[name]}"
    if name in RENAMED:
        instead = f": the function is 'fedsilo.{RENAMED[name]}'"
    raise AttributeError(f"module 'fedsilo' has no attribute '{name}'{instead}")
