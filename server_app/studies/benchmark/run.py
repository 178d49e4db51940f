"""``fedsilo benchmark``: run what is missing of a benchmark, and report the results."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedsilo.models.contract.methods import METHODS
from fedsilo.models.contract.settings_schema import unknown_name
from fedsilo.server_app.config.benchmarks import read_benchmark
from fedsilo.server_app.config.experiments import simulation_file
from fedsilo.server_app.run.arguments import RunSources
from fedsilo.server_app.run.planning import planned
from fedsilo.server_app.studies.benchmark.page import Benchmarked
from fedsilo.server_app.studies.benchmark.rows import Rows
from fedsilo.server_app.studies.benchmark.runs import run_all, unusual


def benchmark(
    section: str,
    sources: RunSources,
    csv: Path,
    *,
    experiments: Sequence[str] = (),
    methods: Sequence[str] = (),
    only_show: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Benchmarked:
    """Run what is missing and return all that has run.

    Args:
        section: of the simulation file.
        sources: settings that override those of each experiment.
        csv: file of the rows, which grows run by run; what it has is not run again.
        experiments: of the benchmark that are run now, or none for all.
        methods: those that are run now, or none for all.
        only_show: whether only what has run is shown.
        tell: is called with a line after each run.

    Raises:
        FedsiloError: a name is unknown, data are missing, or the file has rows of other settings.
    """
    declared = read_benchmark(simulation_file(sources.file), section)
    for what, names, known in (
        ("experiment", experiments, declared.experiments),
        ("method", methods, METHODS),
    ):
        for name in names:
            if name not in known:
                raise unknown_name(what, name, known)
    rows = Rows.read(csv)
    if not only_show:
        chosen = list(experiments or declared.experiments)
        run_all(declared, rows, sources, chosen, list(methods or METHODS), tell)
    settings = {name: planned(name, sources)[0] for name in declared.experiments}
    shown = {n: {"dataset": own.common.dataset, **unusual(own)} for n, own in settings.items()}
    return Benchmarked(section, declared, rows, shown)
