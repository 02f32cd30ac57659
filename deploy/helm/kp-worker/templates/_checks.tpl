{{/* (list NAME ADDRESS): the port of an address, if it names one, is 1 to 65535. */}}
{{- define "kp-worker.checkPort" -}}
{{- $port := regexFind ":[0-9]+$" (last .) | trimPrefix ":" -}}
{{- if and $port (or (lt (int $port) 1) (gt (int $port) 65535)) -}}
{{- fail (printf "%s: %s has no port between 1 and 65535" (first .) (last .)) -}}
{{- end -}}
{{- end -}}

{{/* What a JSON schema cannot say clearly: settings that do not fit together. Each message says what to do. */}}
{{- define "kp-worker.checks" -}}
{{- $kafka := .Values.kafka -}}
{{- if not $kafka.bootstrapServers -}}
{{- fail "kafka.bootstrapServers is missing: --set kafka.bootstrapServers=kafka-1:9092" -}}
{{- end -}}
{{- range (splitList "," $kafka.bootstrapServers) -}}
{{- include "kp-worker.checkPort" (list "kafka.bootstrapServers" .) -}}
{{- end -}}
{{- $known := append (keys (.Files.Get "files/config.schema.json" | required "files/config.schema.json of the chart is missing" | fromJson).properties) "config" -}}
{{- range $name := keys .Values.config -}}
{{- if not (and (hasPrefix "KP_" $name) (eq $name (upper $name)) (has ($name | trimPrefix "KP_" | lower) $known)) -}}
{{- fail (printf "config.%s is no setting of kp-worker %s: docs/settings.md lists them" $name $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- range $name, $values := dict
  "KP_BOOTSTRAP_SERVERS" "kafka.bootstrapServers"
  "KP_GROUP_ID" "kafka.groupId"
  "KP_SOURCE_TOPIC" "kafka.sourceTopic"
  "KP_SECURITY_PROTOCOL" "kafka.securityProtocol"
  "KP_SASL_MECHANISM" "kafka.sasl.mechanism"
  "KP_SASL_USERNAME" "kafka.sasl.existingSecret"
  "KP_SASL_PASSWORD" "kafka.sasl.existingSecret"
  "KP_SASL_PASSWORD_FILE" "kafka.sasl.existingSecret"
  "KP_TLS_CA_FILE" "kafka.tls.ca"
  "KP_TLS_CERTIFICATE_FILE" "kafka.tls.client"
  "KP_TLS_KEY_FILE" "kafka.tls.client"
  "KP_TLS_KEY_PASSWORD" "kafka.tls.client"
  "KP_TLS_KEY_PASSWORD_FILE" "kafka.tls.client"
  "KP_GROUP_INSTANCE_ID" "kind: StatefulSet, which takes the pod's name"
  "KP_EMBEDDER_URL" "embedder.url"
  "KP_SPANS_TOPIC" "assemble.spansTopic"
  "KP_ASSEMBLE_CONFIDENCE" "assemble.confidence"
  "KP_ASSEMBLE_DOMAIN" "assemble.domain"
  "KP_ASSEMBLE_VISIBILITY" "assemble.visibility"
  "KP_ASSEMBLE_PRIVACY" "assemble.privacy"
  "KP_REGISTRY_URL" "contribute.registryUrl"
  "KP_REGISTRY_KEY" "contribute.key.existingSecret"
  "KP_REGISTRY_KEY_FILE" "contribute.key.existingSecret"
  "KP_HTTP_HOST" "nothing: the probes need all addresses"
  "KP_HTTP_PORT" "nothing: it is 9108 in every pod"
-}}
{{- if hasKey $.Values.config $name -}}
{{- fail (printf "config.%s is set by the chart; use %s" $name $values) -}}
{{- end -}}
{{- $key := $name | trimPrefix "KP_" | lower -}}
{{- if regexMatch (printf "(?m)^[ \t]*[\"']?%s[\"']?[ \t]*=" $key) $.Values.configFile -}}
{{- fail (printf "configFile: %s is set by the chart; use %s" $key $values) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "(?m)^[ \t]*[\"']?shutdown_timeout_seconds[\"']?[ \t]*=" .Values.configFile -}}
{{- fail "configFile: put shutdown_timeout_seconds under config as KP_SHUTDOWN_TIMEOUT_SECONDS, the pod's grace period follows it" -}}
{{- end -}}
{{- if and .Values.configFile (hasKey .Values.config "KP_CONFIG") -}}
{{- fail "configFile and config.KP_CONFIG both name a config file: remove one of them" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if hasPrefix "KP_" .name -}}
{{- fail (printf "extraEnv: %s is a setting of the worker; put it under config, or where values.yaml has a value of its own for it" .name) -}}
{{- end -}}
{{- end -}}
{{- $tokenFile := dig "KP_SASL_TOKEN_FILE" "" .Values.config -}}
{{- if and (include "kp-worker.sasl" .) (not $kafka.sasl.existingSecret) (not (and (eq $kafka.sasl.mechanism "OAUTHBEARER") $tokenFile)) -}}
{{- fail (printf "kafka.securityProtocol %s needs kafka.sasl.existingSecret: the name of a Secret with the credentials" $kafka.securityProtocol) -}}
{{- end -}}
{{- if and $kafka.sasl.existingSecret $tokenFile -}}
{{- fail "kafka.sasl.existingSecret and config.KP_SASL_TOKEN_FILE both give a token: remove one of them" -}}
{{- end -}}
{{- if and (not (include "kp-worker.sasl" .)) $kafka.sasl.existingSecret -}}
{{- fail (printf "kafka.sasl.existingSecret would not be used with kafka.securityProtocol %s: set SASL_SSL or SASL_PLAINTEXT, or remove the secret" $kafka.securityProtocol) -}}
{{- end -}}
{{- if and (not (include "kp-worker.tls" .)) (or $kafka.tls.ca.existingSecret $kafka.tls.client.existingSecret) -}}
{{- fail (printf "kafka.tls would not be used with kafka.securityProtocol %s: set SSL or SASL_SSL, or remove its secrets" $kafka.securityProtocol) -}}
{{- end -}}
{{- if eq .Values.kind "StatefulSet" -}}
{{- if .Values.keda.enabled -}}
{{- fail "keda.enabled needs kind Deployment: a static member that is scaled away does not leave the group, and its partitions would wait for the session timeout" -}}
{{- end -}}
{{- if eq (dig "KP_DELIVERY" "exactly_once" .Values.config) "at_least_once" -}}
{{- fail "kind StatefulSet (static membership) needs KP_DELIVERY exactly_once: set kind Deployment" -}}
{{- end -}}
{{- if hasKey .Values.config "KP_SESSION_TIMEOUT_SECONDS" -}}
{{- fail "with kind StatefulSet set staticMembership.sessionTimeoutSeconds, not config.KP_SESSION_TIMEOUT_SECONDS" -}}
{{- end -}}
{{- end -}}
{{- with .Values.embedder -}}
{{- $given := dig "KP_EMBEDDER" "" $.Values.config -}}
{{- if or (eq $given "http") (and .url $given) -}}
{{- fail "config.KP_EMBEDDER: embedder.url sets it to http; set embedder.url, or another embedder, not both" -}}
{{- end -}}
{{- if and .token.existingSecret (not .url) -}}
{{- fail "embedder.token.existingSecret would not be used without embedder.url: set it, or remove the secret" -}}
{{- end -}}
{{- if and .token.existingSecret (hasKey $.Values.config "KP_EMBEDDER_TOKEN_FILE") -}}
{{- fail "embedder.token.existingSecret and config.KP_EMBEDDER_TOKEN_FILE both give a token: remove one of them" -}}
{{- end -}}
{{- if and .url (not (hasKey $.Values.config "KP_MODEL")) (not $.Values.configFile) -}}
{{- fail "embedder.url needs config.KP_MODEL: the service's name of the model" -}}
{{- end -}}
{{- include "kp-worker.checkPort" (list "embedder.url" (get (urlParse .url) "host")) -}}
{{- end -}}
{{- if .Values.assemble.enabled -}}
{{- range list "confidence" "domain" "visibility" "privacy" -}}
{{- if not (get $.Values.assemble .) -}}
{{- fail (printf "assemble.enabled needs assemble.%s: spans do not say it" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.contribute -}}
{{- if and .enabled (not .registryUrl) -}}
{{- fail "contribute.enabled needs contribute.registryUrl: --set contribute.registryUrl=https://registry.example.org" -}}
{{- end -}}
{{- if .enabled -}}
{{- include "kp-worker.checkPort" (list "contribute.registryUrl" (get (urlParse .registryUrl) "host")) -}}
{{- end -}}
{{- if and .enabled (not .key.existingSecret) -}}
{{- fail "contribute.enabled needs contribute.key.existingSecret: the name of a Secret with the registry's key" -}}
{{- end -}}
{{- end -}}
{{- if .Values.keda.enabled -}}
{{- if gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas) -}}
{{- fail "keda.minReplicas is greater than keda.maxReplicas" -}}
{{- end -}}
{{- if gt (int .Values.keda.maxReplicas) (int (dig "KP_TOPIC_PARTITIONS" .Values.keda.maxReplicas .Values.config)) -}}
{{- fail "keda.maxReplicas is greater than config.KP_TOPIC_PARTITIONS: workers without a partition are idle" -}}
{{- end -}}
{{- if and (include "kp-worker.sasl" .) (eq $kafka.sasl.mechanism "OAUTHBEARER") (not .Values.keda.triggerAuthentication) -}}
{{- fail "keda with OAUTHBEARER needs keda.triggerAuthentication: a TriggerAuthentication of your own (KEDA takes no token from a file)" -}}
{{- end -}}
{{- end -}}
{{- end -}}
