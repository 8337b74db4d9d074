#!/bin/sh
# Puts the shared libraries of Debian packages below OUT and their records at the end of STATUS.
# usage: libraries.sh STATUS OUT [PACKAGE...]
set -eu
status=$1 out=$2
shift 2
mkdir -p "$out"
[ $# -gt 0 ] || exit 0
for package in "$@"; do
    dpkg-query -s "$package" >/dev/null 2>&1 || missing="${missing:-} $package"
done
if [ -n "${missing:-}" ]; then
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null
fi
for package in "$@"; do
    { dpkg-query -s "$package"; echo; } >>"$status"
    dpkg-query -L "$package" | grep -E '\.so(\.|$)|/copyright$' | while read -r file; do
        mkdir -p "$out$(dirname "$file")"
        cp -a "$file" "$out$file"
    done
done
mkdir -p "$out/var/lib/dpkg"
cp "$status" "$out/var/lib/dpkg/status"
