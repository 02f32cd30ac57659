"""The worker's version, as it stands in outputs, dead letters and metrics; and how to install the rest of it."""

__version__ = "0.3.0"


def version_with_commit() -> str:
    """Return the version, with the commit if this is a checkout: what stands in it may be later than the release."""
    import subprocess
    from pathlib import Path

    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return __version__
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603 fixed words
    except (OSError, subprocess.SubprocessError):  # no git
        return __version__
    return f"{__version__} (commit {done.stdout.strip()} of a checkout)"


def install_extra(name: str) -> str:
    """Return how to install an extra, for an error; kp-worker is on no index, so it names a checkout and the wheel."""
    wheel = f"kp_worker-{__version__}-py3-none-any.whl"
    return (
        f"install the {name} extra (pip install '.[{name}]' from a checkout, or pip install '{wheel}[{name}]' from the "
        "wheel)"
    )
