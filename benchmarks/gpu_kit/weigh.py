"""Print what travels beside the limit of 64 MiB: python benchmarks/gpu_kit/weigh.py FOLDER...

The working tree travels with all that git does not ignore, and the ignored folders that are named.
Exit code 1 if that is too much.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT = 64  # MiB


def files_of_tree() -> list[Path]:
    """Return the files here that git has or does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, capture_output=True, check=True)
    paths = {Path(name) for name in done.stdout.decode().split("\0") if name}
    return [path for path in paths if path.is_file()]


def archived_size(files: Sequence[Path]) -> int:
    """Return the bytes of files in an archive, each with a header and in whole blocks of 512."""
    return sum(512 + (os.path.getsize(file) + 511) // 512 * 512 for file in files)


def main() -> int:
    """Print a line for the tree and each folder; return 1 if they are too much, otherwise 0."""
    parts = {"the tree": files_of_tree()}
    for folder in sys.argv[1:]:
        parts[folder] = [path for path in Path(folder).rglob("*") if path.is_file()]
    total = 0.0
    for name, files in parts.items():
        size = archived_size(files) / 2**20
        total += size
        print(f"{size:8.1f} MiB  {len(files):5} files  {name}")
    print(f"{total:8.1f} MiB in all; the limit is {LIMIT} MiB")
    if total > LIMIT:
        print("this is too much: remove what git neither has nor ignores", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
