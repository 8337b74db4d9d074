{{/* Names are fixed, without the release's: services find each other by them, and one namespace holds one fleet. */}}

{{/* (root, name, component or "") -> the inside of `metadata` */}}
{{- define "glowplug.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
labels:
  app.kubernetes.io/name: glowplug
  {{- with index . 2 }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
  app.kubernetes.io/part-of: glowplug
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: glowplug-{{ $root.Chart.Version }}
{{- end }}

{{/* component -> the labels by which its pods are selected; they never change, since selectors cannot */}}
{{- define "glowplug.selector" -}}
app.kubernetes.io/name: glowplug
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* component -> its pods, as a peer of a network policy */}}
{{- define "glowplug.pods" -}}
- podSelector:
    matchLabels:
      {{- include "glowplug.selector" . | nindent 6 }}
{{- end }}

{{/* (root, name) -> an image of ours; a name with a slash or a colon is used unchanged */}}
{{- define "glowplug.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $name := index . 1 -}}
{{- if regexMatch "[/:]" $name -}}
{{- $name -}}
{{- else -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}/{{ $name }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* (root, component, seconds of grace) -> the common fields of every pod */}}
{{- define "glowplug.pod" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ index . 1 }}
automountServiceAccountToken: false
enableServiceLinks: false  # a Service named x would set X_PORT in every container
terminationGracePeriodSeconds: {{ index . 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* where pods other than nodes run */}}
{{- define "glowplug.scheduling" -}}
{{- with .Values.controlPlane.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.controlPlane.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.controlPlane.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "glowplug.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.security.user }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "glowplug.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* (root, component, also over hosts) -> the constraints that spread its pods */}}
{{- define "glowplug.spread" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
{{- if ne $root.Values.topologySpread "none" }}
topologySpreadConstraints:
  {{- $keys := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  {{- range (index . 2 | ternary $keys (rest $keys)) }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $root.Values.topologySpread }}
    labelSelector:
      matchLabels:
        {{- include "glowplug.selector" $component | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* name of the port with /live and /ready */}}
{{- define "glowplug.probes" -}}
startupProbe:
  httpGet:
    path: /live
    port: {{ . }}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet:
    path: /live
    port: {{ . }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet:
    path: /ready
    port: {{ . }}
  periodSeconds: 3
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{/* (root, variable, key of the tokens' Secret or "" for the variable's own name) -> one entry of `env` */}}
{{- define "glowplug.token" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef:
      name: {{ (index . 0).Values.tokens.secret }}
      key: {{ index . 2 | default (index . 1) }}
{{- end }}

{{/* variable, path of a field of the pod */}}
{{- define "glowplug.field" -}}
- name: {{ index . 0 }}
  valueFrom:
    fieldRef:
      fieldPath: {{ index . 1 }}
{{- end }}

{{/* (root, variable, Service's address, scheme, end of the address, values of the server, user) -> the address of a server */}}
{{- define "glowplug.server" -}}
{{- $existing := (index . 5).existing }}
- name: {{ index . 1 }}
  {{- if $existing.secret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ $existing.secret.name }}
      key: {{ $existing.secret.key }}
  {{- else if $existing.url }}
  value: {{ $existing.url | replace "://" (printf "://%s:$(GLOWPLUG_SERVER_PASSWORD)@" (index . 6)) }}
  {{- else }}
  value: {{ index . 3 }}://{{ index . 6 }}:$(GLOWPLUG_SERVER_PASSWORD)@{{ index . 2 }}{{ index . 4 }}
  {{- end }}
{{- end }}

{{/* (root, user) -> the addresses of bus and store, and the service's user there */}}
{{- define "glowplug.servers" -}}
{{- $root := index . 0 }}
{{- $user := index . 1 }}
{{- include "glowplug.token" (list $root "GLOWPLUG_SERVER_PASSWORD" (printf "%s_PASSWORD" (upper $user))) }}
{{- include "glowplug.server" (list $root "GLOWPLUG_NATS_URL" "nats:4222" "nats" "" $root.Values.nats $user) }}
{{- include "glowplug.server" (list $root "GLOWPLUG_REDIS_URL" "valkey:6379" "redis" "/0" $root.Values.valkey $user) }}
{{- end }}

{{/* values of a server -> "yes" when it is not ours */}}
{{- define "glowplug.isExisting" -}}
{{- if or .existing.url .existing.secret.name }}yes{{ end }}
{{- end }}

{{/* (root, component) -> a budget that lets one pod go at a time */}}
{{- define "glowplug.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "glowplug.metadata" (list (index . 0) (index . 1) (index . 1)) | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "glowplug.selector" (index . 1) | nindent 6 }}
{{- end }}

{{/* "68Gi" -> bytes, as Kubernetes reads it */}}
{{- define "glowplug.bytes" -}}
{{- $units := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get $units (regexFind "[A-Z]i$" .) | int64) -}}
{{- end }}

{{/* values of a pool's disk -> the pod's request of the server's own disk: the copies, `state` (10Gi), `tmp` (4Gi) and 1Gi
for logs. The request is the limit, so that the kubelet has no reason to evict. */}}
{{- define "glowplug.ephemeral" -}}
{{- if eq .type "ephemeral" }}
ephemeral-storage: {{ add (include "glowplug.bytes" .size | int64) 16106127360 | toString | quote }}
{{- end }}
{{- end }}

{{/* (stores) -> the mounts of folders that models name by `file:` */}}
{{- define "glowplug.storeMounts" -}}
{{- range . }}
- name: store-{{ .name }}
  mountPath: {{ .path }}
  readOnly: true
{{- end }}
{{- end }}

{{/* (root, stores) -> the volumes of these */}}
{{- define "glowplug.storeVolumes" -}}
{{- $version := (index . 0).Capabilities.KubeVersion.Version -}}
{{- range index . 1 }}
- name: store-{{ .name }}
  {{- if .claim }}
  persistentVolumeClaim:
    claimName: {{ .claim }}
    readOnly: true
  {{- else if .hostPath }}
  hostPath:
    path: {{ .hostPath }}
    type: Directory
  {{- else }}
  {{- if semverCompare "<1.35-0" $version }}
  {{- fail (printf "weights: the store %s is an image, which Kubernetes mounts from 1.35 on; this is %s" .name $version) }}
  {{- end }}
  image:
    reference: {{ .image }}
    pullPolicy: IfNotPresent
  {{- end }}
{{- end }}
{{- end }}

{{/* settings of every service; a map as YAML */}}
{{- define "glowplug.settings" -}}
{{- $here := .Release.Namespace -}}
{{- $names := list "router" "console" "autoscaler" "placer" "predictor" (printf "*.%s" $here) (printf "*.%s.svc" $here) -}}
{{- $names = append $names (printf "*.%s.svc.%s" $here .Values.clusterDomain) -}}
{{- range $door := list .Values.ingress .Values.httpRoute -}}
{{- if $door.enabled -}}
{{- range $host := list $door.hosts.router $door.hosts.console -}}
{{- with $host }}{{ $names = append $names . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $settings := dict
  "GLOWPLUG_HOST" "0.0.0.0"
  "GLOWPLUG_ALLOWED_HOSTS" (join "," (uniq $names))
  "GLOWPLUG_LOG_JSON" "1"
  "GLOWPLUG_NATS_REPLICAS" (min 3 (int .Values.nats.replicas) | toString)
  "GLOWPLUG_STATE_DIR" "/var/lib/glowplug"
  "MALLOC_ARENA_MAX" "2" -}}
{{- toYaml (merge (deepCopy .Values.settings) $settings) -}}
{{- end }}

{{/* (root, pool) -> settings common to the agent and the prefetcher of a node; a map as YAML */}}
{{- define "glowplug.poolSettings" -}}
{{- $pool := index . 1 -}}
{{- $region := include "glowplug.bytes" $pool.region | int64 -}}
{{- $cache := div (mul $region 9) 10 -}}
{{- with $pool.hostCache -}}
{{- $asked := include "glowplug.bytes" . | int64 -}}
{{- if gt $asked $cache -}}
{{- fail (printf "pools: %s: hostCache is %s, more than nine tenths of its region of %s" $pool.name . $pool.region) -}}
{{- end -}}
{{- $cache = $asked -}}
{{- end -}}
{{- $settings := dict
  "GLOWPLUG_SHM_DIR" "/run/glowplug/shm"
  "GLOWPLUG_HOST_CACHE_BYTES" (toString $cache)
  "GLOWPLUG_GPU_KIND" $pool.gpuKind
  "GLOWPLUG_ENGINES" (join "," $pool.engines) -}}
{{- with $pool.gpuBudgets }}{{ $_ := set $settings "GLOWPLUG_GPU_BUDGETS" . }}{{ end -}}
{{- with $pool.warmEngines }}{{ $_ := set $settings "GLOWPLUG_WARM_ENGINES" (join "," .) }}{{ end -}}
{{- if ne (($pool.disk).type | default "none") "none" -}}
{{- $_ := set $settings "GLOWPLUG_DISK_CACHE_DIR" "/var/lib/glowplug-weights" -}}
{{- $disk := include "glowplug.bytes" $pool.disk.size | int64 -}}
{{- $_ := set $settings "GLOWPLUG_DISK_CACHE_BYTES" (div (mul $disk 9) 10 | toString) -}}
{{- end -}}
{{- toYaml (merge (deepCopy ($pool.settings | default dict)) $settings) -}}
{{- end }}

{{/* nats.conf: alone, or a cluster that keeps every stream three times */}}
{{- define "glowplug.natsConf" -}}
# Listens, keeps and bounds. Users and their rights are in nats-users.conf; passwords come from the environment.
server_name: $POD_NAME
port: 4222
http_port: 8222
pid_file: "/tmp/nats.pid"
max_payload: 4MB
lame_duck_grace_period: 5s
lame_duck_duration: 30s
include nats-users.conf
{{- $replicas := int .Values.nats.replicas }}
{{- if gt $replicas 1 }}
cluster {
  name: glowplug
  listen: "0.0.0.0:6222"
  authorization { user: peer, password: $NATS_PEER_PASSWORD }
  routes: [{{ range $k := until $replicas }}{{ if $k }}, {{ end }}$NATS_ROUTE_{{ $k }}{{ end }}]
  # Clients come back through the Service, which knows who is ready, and not to an address of a pod that is gone.
  no_advertise: true
}
{{- end }}
jetstream {
  store_dir: "/data"
  sync_interval: always
  max_memory_store: 64MB
  max_file_store: {{ .Values.nats.maxFileStore }}
}
{{ end }}
