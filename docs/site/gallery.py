"""Run the commands of docs/gallery.md in order, in one folder, and make its pictures again.

A picture's title is the file that the commands above it have written: it is scaled down to
``WIDTH`` pixels and stored with few colours, so that each takes less than 100 kB.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
WIDTH, COLOURS = 1100, 64
_STEP = re.compile(r"^```sh\n(.*?)^```|!\[[^]]*\]\(img/(\S+) \"(\S+)\"\)", re.MULTILINE | re.DOTALL)


def main(page: Path) -> None:
    """Run the page's commands; write its pictures into ``img`` beside it."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-gallery-") as folder:
        command = f'fedsilo() {{ "{sys.executable}" -m fedsilo.cli "$@"; }}; set -e\n'
        for block, picture, made in _STEP.findall(page.read_text(encoding="utf-8")):
            if block:
                where = {**os.environ, "PYTHONPATH": str(ROOT)}
                subprocess.run(["bash", "-c", command + block], cwd=folder, env=where, check=True)
            else:
                shrink(Path(folder, made), page.parent / "img" / picture)


def shrink(made: Path, target: Path, colours: int = COLOURS) -> None:
    """Write a picture again as a PNG, at most ``WIDTH`` pixels wide and with few colours."""
    with Image.open(made) as image:
        smaller = image.convert("RGB")
        smaller.thumbnail((WIDTH, 3 * WIDTH), Image.Resampling.LANCZOS)
        smaller.quantize(colours).save(target, optimize=True)


if __name__ == "__main__":
    main(ROOT / "docs" / "gallery.md")
