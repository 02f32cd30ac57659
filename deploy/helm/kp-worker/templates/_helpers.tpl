{{- define "kp-worker.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 52 characters: a StatefulSet adds the pod's number, and its controller a hash to a label. */}}
{{- define "kp-worker.fullname" -}}
{{- $name := include "kp-worker.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* The worker's name, also where the context is that of contribute (contribute.yaml). */}}
{{- define "kp-worker.workerName" -}}
{{- default (include "kp-worker.fullname" .) .Values.workerName -}}
{{- end -}}

{{/* worker, contribute or assemble: the container's name. */}}
{{- define "kp-worker.component" -}}
{{- default "worker" .Values.component -}}
{{- end -}}

{{- define "kp-worker.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kp-worker.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kp-worker.labels" -}}
{{ include "kp-worker.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of the chart and further ones of the user, given as (list context labels). */}}
{{- define "kp-worker.labelsWith" -}}
{{ include "kp-worker.labels" (first .) }}
{{- with last . }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kp-worker.serviceAccountName" -}}
{{- default (ternary (include "kp-worker.workerName" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "kp-worker.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "kp-worker.sasl" -}}
{{- if hasPrefix "SASL_" .Values.kafka.securityProtocol }}true{{ end -}}
{{- end -}}

{{- define "kp-worker.tls" -}}
{{- if hasSuffix "SSL" .Values.kafka.securityProtocol }}true{{ end -}}
{{- end -}}

{{/* A value of config as the worker reads it. Helm reads numbers as floats, 1048576 would become 1.048576e+06. */}}
{{- define "kp-worker.setting" -}}
{{- if kindIs "map" . -}}
{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{ int64 . }}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end -}}

{{/* The drain (KP_SHUTDOWN_TIMEOUT_SECONDS), then 15 s to leave the group and end the process, before the kubelet kills it. */}}
{{- define "kp-worker.terminationGracePeriodSeconds" -}}
{{- add (ceil (float64 (dig "KP_SHUTDOWN_TIMEOUT_SECONDS" 20 .Values.config)) | int64) 15 -}}
{{- end -}}

{{/* The port of a URL. */}}
{{- define "kp-worker.port" -}}
{{- regexFind ":[0-9]+$" (get (urlParse .) "host") | trimPrefix ":" | default (ternary "80" "443" (hasPrefix "http:" .)) -}}
{{- end -}}
