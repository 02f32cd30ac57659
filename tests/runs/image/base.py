"""A stand-in for the image's base, made of this machine's Debian where no container registry can be reached."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.runs.image.errors import EngineError, attempt, call
from worker.lab.broker.kafka_jars import default_cache

PYTHON_NAME: Final = "python:3.12-slim"
"""The base image that deploy/Dockerfile names."""
CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"
PYTHON_CONFIG: Final = (f"ENV SSL_CERT_FILE={CERTIFICATES}", f"ENV PIP_CERT={CERTIFICATES}", 'CMD ["python3"]')
"""The stand-in's Dockerfile instructions: whoever builds behind a CA of their own has it in that file."""

_LIBRARIES: Final = (
    *("ca-certificates", "libbz2-1.0", "libexpat1", "libffi8"),
    *("liblzma5", "libsqlite3-0", "libssl3", "libuuid1", "zlib1g"),
)
_LEFT_OUT: Final = ("*/site-packages/*", "__pycache__", "*.a", "test", "idlelib", "config-3.12-*")
_DEBIAN_LEFT_OUT: Final = (
    *("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log"),
    *("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale"),
)
"""What the slim images of Debian leave out as well."""


def python_base() -> Path:
    """Return the cached tarball of a stand-in for python:3.12-slim: Debian, with a Python 3.12 of this machine.

    It is for `docker import`. Raises EngineError that says what is missing.
    """
    release = _release()
    target = default_cache() / "bases" / f"python-3.12-{release}.tar"
    if target.exists():
        return target
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise EngineError(
            f"{PYTHON_NAME} cannot be pulled; a stand-in is made as root with debootstrap: apt-get install "
            "debootstrap, or load the image into the engine"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"making a stand-in for {PYTHON_NAME} from this machine's Debian, once: some minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="kp-base-", ignore_cleanup_errors=True) as directory:
        root = Path(directory) / "root"
        try:
            call(["nice", "debootstrap", "--variant=minbase", f"--include={','.join(_LIBRARIES)}", release, root])
            _slim(root)
            shutil.copy(CERTIFICATES, root / CERTIFICATES[1:])
            _add_python(root)
            fresh = target.with_name(f".{target.name}.{os.getpid()}")
            call(["tar", "-C", root, "--numeric-owner", "--one-file-system", "-cf", fresh, "."])
            fresh.replace(target)
        finally:
            _unmount(root)
    return target


def _release() -> str:
    lines = Path("/etc/os-release").read_text().splitlines() if Path("/etc/os-release").exists() else []
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    name = values.get("VERSION_CODENAME", "").strip('"')
    if not name or shutil.which("apt-get") is None:
        raise EngineError(f"the stand-in for {PYTHON_NAME} is made from Debian or Ubuntu, and this machine has neither")
    return name


def _slim(root: Path) -> None:
    for name in _DEBIAN_LEFT_OUT:
        directory = root / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)


def _unmount(root: Path) -> None:
    """debootstrap unmounts what it mounted, unless it was interrupted."""
    for name in ("proc", "sys", "dev/pts", "dev"):
        attempt(["umount", "--lazy", root / name])


def _add_python(root: Path) -> None:
    """Copy a Python 3.12 of this machine to /usr/local, with pip: as in the official image."""
    python = _python_312()
    prefix = Path(call([python, "-c", "import sys; print(sys.base_prefix)"]).stdout.strip())
    left_out = [f"--exclude={it}" for it in _LEFT_OUT]
    names = ["bin", "lib/libpython3.12.so.1.0", "lib/python3.12"]
    with subprocess.Popen(["tar", "-C", str(prefix), *left_out, "-cf", "-", *names], stdout=subprocess.PIPE) as packed:
        unpack = ["tar", "-C", str(root / "usr/local"), "--no-same-owner", "-xf", "-"]
        subprocess.run(unpack, stdin=packed.stdout, check=True)
    for other in (root / "usr/local/bin").iterdir():
        if not other.name.startswith(("python3", "pip3", "idle3", "pydoc3")):
            other.unlink()  # what else a Python's prefix has by chance
    call(["chroot", root, "ldconfig"])
    call(["chroot", root, "python3.12", "-m", "ensurepip"])
    for link, target in (("pip", "pip3.12"), ("python", "python3.12"), ("python3", "python3.12")):
        (root / "usr/local/bin" / link).unlink(missing_ok=True)
        (root / "usr/local/bin" / link).symlink_to(target)


def _python_312() -> str:
    """Return a Python 3.12 of this machine, also one of pyenv's that is not the chosen one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [*sorted(pyenv.glob("versions/3.12.*/bin/python3.12")), shutil.which("python3.12")]
    for candidate in filter(None, candidates):
        if attempt([str(candidate), "--version"]).returncode == 0:
            return str(candidate)
    raise EngineError("the stand-in for python:3.12-slim needs a Python 3.12 on this machine, and there is none")
