"""Every method on several settings, with equal tuning, ranked, and the page of the results.

    python -m benchmarks.ranking --csv benchmark.csv --page benchmark.md

What the CSV file has is not run again. Without experiments or methods all are run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ranking.runs import benchmark
from fedsilo.cli.printing import line, print_result
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import FedsiloError, error_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the page, and print ranks and what is missing."""
    given = _parser().parse_args(arguments)
    sources = RunSources(file=given.file, changes=tuple(given.set))
    methods = [name for names in given.methods for name in names.split(",")]
    try:
        found = benchmark(
            given.section,
            sources,
            given.csv,
            experiments=given.experiments,
            methods=methods,
            only_show=given.show_only,
            tell=line,
        )
        found.write(given.page, given.readme)
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    print_result(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.ranking", description=__doc__)
    parser.add_argument("experiments", nargs="*", help="some of the section's experiments")
    parser.add_argument("--methods", action="append", default=[], help="some methods: M,...")
    parser.add_argument("--section", default="benchmark", help="section of the file")
    parser.add_argument("--csv", type=Path, default=Path("benchmark.csv"), help="file of all runs")
    parser.add_argument("--show-only", action="store_true", help="run nothing, show what has run")
    parser.add_argument("--page", type=Path, help="also write a page, with pictures next to it")
    parser.add_argument("--readme", type=Path, help="also put the ranks into its table of methods")
    parser.add_argument("--file", type=Path, help="the file to read in place of ranking.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
