{{- /* The value of a flag in a list of arguments. The last one counts, as in the agent. Takes the list and the name. */ -}}
{{- define "weft.flag" -}}
{{- $value := "" -}}
{{- $name := index . 1 -}}
{{- $before := "" -}}
{{- range index . 0 -}}
{{- $arg := . | toString | trimPrefix "-" | trimPrefix "-" -}}
{{- if hasPrefix (print $name "=") $arg }}{{ $value = trimPrefix (print $name "=") $arg }}{{ end -}}
{{- if eq $before $name }}{{ $value = . }}{{ end -}}
{{- $before = $arg -}}
{{- end -}}
{{- $value -}}
{{- end -}}

{{- /* The address of the health port. flannel's chart has no value for it, so its users give the flag. */ -}}
{{- define "weft.healthz-ip" -}}
{{- $every := ternary "0.0.0.0" "::" (not (empty .Values.podCidr)) -}}
{{- .Values.flannel.healthz.ip | default (include "weft.flag" (list .Values.flannel.args "healthz-ip")) | default $every -}}
{{- end -}}

{{- /* The port of /healthz. The flag comes first, because the value has a default. */ -}}
{{- define "weft.healthz-port" -}}
{{- include "weft.flag" (list .Values.flannel.args "healthz-port") | default .Values.flannel.healthz.port | int -}}
{{- end -}}
