#!/bin/sh
# Checks docs/opentelemetry.md with a real OpenTelemetry Collector on real Kafka: built once with Go, some ten minutes.
set -eu
cd "$(dirname "$0")/../.."

version=0.165.0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kp-worker/collector
COLLECTOR=${COLLECTOR:-$cache/otelcol-$version-$(cksum <deploy/checks/collector/builder.yaml | cut -d' ' -f1)}
export COLLECTOR

if ! [ -x "$COLLECTOR" ]; then
    command -v go >/dev/null || {
        echo "collector.sh: building the Collector needs Go (https://go.dev/doc/install)" >&2
        exit 1
    }
    echo "building the Collector $version (once, some ten minutes)" >&2
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    GOBIN=$work go install "go.opentelemetry.io/collector/cmd/builder@v$version"
    sed "s|^dist:|&\n  output_path: $work/built|" deploy/checks/collector/builder.yaml >"$work/builder.yaml"
    "$work/builder" --config "$work/builder.yaml"
    mv "$work/built/otelcol" "$COLLECTOR"
fi

"${PYTHON:-.venv/bin/python}" -m pytest -n0 tests/runs/check_collector.py "$@"
