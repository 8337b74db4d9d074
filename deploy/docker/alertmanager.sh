#!/bin/sh
# Writes Alertmanager's configuration and starts it. ALERT_WEBHOOK_URL, which may hold a secret, is read from a file in
# memory, so that no command line has it; without one alerts are kept and shown, and sent nowhere.
# usage: alertmanager.sh [DIRECTORY]    where to write; /tmp where it is a container's own memory
set -eu
umask 077
at=${1:-/tmp}
url=${ALERT_WEBHOOK_URL:-none}
receiver=webhook
[ "$url" != none ] || receiver=shown
printf '%s' "$url" >"$at/webhook-url"
cat >"$at/alertmanager.yml" <<END
route:
  receiver: $receiver
  group_by: [alertname, severity]
  group_wait: 15s
  group_interval: 2m
  repeat_interval: 4h
receivers:
  - name: shown
  - name: webhook
    webhook_configs:
      - url_file: $at/webhook-url
        send_resolved: true
END
exec alertmanager --config.file="$at/alertmanager.yml" --storage.path="$at/alertmanager" --cluster.listen-address=
