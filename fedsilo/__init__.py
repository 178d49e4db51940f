"""Cross-silo federated learning for hospitals, as one package.

In an installed fedsilo the five folders are next to this file. In a checkout they are at the top of
the repository, one level up, which this file adds to where the package is looked for.
"""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "server_app").is_dir() and not Path(__file__).with_name("server_app").is_dir():
    __path__.append(str(_CHECKOUT))
