"""The sdist and the wheel, as `make dist` builds them."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.surroundings import ROOT

UV = [sys.executable, "-m", "uv"]


class Distribution(NamedTuple):
    """The two files."""

    sdist: Path
    wheel: Path


def build_distribution(directory: Path) -> Distribution:
    """Build both below a directory, from a copy of what git tracks: setuptools leaves its folders in the tree."""
    source, built = directory / "source", directory / "dist"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "worker", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ["--no-build-isolation", "--python", sys.executable, "--out-dir", str(built)]
    done = subprocess.run(
        [*UV, "build", *options], cwd=source, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    return Distribution(sdist, wheel)
