#!/bin/sh
# Makes a stand-in for the base image of deploy/docker/Dockerfile where no registry can be reached: Debian bookworm with its
# own Python 3.11. The certificates and pip's configuration of this machine go along, so that pip works inside a build.
# For tests only: never push such an image, nor one built from it.
# usage: base_image.sh TAG      needs root, mmdebstrap or debootstrap, and a container engine
set -eu
tag=$1
docker=${DOCKER:-docker}
# In memory where there is room: dpkg waits for the disk after each file, which is two thirds of the time.
free=$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
if [ "${free:-0}" -gt 2000000 ]; then root=$(mktemp -d -p /dev/shm); else root=$(mktemp -d); fi
trap 'rm -rf "$root" "$root.log"' EXIT
packages=python3,python3-pip,ca-certificates
if command -v mmdebstrap >/dev/null; then  # the same for less work
    make_root() { mmdebstrap --quiet --mode=root --format=directory --variant=minbase --include="$packages" bookworm "$root"; }
else
    make_root() { debootstrap --variant=minbase --include="$packages" bookworm "$root"; }
fi
make_root >"$root.log" 2>&1 || { tail -n 5 "$root.log" >&2; exit 1; }
rm -rf "$root/etc/ssl/certs" "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
cp -rL /etc/ssl/certs "$root/etc/ssl/certs"
[ ! -f /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/pip.conf"
ln -sf python3 "$root/usr/bin/python"
ln -sf pip3 "$root/usr/bin/pip"
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
tar -C "$root" -c . | "$docker" import --change 'CMD ["python3"]' - "$tag" >/dev/null
