"""Cross-silo federated learning for hospitals, as one package.

In an installed fedsilo the five folders are next to this file. In a checkout they are at the top of
the repository, one level up, which this file adds to where the package is looked for. It does so
first and at once: a thread that imports a part of a package does not wait for another one's import.
"""

import os.path

if not os.path.isdir(f"{__path__[0]}/server_app"):
    __path__.append(os.path.dirname(__path__[0]))
