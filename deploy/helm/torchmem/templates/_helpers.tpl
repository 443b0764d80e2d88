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
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end }}

{{- define "torchmem.image" -}}
{{- with .Values.image -}}
{{- if not (and .repository (or .tag .digest)) -}}
{{- fail "Set image.repository, and image.tag or image.digest, to the exporter's image in your registry: build it from exporter/Dockerfile and push it." -}}
{{- else if and .tag .digest -}}
{{- fail "image.tag and image.digest are both set, and only one of them can name the image: clear the other one." -}}
{{- end -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}
{{- end }}

{{- define "torchmem.nodes" -}}
{{- with merge (dict) (.Values.nodeSelector | default (dict)) (ternary (dict "nvidia.com/gpu.present" "true") (dict) .Values.gpuNodesOnly) -}}
{{ toYaml . }}
{{- end -}}
{{- end }}

{{- /* The kubelet has neither the password nor the certificate that web.yml may require of every request. */ -}}
{{- define "torchmem.probe" -}}
{{- if .root.Values.webConfig.existingSecret -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics}
{{- end -}}
{{- end }}

{{- /* The rules expect the job of their threshold, and the node as the instance. */ -}}
{{- define "torchmem.relabelings" -}}
- {action: replace, targetLabel: job, replacement: {{ include "torchmem.threshold" (dict "root" . "name" "exporter_job") }}}
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

{{- /* A threshold as PromQL, or as text. A link is empty unless it is a URL: the operator's Prometheus serves no runbooks. */ -}}
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
{{- else if not (and (hasSuffix "_at" .name) (hasPrefix "/" $value)) -}}
{{- $value -}}
{{- end -}}
{{- end }}

{{- /* A dashboard's JSON, whose tables of alerts link to the runbooks as the alerts do. */ -}}
{{- define "torchmem.dashboard" -}}
{{- $json := .root.Files.Get .path -}}
{{- range $label, $isShown := .root.Values.dashboards.show -}}
{{- if $isShown -}}
{{- $hidden := printf `"hide": 2,(\s+"includeAll": true,\s+"label": "%s")` (title $label) -}}
{{- $json = regexReplaceAll $hidden $json "${1}" -}}
{{- end -}}
{{- end -}}
{{- with include "torchmem.threshold" (dict "root" .root "name" "runbooks_at") -}}
{{- regexReplaceAllLiteral `"url": "[^"]+/\$\{__value\.raw\}\.md"` $json (printf `"url": "%s/${__value.raw}.md"` .) -}}
{{- else -}}
{{- regexReplaceAllLiteral `\{\s+"id": "links",\s+"value": \[\s+\{\s+"title": "Open the runbook",[^]]+\]\s+\},\s+` $json "" -}}
{{- end -}}
{{- end }}
