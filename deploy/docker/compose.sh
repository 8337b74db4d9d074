#!/bin/sh
# Brings the fleet of deploy/docker-compose.yml up and says where it is, or takes it down.
# usage: compose.sh up|down [OPTION...]      options that start with --profile go before the verb, others after it
set -eu
cd "$(dirname "$0")/../.."
verb=$1
shift
if docker compose version >/dev/null 2>&1; then
    compose() { docker compose --env-file .env "$@"; }
elif command -v docker-compose >/dev/null; then
    compose() { docker-compose --env-file .env "$@"; }
else
    echo "glowplug: neither docker compose nor docker-compose is installed" >&2
    exit 1
fi
docker info >/dev/null 2>&1 || { echo "glowplug: no container engine answers (is docker running, may you use it?)" >&2; exit 1; }
[ -f .env ] || { echo "glowplug: there is no .env: run make env" >&2; exit 1; }

profiles=
while [ "${1:-}" = --profile ]; do
    profiles="$profiles --profile $2"
    shift 2
done
setting() { sed -n "s/^$1=//p" .env | tail -n 1; }

# shellcheck disable=SC2086
case $verb in
    down) compose --profile gpu down "$@" ;;
    up)
        compose $profiles up -d "$@"
        running=$(compose $profiles ps --services --filter status=running)
        told() { # SERVICE ADDRESS PORT LABEL MORE: a line for a service that runs
            case " $(echo $running) " in *" $1 "*) printf '%-13s http://%s:%s%s\n' "$4" "$(setting "$2")" "$(setting "$3")" "$5" ;; esac
        }
        echo
        told console CONSOLE_BIND_ADDRESS CONSOLE_PORT console ""
        told router API_BIND_ADDRESS ROUTER_PORT "OpenAI API" "   (key: GLOWPLUG_API_KEY in .env)"
        told grafana OBSERVABILITY_BIND_ADDRESS GRAFANA_PORT Grafana "   (admin, GRAFANA_PASSWORD in .env)"
        told jaeger OBSERVABILITY_BIND_ADDRESS JAEGER_PORT Jaeger ""
        told prometheus OBSERVABILITY_BIND_ADDRESS PROMETHEUS_PORT Prometheus ""
        told alertmanager OBSERVABILITY_BIND_ADDRESS ALERTMANAGER_PORT Alertmanager ""
        case " $(echo $running) " in *" router "*) ;; *) exit 0 ;; esac
        cat <<TEXT

. ./.env; curl -N http://$(setting API_BIND_ADDRESS):$(setting ROUTER_PORT)/v1/chat/completions \\
  -H "Authorization: Bearer \$GLOWPLUG_API_KEY" -H 'Content-Type: application/json' \\
  -d '{"model": "smol-chat", "stream": true, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
TEXT
        ;;
    *) sed -n '3p' "$0" >&2; exit 2 ;;
esac
