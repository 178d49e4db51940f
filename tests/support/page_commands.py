"""The commands of a page's shell blocks, as a shell reads them: variables, loops, quotes."""

import re
import shutil
import subprocess
from pathlib import Path

_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# No command is found, so that each comes here: it is written down and not executed
_RECORDER = """
command_not_found_handle() {{ printf '%s\\0' "$@" >> {found}; printf '\\n\\0' >> {found}; }}
PATH=/nowhere
cd {folder}
{script}
"""


def blocks(page: Path) -> list[str]:
    """Return a page's shell blocks."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(page: Path, folder: Path) -> list[list[str]]:
    """Return the words of every command of a page, in order; ``~`` is ``folder``.

    A command whose name has a slash, such as ``docker/register.sh``, is no command of ours and is
    left out, and so is what only a shell does, such as ``export``.
    """
    found = folder / ".found"
    found.unlink(missing_ok=True)
    script = "\n".join(blocks(page))
    subprocess.run(
        [shutil.which("bash") or "bash", "-c", _RECORDER.format(**locals())],
        env={"HOME": str(folder), "IFS": " \t\n"},
        capture_output=True,
        check=False,
    )
    text = found.read_text(encoding="utf-8") if found.is_file() else ""
    found.unlink(missing_ok=True)
    return [line.removesuffix("\0").split("\0") for line in text.split("\n\0") if line]
