"""What importing a module loads."""

import subprocess
import sys

from tests.support.surroundings import ROOT

MODEL_RUNTIMES = {
    "huggingface_hub", "onnx", "onnxruntime", "openvino",
    "sentence_transformers", "tokenizers", "torch", "transformers",
}  # fmt: skip


def loaded_after(code: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has loaded after the code."""
    return {name.split(".")[0] for name in modules_after(code)}


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after the code; what it writes to stderr is not read."""
    script = f"import sys\n{code}\nprint()\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    return set(result.stdout.splitlines()[-1].split())
