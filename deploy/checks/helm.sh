#!/bin/sh
# Checks the Helm chart without a cluster: lint, render, schemas of Kubernetes and of the CRDs, values that must be refused.
# Needs Python (PYTHON, default python3, with the worker's requirements) and its uv, and what chart_tools.sh needs.
# What is missing is fetched once, into .cache/deploy-checks and the user's cache directory.
set -eu
cd "$(dirname "$0")/../.."

VALIDATE_VERSION=1.37.0
KUBERNETES=1.27,1.30,1.33,1.36  # the chart's kubeVersion says from which on

chart=deploy/helm/kp-worker
cache=$PWD/.cache/deploy-checks
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$cache"

die() {
    echo "helm.sh: $*" >&2
    exit 1
}

# -- tools

tools=$(PYTHON=$python deploy/checks/chart_tools.sh)
helm=$(echo "$tools" | sed -n 1p)
crds=$(echo "$tools" | sed -n 2p)

validate=$cache/validate-$VALIDATE_VERSION
if ! [ -e "$validate/.ready" ]; then
    "$python" -m uv --version >/dev/null 2>&1 || die "$python has no uv: run through 'make deploy-check'"
    "$python" -m uv venv --quiet --clear --python "$python" "$validate"
    "$python" -m uv pip install --quiet --python "$validate/bin/python" "kubernetes-validate==$VALIDATE_VERSION"
    touch "$validate/.ready"
fi

# -- the package: what an installation gets, the linked rules and dashboard included

"$helm" package "$chart" --destination "$work" >/dev/null 2>"$work/package.log" || die "helm package: $(cat "$work/package.log")"
set -- "$work"/kp-worker-*.tgz
package=$1
tar -xmzf "$package" -C "$work"
cmp "$work/kp-worker/files/rules.yaml" deploy/prometheus/rules.yaml
cmp "$work/kp-worker/files/config.schema.json" schemas/config.schema.json
cmp "$work/kp-worker/files/dashboard.json" deploy/grafana/dashboards/kp-worker.json

# -- lint and render every configuration

render() {
    "$helm" template kp-worker "$package" --namespace scoring --kube-version "${KUBERNETES##*,}" "$@"
}

mkdir "$work/rendered"
for values in "$chart"/ci/*.yaml; do
    name=$(basename "$values" .yaml)
    "$helm" lint --strict --quiet "$package" --values "$values" || die "helm lint --strict with $values"
    render --values "$values" >"$work/rendered/$name.yaml" || die "helm template with $values"
done
"$validate/bin/python" deploy/checks/manifests.py --crds "$crds" --kubernetes "$KUBERNETES" \
    deploy/helm/installer-role.yaml "$work"/rendered/*.yaml

# -- what the schemas cannot see

! grep -l '^kind: Secret$' "$work"/rendered/*.yaml || die "the chart renders a Secret"
names=$("$python" -c 'from worker.config import describe; print("\n".join(["KP_CONFIG", *(name for name, *_ in describe())]))') ||
    die "$python cannot import worker.config: run through 'make deploy-check'"
sed -n 's/^ *- name: \(KP_[A-Z_]*\)$/\1/p' "$work"/rendered/*.yaml | sort -u | while read -r name; do
    echo "$names" | grep -qx "$name" || die "the chart sets $name, which is no setting of the worker"
done

expect() { # FILE LINE...: the rendered file has each line, whatever its indentation
    file=$1
    shift
    for line in "$@"; do
        sed 's/^ *//; s/  #.*//' "$work/rendered/$file.yaml" | grep -qxF -e "$line" || die "$file.yaml renders without: $line"
    done
}
expect minimal 'terminationGracePeriodSeconds: 35' 'automountServiceAccountToken: false' 'readOnlyRootFilesystem: true'
expect sasl-tls 'terminationGracePeriodSeconds: 106' 'value: "5242880"' 'value: "{\"finance\":{\"threshold\":0.9}}"' \
    'value: /etc/kp-worker/sasl/password' 'value: /etc/kp-worker/ca/ca.crt'
expect mtls-keda 'value: /etc/kp-worker/client/tls.key' '- {port: 9093, protocol: TCP}' '- {port: 9094, protocol: TCP}'
expect sasl-keda 'sasl: scram_sha256' 'lagThreshold: "1500000"' 'offsetResetPolicy: earliest'
expect everything '- name: KP_CONFIG' 'value: /etc/kp-worker/config/kp-worker.toml' 'threshold = 0.7' '[profiles.legal]' \
    'configMap: {name: trace-scorer-config}'
