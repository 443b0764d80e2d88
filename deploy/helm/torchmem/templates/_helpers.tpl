{{- define "torchmem.name" -}}
{{ .Values.nameOverride | default "torchmem-exporter" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "torchmem.selector" -}}
app.kubernetes.io/name: {{ include "torchmem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "torchmem.labels" -}}
{{ include "torchmem.selector" . }}
app.kubernetes.io/part-of: torchmem
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "torchmem.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* The kubelet has neither the password nor the certificate that web.yml may require of every request. */ -}}
{{- define "torchmem.probe" -}}
{{- if .root.Values.webConfig.existingSecret -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics}
{{- end -}}
{{- end }}

{{- /* The rules and dashboards expect the job `torchmem` and the node as the instance. */ -}}
{{- define "torchmem.relabelings" -}}
- {action: replace, targetLabel: job, replacement: torchmem}
- {action: replace, sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance}
# Labels of the exporter's pod. Its name would create new series at every restart, and on torchmem_process_info
# `pod` and `namespace` are those of the training pod.
- {action: labeldrop, regex: pod|namespace|container|endpoint|service}
{{- end }}

{{- /* More than an exporter ever serves: Prometheus drops a whole scrape that exceeds one of them. */ -}}
{{- define "torchmem.limits" -}}
sampleLimit: 80000
bodySizeLimit: 32MB
labelLimit: 160
labelNameLengthLimit: 256
labelValueLengthLimit: 256
{{- end }}

{{- /* A threshold as PromQL, or as text: a list of XIDs, a size such as 1GiB, a path, anything else. */ -}}
{{- define "torchmem.threshold" -}}
{{- $shipped := .root.Files.Get "thresholds.yml" | fromYaml -}}
{{- $value := get (mergeOverwrite $shipped .root.Values.prometheusRule.thresholds) .name -}}
{{- $units := dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- if kindIs "slice" $value -}}
{{- join "|" $value -}}
{{- else if and (hasSuffix "_bytes" .name) (kindIs "string" $value) -}}
{{- $number := regexFind "^[0-9.]+" $value -}}
{{- $unit := regexFind "[A-Za-z]+$" $value -}}
{{- if not (and $number (hasKey $units $unit)) -}}
{{- fail (printf "prometheusRule.thresholds.%s is %q: give a size such as 1GiB, or a number of bytes." .name $value) -}}
{{- end -}}
{{- printf "%.0f" (mulf (float64 $number) (get $units $unit)) -}}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) -}}
{{- printf "%.0f" $value -}}
{{- else if and (eq .name "runbooks_at") (hasPrefix "/" $value) -}}
{{ "{{ $externalURL }}" }}{{ $value }}
{{- else -}}
{{- $value -}}
{{- end -}}
{{- end }}

{{- define "torchmem.checkThresholds" -}}
{{- $shipped := .Files.Get "thresholds.yml" | fromYaml -}}
{{- range $name, $_ := .Values.prometheusRule.thresholds -}}
{{- if not (hasKey $shipped $name) -}}
{{- fail (printf "prometheusRule.thresholds.%s is unknown: thresholds.yml in the chart lists all." $name) -}}
{{- end -}}
{{- end -}}
{{- end }}
