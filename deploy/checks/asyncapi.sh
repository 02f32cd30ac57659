#!/bin/sh
# Runs AsyncAPI's own parser over schemas/asyncapi.yaml: no errors, no warnings, all references found.
# Needs node and npm; the parser is fetched once into .cache/deploy-checks.
set -eu
cd "$(dirname "$0")/../.."

PARSER_VERSION=3.6.3

tools=$PWD/.cache/deploy-checks/asyncapi-$PARSER_VERSION
for tool in node npm; do
    command -v "$tool" >/dev/null || {
        echo "asyncapi.sh: $tool is missing: install Node.js 20 or later (https://nodejs.org)" >&2
        exit 1
    }
done
if ! [ -e "$tools/.ready" ]; then
    mkdir -p "$tools"
    npm install --silent --no-audit --no-fund --prefix "$tools" "@asyncapi/parser@$PARSER_VERSION"
    touch "$tools/.ready"
fi
NODE_PATH=$tools/node_modules node deploy/checks/asyncapi.js schemas/asyncapi.yaml
