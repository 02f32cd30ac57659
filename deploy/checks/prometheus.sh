#!/usr/bin/env bash
# Checks what Prometheus reads: syntax, the alerts' unit tests, and every query on a real Prometheus with a real worker.
set -euo pipefail
cd "$(dirname "$0")/../.."

for tool in promtool prometheus; do
  command -v "$tool" >/dev/null || {
    echo "deploy/checks/prometheus.sh: $tool is missing: apt-get install --no-install-recommends prometheus," \
      "or put the programs of a Prometheus release on the PATH" >&2
    exit 1
  }
done

promtool check rules deploy/prometheus/rules.yaml
for config in deploy/prometheus/prometheus*.y*ml; do
  [ ! -e "$config" ] || promtool check config --syntax-only "$config" # its paths are those of the container
done
promtool test rules deploy/prometheus/rules.test.yaml
"${PYTHON:-.venv/bin/python}" -m pytest tests/runs/check_prometheus.py