expect statefulset '- name: KP_GROUP_INSTANCE_ID' 'value: "90"'
expect contribute 'args: [contribute]' 'value: /etc/kp-worker/registry/registry-key' 'value: "https://registry.example.org:8443"' \
    'secretName: knowledgepulse' '- {port: 8443, protocol: TCP}' \
    'app.kubernetes.io/name: kp-worker-contribute' 'replacement: kp-contribute/kp-worker-contribute' \
    'configMap: {name: kp-worker-config}' 'serviceAccountName: kp-worker'
expect embedder 'value: http' 'value: "https://gateway.example.org:8443/embeddings/v1"' 'mountPath: /etc/kp-worker/embedder' \
    'value: /etc/kp-worker/embedder/api-token' 'secretName: embedding-service' \
    '- {port: 8443, protocol: TCP}'
tokens=$(render --values "$chart/ci/contribute.yaml" --values "$chart/ci/embedder.yaml" | grep -c embedding-service)
[ "$tokens" = 1 ] || die "$tokens pod templates have the embedding service's token, not the worker's alone"
expect assemble 'args: [assemble]' 'value: "otlp_spans,otlp_logs"' 'value: "attribute:service.namespace|general"' \
    'app.kubernetes.io/name: kp-worker-assemble' 'replacement: kp-assemble/kp-worker-assemble' 'value: "30"'
! grep -q 'args: .assemble.' "$work"/rendered/[!a]*.yaml || die "assemble is deployed although it is off"
! grep -q 'args: .contribute.' "$work"/rendered/[!c]*.yaml || die "contribute is deployed although it is off"
! grep -q '^  replicas:' "$work/rendered/mtls-keda.yaml" || die "replicas are set although KEDA owns them"

# -- values that must be refused: words of the message | arguments

refused() {
    words=$1
    shift
    if render --set kafka.bootstrapServers=k:9092 "$@" >"$work/refused" 2>&1; then
        die "not refused: $*"
    fi
    grep -qF -e "$words" "$work/refused" || die "refused without the words '$words': $*: $(cat "$work/refused")"
    refusals=$((refusals + 1))
}
refusals=0
refused "'replica' not allowed" --set replica=3
refused "'bootstrap' not allowed" --set kafka.bootstrap=k:9092
refused "does not match pattern" --set kafka.bootstrapServers=kafka
refused "kafka.bootstrapServers is missing" --set kafka.bootstrapServers=
refused "value must be one of" --set kind=DaemonSet
refused "at '/replicas'" --set replicas=two
refused "value must be one of" --set kafka.securityProtocol=TLS
refused "value must be one of" --set kafka.sasl.mechanism=SCRAM
refused "config.THRESHOLD is no setting" --set config.THRESHOLD=0.8
refused "config.KP_TRESHOLD is no setting" --set config.KP_TRESHOLD=0.8
refused "k:99999 has no port between 1 and 65535" --set kafka.bootstrapServers=k:9092\\,k:99999
refused "contribute.registryUrl: r:0 has no port" --set contribute.enabled=true --set contribute.registryUrl=https://r:0
refused "at '/resources/limits/memory': '1GB'" --set resources.limits.memory=1GB
refused "'mem' not allowed" --set resources.limits.mem=1Gi
refused "at '/image/repository'" --set image.repository=registry.example.com/KP
refused "'persistentVolumeClam' not allowed" --set 'extraVolumes[0].name=m' --set 'extraVolumes[0].persistentVolumeClam.claimName=m'
refused "minProperties: got 1, want 2" --set 'extraVolumes[0].name=m'
refused "missing property 'mountPath'" --set 'extraVolumeMounts[0].name=m'
refused "'secretKeyReff' not allowed" --set 'extraEnv[0].name=A' --set 'extraEnv[0].valueFrom.secretKeyReff.name=s'
refused "'nodeAfinity' not allowed" --set affinity.nodeAfinity.a=b
refused "'efect' not allowed" --set 'tolerations[0].efect=NoSchedule'
refused "'runAsUsers' not allowed" --set podSecurityContext.runAsUsers=1
refused "'readOnlyRoot' not allowed" --set securityContext.readOnlyRoot=true
refused "'namespaceSelecter' not allowed" --set 'networkPolicy.kafkaTo[0].namespaceSelecter.a=b'
refused "use embedder.url" --set config.KP_EMBEDDER_URL=https://e.example.org
refused "embedder.url sets it to http" --set config.KP_EMBEDDER=http
refused "embedder.url sets it to http" --set config.KP_EMBEDDER=none --set embedder.url=https://e.example.org
refused "would not be used without embedder.url" --set embedder.token.existingSecret=token
refused "needs config.KP_MODEL" --set embedder.url=https://e.example.org
refused "both give a token" --set embedder.url=https://e.example.org --set config.KP_MODEL=m \
    --set embedder.token.existingSecret=token --set config.KP_EMBEDDER_TOKEN_FILE=/token
