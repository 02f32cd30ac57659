"""The image's HEALTHCHECK: exit 0 when the worker's /healthz answers 200, else 1 with the reason on standard output.

No part of kp-worker is imported: this runs every few seconds. Not urllib, which would ask a configured proxy.
"""

import http.client
import os
import sys

HOST = os.environ.get("KP_HTTP_HOST") or "0.0.0.0"  # noqa: S104 the default of the setting
PORT = os.environ.get("KP_HTTP_PORT") or "9108"
TIMEOUT_SECONDS = 4
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def main() -> str | None:
    """Return None when the worker is healthy, else what is wrong."""
    if not PORT.isdigit() or PORT == "0":
        return f"KP_HTTP_PORT={PORT} is no fixed port: a health check needs one"
    address = EVERY_ADDRESS.get(HOST, HOST)
    connection = http.client.HTTPConnection(address, int(PORT), timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        body = answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"http://{address}:{PORT}/healthz does not answer: {error or type(error).__name__}"
    return None if answer.status == 200 else f"/healthz answered {answer.status}: {body}"


if __name__ == "__main__":
    problem = main()
    print(problem or "ok")
    sys.exit(problem is not None)
