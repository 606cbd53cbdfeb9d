#!/bin/sh
# `make image`: build the image, then say how large it is and what it is made of.
#
#   IMAGE            its name                                   (ratchet:dev)
#   BASE_IMAGE       what it is built on                        (the Dockerfile's own, python:*-slim; where
#                    no registry answers, the test cluster's)
#   ACCELERATOR      cpu or cuda                                (cpu)
#   RATCHET_WHEELS   a folder of wheels to look into first      (../shared/wheels, if it is there)
#   CA_BUNDLE        certificates for pip behind a proxy        (the machine's own)
set -eu
cd "$(dirname "$0")/.."

IMAGE=${IMAGE:-ratchet:dev}
BASE_IMAGE=${BASE_IMAGE:-}
WHEELS=${RATCHET_WHEELS:-../shared/wheels}
CA_BUNDLE=${CA_BUNDLE:-/etc/ssl/certs/ca-certificates.crt}

say() { echo "image: $*" >&2; }

# The test cluster knows whether a registry answers, and makes a base where none does.
if [ -z "$BASE_IMAGE" ]; then
    made=$(tests/cluster/cluster.sh env) && eval "$made"
    if [ "$RATCHET_CLUSTER_IMAGES" = airgap ]; then
        say "no registry answers: on $BASE_IMAGE, made from Debian's packages (tests/cluster/airgap)"
        if ! docker buildx version >/dev/null 2>&1 || ! docker image inspect "$BASE_IMAGE" >/dev/null 2>&1; then
            tests/cluster/airgap/build.sh engine tools images
        fi
    fi
fi

set -- --build-arg "BASE_IMAGE=$BASE_IMAGE" --build-arg "ACCELERATOR=${ACCELERATOR:-cpu}"
[ ! -f "$CA_BUNDLE" ] || set -- "$@" --secret "id=ca,src=$CA_BUNDLE"

# As an image, because older engines take no second build context.
if [ "${ACCELERATOR:-cpu}" = cpu ] && ls "$WHEELS"/torch-*.whl >/dev/null 2>&1; then
    say "torch from $WHEELS"
    printf 'FROM scratch\nCOPY torch-*.whl /\n' | docker buildx build --quiet --load -t ratchet-wheels -f - "$WHEELS" >/dev/null
    set -- "$@" --build-arg WHEELS=ratchet-wheels
fi

# Without provenance: it names the moment of the build, so no two builds would be equal.
docker buildx build --load --provenance=false "$@" --tag "$IMAGE" \
    --build-arg "VERSION=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' trainer/__init__.py)" \
    --build-arg "REVISION=$(git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null || echo unknown)" \
    --build-arg "CREATED=$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || echo 1970-01-01T00:00:00Z)" .

image/contents.sh "$IMAGE"
