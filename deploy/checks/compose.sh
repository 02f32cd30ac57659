#!/bin/sh
# Checks docker-compose.yml without an engine: the Compose schema, then loaded as docker compose loads it.
# Needs Python with uv (PYTHON, default python3) and docker compose or Go.
set -eu
cd "$(dirname "$0")/../.."

"${PYTHON:-python3}" -m uv tool run --from check-jsonschema==0.39.0 check-jsonschema \
    --builtin-schema vendor.compose-spec docker-compose.yml

if docker compose version >/dev/null 2>&1; then
    docker compose --profile '*' config --quiet
fi
if command -v go >/dev/null; then
    (cd deploy/checks/compose && go run . ../../../docker-compose.yml)
elif ! docker compose version >/dev/null 2>&1; then
    echo "deploy/checks/compose.sh: needs docker compose or Go: services that are named and not defined were not looked for" >&2
    exit 1
fi
