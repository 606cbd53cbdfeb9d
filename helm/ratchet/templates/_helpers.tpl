{{- define "ratchet.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
The job's name. The operator makes <job>-worker-<number> of it, which must stay under 64 letters.
*/}}
{{- define "ratchet.fullname" -}}
{{- $name := include "ratchet.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "ratchet.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ratchet.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ratchet.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "ratchet.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "ratchet.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "ratchet.fullname" .) }}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- define "ratchet.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{/*
A value as TOML. JSON's text, numbers and booleans are TOML's, too; toToml would write 15 as 15.0.
*/}}
{{- define "ratchet.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ toJson $key }} = {{ include "ratchet.toml" (get $ $key) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "ratchet.toml" $item }}{{ end }}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/*
The run's settings as a TOML file.
*/}}
{{- define "ratchet.config" -}}
{{- range $section, $fields := .Values.config }}
[{{ $section }}]
{{- range $field, $value := $fields }}
{{ $field }} = {{ include "ratchet.toml" $value }}
{{- end }}
{{ end }}
{{- end }}

{{- define "ratchet.envFrom" -}}
{{- with .Values.credentials.existingSecret }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- with .Values.extraEnvFrom }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ratchet.volumeMounts" -}}
- name: config
  mountPath: /etc/ratchet
  readOnly: true
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ratchet.volumes" -}}
- name: config
  configMap:
    name: {{ include "ratchet.fullname" . }}-config
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.sizeLimit }}
- name: tmp
  emptyDir: {}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
What the pods of the job and of `helm test` share: who they are and where they may run.
*/}}
{{- define "ratchet.podSpec" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
serviceAccountName: {{ include "ratchet.serviceAccountName" . }}
automountServiceAccountToken: {{ .Values.config.launch.kubernetes_events | default false }}
enableServiceLinks: false
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- end }}

{{/*
Objects of the Prometheus Operator: say so where it is missing, rather than fail to apply.
*/}}
{{- define "ratchet.needsPrometheusOperator" -}}
{{- if not (.root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind)) -}}
{{- fail (printf "%s.enabled is true and this cluster has no %s: install the Prometheus Operator, or set it to false" .value .kind) -}}
{{- end -}}
{{- end }}
