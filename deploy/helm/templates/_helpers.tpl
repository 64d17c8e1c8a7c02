{{- define "prefixd.fullname" -}}
{{- if contains "prefixd" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-prefixd" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "prefixd.selector" -}}
app.kubernetes.io/name: prefixd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "prefixd.labels" -}}
{{ include "prefixd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "prefixd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* MiB of a size like 8GiB; values.schema.json says which sizes there are. */ -}}
{{- define "prefixd.mib" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "TiB" . -}}{{ mul $number 1048576 }}
{{- else if hasSuffix "GiB" . -}}{{ mul $number 1024 }}
{{- else -}}{{ $number }}{{- end -}}
{{- end -}}

{{- /* What the daemon may take, in GiB. server/config/budgets.py has the parts, and a test compares the two. */ -}}
{{- define "prefixd.memory" -}}
{{- $ram := include "prefixd.mib" .Values.budgets.ram | int64 -}}
{{- $shm := include "prefixd.mib" .Values.budgets.shm | int64 -}}
{{- $disk := include "prefixd.mib" .Values.budgets.disk | int64 -}}
{{- /* An entry takes 600 bytes; a tier has at most one in each 64 KiB, and the disk tier a million. */ -}}
{{- $entries := add (mul 16 (add $ram $shm)) (min (mul 16 $disk) 1000000) -}}
{{- $others := 3197 -}}
{{- if .Values.tls.enabled }}{{ $others = add $others 416 }}{{ end -}}
{{- if .Values.fleet.enabled }}{{ $others = add $others 256 }}{{ end -}}
{{- $mib := add $ram $shm $others (div (mul $entries 600) 1048576) 1 -}}
{{- .Values.resources.memory | default (printf "%dGi" (div (add $mib 1023) 1024)) -}}
{{- end -}}

{{- /* HOST:PORT of each master, behind a blank. */ -}}
{{- define "prefixd.masters" -}}
{{- $name := printf "%s-valkey" (include "prefixd.fullname" .) -}}
{{- range $number := until 3 }} {{ $name }}-{{ $number }}.{{ $name }}:6379{{ end -}}
{{- end -}}

{{- define "prefixd.engine" -}}
{{- .Values.fleet.engine | default (include "prefixd.masters" . | trim | splitList " " | join ",redis://" | printf "redis://%s") -}}
{{- end -}}

{{- /* What runs without anything that Pod Security calls restricted: the user of valkey's image. */ -}}
{{- define "prefixd.restricted" -}}
automountServiceAccountToken: false
securityContext:
  runAsUser: 999
  runAsGroup: 999
  fsGroup: 999
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
{{- end -}}
