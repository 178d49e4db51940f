"""The version of fedsilo, which ``release/version.py`` writes here and in other files.

It is not in ``core``, because the files of ``core`` must be equal at the server and at a hospital.
So a release that changes none of the compared files works with hospitals of the release before.
Nor is it read from the installed package's metadata, because a Flower bundle has none.
"""

VERSION = "0.1.0"
