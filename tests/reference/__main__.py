"""How far each method is from its reference: python -m tests.reference CSV."""

import csv
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.reference.cases import CASES
from tests.reference.harness import compare

# Of the third column: the reference has one of the method's settings a tenth larger
HEADER = ["method", "largest-deviation", "least-with-a-setting-changed", "settings"]


def main(path: Path) -> None:
    """Compare all cases, print a line each, and write them to the CSV file ``path``."""
    rows = []
    for case in CASES:
        with TemporaryDirectory() as folder:
            found = compare(case, Path(folder), also_changed=True)
        settings = " ".join(f"{key}={value}" for key, value in case.settings.items())
        least = ""
        if found.changed:
            least = f"{min(found.changed.values()):.1e}"
        rows.append([case.title, f"{found.deviation:.1e}", least, settings])
        print(f"{case.title:24} {found.deviation:.1e}  {least:7}  {settings}", flush=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
