#!/bin/sh
# What an image is made of: its size, its layers and its largest packages, in MB.
#
#   image/contents.sh IMAGE
set -eu
IMAGE=${1:?usage: image/contents.sh IMAGE}

docker image inspect --format '{{ .Size }} {{ .Id }}' "$IMAGE" |
    awk -v image="$IMAGE" '{ printf "%s  %.0f MB  %s\n\nlayers (MB), from the top\n", image, $1 / 1e6, $2 }'
docker history --no-trunc --human=false --format '{{ .Size }}\t{{ .CreatedBy }}' "$IMAGE" |
    awk -F '\t' '$1 > 0 { sub(/ # buildkit.*/, "", $2); printf "  %8.1f  %s\n", $1 / 1e6, substr($2, 1, 90) }'

echo 'packages (MB), the largest; bytecode included'
docker run --rm --network none --entrypoint sh "$IMAGE" -c '
    cd "$(python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))")"
    du -sB 1 -- * | sort -rn | head -n 12' |
    awk '{ printf "  %8.1f  %s\n", $1 / 1e6, $2 }'
