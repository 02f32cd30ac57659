"""The product's image, built with a Docker engine from deploy/Dockerfile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.runs.engine.base import PYTHON_NAME
from tests.runs.engine.docker import DockerEngine
from tests.support.surroundings import ROOT
from worker.version import __version__

IMAGE: Final = f"kp-worker:{__version__}"


def build_image(engine: DockerEngine, tag: str = IMAGE, arguments: Mapping[str, str] | None = None) -> str:
    """Build the image, with build arguments; return the base image's name. Raises EngineError."""
    if "BASE" not in (arguments or {}):
        engine.python_base()
    options = [f"--build-arg={name}={value}" for name, value in (arguments or {}).items()]
    engine.show("build", *options, "--file", "deploy/Dockerfile", "--tag", tag, ".", cwd=ROOT)
    return (arguments or {}).get("BASE", PYTHON_NAME)