refused "embedder.url: e:0 has no port" --set embedder.url=https://e:0 --set config.KP_MODEL=m
refused "at '/embedder/url'" --set embedder.url=https://user@e.example.org
refused "use kafka.sasl.existingSecret" --set config.KP_SASL_PASSWORD=secret
refused "it is 9108 in every pod" --set config.KP_HTTP_PORT=8080
refused "configFile: http_port is set by the chart" --set 'configFile=http_port = 8080'
refused "configFile: sasl_password is set by the chart" --set 'configFile="sasl_password"="secret"'
refused "the pod's grace period follows it" --set 'configFile=shutdown_timeout_seconds = 90'
refused "both name a config file" --set 'configFile=threshold = 0.5' --set config.KP_CONFIG=/kp.toml
refused "put it under config" --set 'extraEnv[0].name=KP_THRESHOLD' --set 'extraEnv[0].value=0.8'
refused "at '/config/KP_SHUTDOWN_TIMEOUT_SECONDS'" --set config.KP_SHUTDOWN_TIMEOUT_SECONDS=soon
refused "at '/image/digest'" --set image.digest=abc
refused "at '/keda/minReplicas'" --set keda.minReplicas=0
refused "at '/keda/behavior/scaleDown" --set keda.behavior.scaleDown.stabilizationWindowSeconds=7200
refused "needs kafka.sasl.existingSecret" --set kafka.securityProtocol=SASL_SSL
refused "would not be used" --set kafka.sasl.existingSecret=user
refused "would not be used" --set kafka.tls.ca.existingSecret=ca
refused "keda.enabled needs kind Deployment" --set kind=StatefulSet --set keda.enabled=true
refused "needs KP_DELIVERY exactly_once" --set kind=StatefulSet --set config.KP_DELIVERY=at_least_once
refused "set staticMembership.sessionTimeoutSeconds" --set kind=StatefulSet --set config.KP_SESSION_TIMEOUT_SECONDS=60
refused "greater than keda.maxReplicas" --set keda.enabled=true --set keda.minReplicas=9
refused "greater than config.KP_TOPIC_PARTITIONS" --set keda.enabled=true --set config.KP_TOPIC_PARTITIONS=2
refused "needs assemble.confidence" --set assemble.enabled=true
refused "use assemble.domain" --set config.KP_ASSEMBLE_DOMAIN=x
refused "needs contribute.registryUrl" --set contribute.enabled=true
refused "needs contribute.key.existingSecret" --set contribute.enabled=true --set contribute.registryUrl=https://r.example.org
refused "at '/contribute/registryUrl'" --set contribute.registryUrl=http://r.example.org
refused "use contribute.key.existingSecret" --set config.KP_REGISTRY_KEY=kp_secret
refused "use contribute.registryUrl" --set config.KP_REGISTRY_URL=https://r.example.org
refused "configFile: registry_key is set by the chart" --set 'configFile=registry_key = "kp_secret"'
refused "needs keda.triggerAuthentication" --set keda.enabled=true --set kafka.securityProtocol=SASL_SSL \
    --set kafka.sasl.mechanism=OAUTHBEARER --set kafka.sasl.existingSecret=token
refused "both give a token" --set kafka.securityProtocol=SASL_SSL --set kafka.sasl.mechanism=OAUTHBEARER \
    --set kafka.sasl.existingSecret=token --set config.KP_SASL_TOKEN_FILE=/token
echo "ok  $refusals wrong values refused, each with its reason"
