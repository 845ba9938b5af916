"""`python -m cbserve`: works before anything is installed, on the standard library alone."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        "cbserve needs Python 3.11 to 3.13, this is {}.{} ({}).\n"
        "Call it with another one, for example: python3.12 -m cbserve lab, or make lab PYTHON=python3.12".format(
            *sys.version_info[:2], sys.executable
        )
    )

from cbserve.cli import main  # noqa: E402 - only after the version is known to be able to read it

sys.exit(main())
