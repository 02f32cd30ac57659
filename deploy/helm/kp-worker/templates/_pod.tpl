{{- define "kp-worker.env" -}}
- name: KP_BOOTSTRAP_SERVERS
  value: {{ .Values.kafka.bootstrapServers | quote }}
- name: KP_GROUP_ID
  value: {{ .Values.kafka.groupId | quote }}
- name: KP_SOURCE_TOPIC
  value: {{ .Values.kafka.sourceTopic | quote }}
{{- if ne .Values.kafka.securityProtocol "PLAINTEXT" }}
- name: KP_SECURITY_PROTOCOL
  value: {{ .Values.kafka.securityProtocol }}
{{- end }}
{{- if include "kp-worker.sasl" . }}
{{- with .Values.kafka.sasl }}
- name: KP_SASL_MECHANISM
  value: {{ .mechanism }}
{{- if and .existingSecret (eq .mechanism "OAUTHBEARER") }}
- name: KP_SASL_TOKEN_FILE
  value: /etc/kp-worker/sasl/{{ .tokenKey }}
{{- else if .existingSecret }}
- name: KP_SASL_USERNAME
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .usernameKey }}
- name: KP_SASL_PASSWORD_FILE
  value: /etc/kp-worker/sasl/{{ .passwordKey }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.kafka.tls.ca.existingSecret }}
- name: KP_TLS_CA_FILE
  value: /etc/kp-worker/ca/{{ .Values.kafka.tls.ca.key }}
{{- end }}
{{- with .Values.kafka.tls.client }}
{{- if .existingSecret }}
- name: KP_TLS_CERTIFICATE_FILE
  value: /etc/kp-worker/client/{{ .certificateKey }}
- name: KP_TLS_KEY_FILE
  value: /etc/kp-worker/client/{{ .privateKeyKey }}
{{- if .privateKeyPasswordKey }}
- name: KP_TLS_KEY_PASSWORD_FILE
  value: /etc/kp-worker/client/{{ .privateKeyPasswordKey }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.kind "StatefulSet" }}
- name: KP_GROUP_INSTANCE_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: KP_SESSION_TIMEOUT_SECONDS
  value: {{ .Values.staticMembership.sessionTimeoutSeconds | quote }}
{{- end }}
{{- if eq (include "kp-worker.component" .) "contribute" }}
- name: KP_REGISTRY_URL
  value: {{ .Values.contribute.registryUrl | quote }}
- name: KP_REGISTRY_KEY_FILE
  value: /etc/kp-worker/registry/{{ .Values.contribute.key.key }}
{{- else if eq (include "kp-worker.component" .) "assemble" }}
- name: KP_SPANS_TOPIC
  value: {{ .Values.assemble.spansTopic | quote }}
- name: KP_ASSEMBLE_CONFIDENCE
  value: {{ .Values.assemble.confidence | quote }}
- name: KP_ASSEMBLE_DOMAIN
  value: {{ .Values.assemble.domain | quote }}
- name: KP_ASSEMBLE_VISIBILITY
  value: {{ .Values.assemble.visibility | quote }}
- name: KP_ASSEMBLE_PRIVACY
  value: {{ .Values.assemble.privacy | quote }}
{{- else if .Values.embedder.url }}
- name: KP_EMBEDDER
  value: http
- name: KP_EMBEDDER_URL
  value: {{ .Values.embedder.url | quote }}
{{- if .Values.embedder.token.existingSecret }}
- name: KP_EMBEDDER_TOKEN_FILE
  value: /etc/kp-worker/embedder/{{ .Values.embedder.token.key }}
{{- end }}
{{- else if not (hasKey .Values.config "KP_EMBED_THREADS") }}
- name: KP_EMBED_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: worker
      resource: requests.cpu
      divisor: "1"
{{- end }}
{{- if .Values.configFile }}
- name: KP_CONFIG
  value: /etc/kp-worker/config/kp-worker.toml
{{- end }}
{{- range $name, $value := .Values.config }}
- name: {{ $name }}
  value: {{ include "kp-worker.setting" $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Secrets are mounted read-only as whole directories (not by subPath), so that the kubelet renews their files. */}}
{{- define "kp-worker.secretMounts" -}}
{{- with .Values.kafka.sasl.existingSecret }}
- name: sasl
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.kafka.tls.ca.existingSecret }}
- name: ca
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.kafka.tls.client.existingSecret }}
- name: client
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if eq (include "kp-worker.component" .) "contribute" }}
- name: registry
  secret: {secretName: {{ .Values.contribute.key.existingSecret }}, defaultMode: 0440}
{{- else if and .Values.embedder.token.existingSecret (eq (include "kp-worker.component" .) "worker") }}
- name: embedder
  secret: {secretName: {{ .Values.embedder.token.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "kp-worker.pod" -}}
{{- $secrets := include "kp-worker.secretMounts" . | fromYamlArray -}}
metadata:
  labels:
    {{- include "kp-worker.labelsWith" (list . .Values.podLabels) | nindent 4 }}
  {{- if or .Values.podAnnotations .Values.configFile }}
  annotations:
    {{- with .Values.configFile }}
    checksum/config-file: {{ sha256sum . }}  # a changed file rolls the pods
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "kp-worker.serviceAccountName" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false  # a Service named kp-worker would set KP_WORKER_..., which are no settings
  terminationGracePeriodSeconds: {{ include "kp-worker.terminationGracePeriodSeconds" . }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  containers:
    - name: {{ include "kp-worker.component" . }}
      image: {{ include "kp-worker.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [{{ ternary "run" (include "kp-worker.component" .) (eq (include "kp-worker.component" .) "worker") }}]
      env:
        {{- include "kp-worker.env" . | nindent 8 }}
      ports:
        - name: http
          containerPort: 9108
      {{- if ne (include "kp-worker.component" .) "worker" }}
      # Not until ready: without a registry that answers contribute is not, and waits; assemble restores its state.
      startupProbe:
        httpGet: {path: /healthz, port: http}
      {{- else }}
      # Until ready once: model loaded, topics checked, group joined, caches restored; 10 minutes are longer than each of
      # the worker's own timeouts, so this only ends what hangs.
      startupProbe:
        httpGet: {path: /readyz, port: http}
      {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 120
      # Never depends on the brokers: when they stay away, the worker exits by itself.
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- range $secrets }}
        - name: {{ .name }}
          mountPath: /etc/kp-worker/{{ .name }}
          readOnly: true
        {{- end }}
        {{- if .Values.configFile }}
        - name: config
          mountPath: /etc/kp-worker/config
          readOnly: true
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    {{- with $secrets }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if .Values.configFile }}
    - name: config
      configMap: {name: {{ include "kp-worker.workerName" . }}-config}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - labelSelector:
        matchLabels:
          {{- include "kp-worker.selectorLabels" $ | nindent 10 }}
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
{{- end -}}
