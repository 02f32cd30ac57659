"""The worker's version, as it stands in outputs, dead letters and metrics; and how to install the rest of it."""

__version__ = "0.2.0"


def install_extra(name: str) -> str:
    """Return how to install an extra, for an error; kp-worker is on no index, so it names a checkout and the wheel."""
    wheel = f"kp_worker-{__version__}-py3-none-any.whl"
    return (
        f"install the {name} extra (pip install '.[{name}]' from a checkout, or pip install '{wheel}[{name}]' from the "
        "wheel)"
    )
