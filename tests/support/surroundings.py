"""Where the tests run: the repository's folders, and an environment without the developer's settings."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
DOCS = ROOT / "docs"
SCHEMAS = ROOT / "schemas"


def environment(**settings: str) -> dict[str, str]:
    """Return the environment of a process of the worker: these settings, and no other KP_ variable."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KP_")} | settings
