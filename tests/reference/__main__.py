"""How far each method is from its reference: python -m tests.reference CSV."""

import csv
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.reference.cases import CASES
from tests.reference.harness import deviation


def main(path: Path) -> None:
    """Compare all cases, print a line each, and write them to the CSV file ``path``."""
    rows = []
    for case in CASES:
        with TemporaryDirectory() as folder:
            largest = deviation(case, Path(folder))
        settings = " ".join(f"{key}={value}" for key, value in case.settings.items())
        rows.append([case.title, f"{largest:.1e}", settings])
        print(f"{case.title:24} {largest:.1e}  {settings}", flush=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "largest-relative-deviation", "settings"])
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
