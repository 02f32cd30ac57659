"""kafka-consumer-groups.sh on one group."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.kafka_tools import write_scripts


class GroupTool:
    """Kafka's own tool, as the pages use it."""

    def __init__(self, bootstrap: str, group: str, directory: Path) -> None:
        directory.mkdir(parents=True)
        write_scripts(directory)
        script = directory / "kafka-consumer-groups.sh"
        self._command = [str(script), "--bootstrap-server", bootstrap, "--group", group]

    def run(self, *options: str) -> None:
        """Run it. Raises AssertionError with its output where it fails."""
        done = subprocess.run([*self._command, *options], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
