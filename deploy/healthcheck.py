"""The image's HEALTHCHECK: exit 0 when the worker's /healthz answers 200, else 1 with the reason on standard output.

No part of kp-worker is imported: this runs every few seconds. Not urllib, which would ask a configured proxy.
"""

import http.client
import os
import sys
import tomllib
from pathlib import Path

TIMEOUT_SECONDS = 4
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def settings() -> tuple[str, str]:
    """Return the worker's host and port: from variables, else from the config file, else the defaults."""
    path = os.environ.get("KP_CONFIG")
    file = tomllib.loads(Path(path).read_text("utf-8")) if path else {}
    host = os.environ.get("KP_HTTP_HOST") or file.get("http_host") or "0.0.0.0"  # noqa: S104 the setting's default
    return str(host), str(os.environ.get("KP_HTTP_PORT") or file.get("http_port", 9108))


def main() -> str | None:
    """Return None when the worker is healthy, else what is wrong."""
    try:
        host, port = settings()
    except (OSError, ValueError) as error:
        return f"KP_CONFIG cannot be read: {error}"
    if not port.isdigit() or port == "0":
        return f"KP_HTTP_PORT={port} is no fixed port: a health check needs one"
    address = EVERY_ADDRESS.get(host, host)
    connection = http.client.HTTPConnection(address, int(port), timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        body = answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"http://{address}:{port}/healthz does not answer: {error or type(error).__name__}"
    return None if answer.status == 200 else f"/healthz answered {answer.status}: {body}"


if __name__ == "__main__":
    problem = main()
    print(problem or "ok")
    sys.exit(problem is not None)
