#!/bin/sh
# Prints the path of helm and the directory of the CRDs of KEDA and the Prometheus operator, one a line.
# What is missing is built or fetched once, with Go, into the user's cache directory. PYTHON: default python3.
set -eu

HELM_VERSION=v3.22.0
KEDA=github.com/kedacore/keda/v2@v2.21.0
PROMETHEUS_OPERATOR=github.com/prometheus-operator/prometheus-operator@v0.85.0

cache=${XDG_CACHE_HOME:-$HOME/.cache}/kp-worker/chart-tools
python=${PYTHON:-python3}
mkdir -p "$cache"
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

need_go() {
    command -v go >/dev/null || {
        echo "chart_tools.sh: $1 needs Go (https://go.dev/doc/install); or install $2" >&2
        exit 1
    }
}

if command -v helm >/dev/null; then
    helm=$(command -v helm)
else
    helm=$cache/helm-$HELM_VERSION
    if ! [ -x "$helm" ]; then
        need_go "building helm" "helm 3 (https://helm.sh/docs/intro/install)"
        echo "building helm $HELM_VERSION (once, some minutes)" >&2
        GOBIN=$work go install "helm.sh/helm/v3/cmd/helm@$HELM_VERSION" >&2
        mv "$work/helm" "$helm"
    fi
fi

crds=$cache/crds-$(echo "$KEDA $PROMETHEUS_OPERATOR" | cksum | cut -d' ' -f1)
if ! [ -d "$crds" ]; then
    need_go "fetching the CRDs" "nothing else: there is no other source here"
    mkdir "$work/crds"
    for source in "$KEDA config/crd/bases keda.sh_scaledobjects keda.sh_triggerauthentications" \
        "$PROMETHEUS_OPERATOR example/prometheus-operator-crd monitoring.coreos.com_podmonitors monitoring.coreos.com_prometheusrules"; do
        # shellcheck disable=SC2086 # words on purpose
        set -- $source
        module=$1 folder=$2
        shift 2
        directory=$(cd "$work" && go mod download -json "$module" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["Dir"])') || {
            echo "chart_tools.sh: could not fetch $module" >&2
            exit 1
        }
        for name in "$@"; do
            cp "$directory/$folder/$name.yaml" "$work/crds/"
        done
    done
    mv "$work/crds" "$crds"
fi

echo "$helm"
echo "$crds"
