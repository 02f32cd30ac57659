"""Where the tests run: the repository's folders, an environment without the developer's settings, names of topics."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
DOCS = ROOT / "docs"
SCHEMAS = ROOT / "schemas"


def environment(**settings: str) -> dict[str, str]:
    """Return the environment of a process of the worker: these settings, and no other KP_ variable."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KP_")} | settings


def topic_settings(bootstrap: str, name: str, **settings: str) -> dict[str, str]:
    """Return the settings of a group and its topics, all of them named after one source topic, and further settings."""
    return {
        "KP_BOOTSTRAP_SERVERS": bootstrap,
        "KP_GROUP_ID": name,
        "KP_SOURCE_TOPIC": name,
        "KP_ACCEPTED_TOPIC": f"{name}.accepted",
        "KP_REJECTED_TOPIC": f"{name}.rejected",
        "KP_DEAD_LETTER_TOPIC": f"{name}.dead-letter",
        "KP_CREATE_TOPICS": "true",
        **settings,
    }
