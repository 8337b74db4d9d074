#!/bin/sh
# Holds the wire contract: lint, and no change that breaks a reader of what the last commit wrote.
# Usage: proto/check.sh [GIT-REF]   (default HEAD)
set -eu
cd "$(dirname "$0")/.."
ref=${1:-HEAD}
buf=${BUF:-}
for candidate in .venv/bin/buf "$(command -v buf || true)"; do
    [ -z "$buf" ] && [ -x "$candidate" ] && buf=$candidate
done
if [ -z "$buf" ]; then
    echo "proto: buf is not installed (no wheel for this platform); tests/contract/test_proto.py still compiles the contract"
    exit 0
fi
"$buf" lint proto
if git cat-file -e "$ref:proto/buf.yaml" 2>/dev/null; then
    before=$(mktemp -d)
    trap 'rm -rf "$before"' EXIT
    git archive "$ref" proto | tar -x -C "$before"
    "$buf" breaking proto --against "$before/proto"
    echo "proto: lint clean, nothing breaks readers of $ref"
else
    echo "proto: lint clean, no earlier contract to compare with"
fi
