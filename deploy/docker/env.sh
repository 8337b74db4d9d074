#!/bin/sh
# Makes .env from .env.example, readable by its owner alone. Empty secrets are generated. Settings that .env
# has stay unchanged; new ones of .env.example are added at its end.
# usage: env.sh [TARGET]
set -eu
cd "$(dirname "$0")/../.."
target=${1:-.env}
umask 077
# Letters first: the configuration of NATS would read digits as a number.
secret() { printf gp; od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
is_new=$([ -s "$target" ] || echo yes)
touch "$target"
added=0
while IFS= read -r line; do
    name=${line%%=*}
    case $line in
        '#'* | '') [ -z "$is_new" ] || printf '%s\n' "$line" >>"$target" ;;
        *=) grep -q "^$name=." "$target" || { printf '%s%s\n' "$line" "$(secret)" >>"$target"; added=$((added + 1)); } ;;
        *) grep -q "^$name=" "$target" || { printf '%s\n' "$line" >>"$target"; added=$((added + 1)); } ;;
    esac
done <.env.example
if [ "$added" -eq 0 ]; then echo "$target has every setting"; else echo "$target: $added settings written"; fi
