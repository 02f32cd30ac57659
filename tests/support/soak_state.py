"""What a soak run keeps in its directory, so that the next call continues it.

Belongs here: the file state.json, and the names in the directory. Does not belong here: what a run does (soak.py).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support.figures import Figure


@dataclass
class State:
    """A run over all its sessions. A session ends with the run, or where it was interrupted, even by SIGKILL."""

    directory: Path
    options: dict[str, Any]
    """What must be the same in each session: seed, kind of run, rate."""
    group: str
    minutes: float
    session: int = -1
    seconds: float = 0.0
    """Running time of all sessions."""
    sent: int = 0
    """Traces that the broker acknowledged."""
    done: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    zombies: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Exits of workers that nobody asked for."""
    figures: list[Figure] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, options: dict[str, Any], *, group: str, minutes: float) -> Self:
        """Return the state of a directory, a new one where it has none. Raises ValueError for other options."""
        path = directory / "state.json"
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            return cls(directory, options, group, minutes)
        kept = json.loads(path.read_text())
        if options["seed"] is None:
            options = {**options, "seed": kept["options"]["seed"]}
        if kept["options"] != options:
            raise ValueError(
                f"{path} is of a run with {kept['options']}: repeat its options, or take another directory"
            )
        state = cls(directory, options, kept["group"], minutes)
        for name in ("session", "seconds", "sent", "zombies", "exits"):
            setattr(state, name, kept[name])
        state.done, state.hostile = Counter(kept["done"]), Counter(kept["hostile"])
        state.figures = [Figure(**figure) for figure in kept["figures"]]
        return state

    @property
    def seed(self) -> int:
        """Return the seed of this session: each session sends traces of its own."""
        return int(self.options["seed"]) + 1000 * self.session

    @property
    def logs(self) -> Path:
        """Return the directory of the workers' logs."""
        return self.directory / "logs"

    @property
    def data(self) -> Path:
        """Return the directory of the broker's data."""
        return self.directory / "kafka"

    def save(self) -> None:
        """Write state.json in one step."""
        kept = {name: value for name, value in vars(self).items() if name not in ("directory", "figures")}
        kept["figures"] = [asdict(figure) for figure in self.figures]
        part = self.directory / "state.json.part"
        part.write_text(json.dumps(kept, indent=1))
        part.replace(self.directory / "state.json")
