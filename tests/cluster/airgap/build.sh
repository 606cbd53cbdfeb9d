#!/usr/bin/env bash
# Makes a kind cluster's parts from source on a machine that reaches package
# registries (Debian, PyPI, Go modules) but no image registry: the Docker engine,
# the tools, and every image. Everything lands in a cache, so that only the first
# call takes long (about 20 minutes on two cores); a failed one goes on where it
# stopped.
#
#   build.sh [engine|tools|images|node|all]...      (default: all)
#   build.sh env                                    what was made, as shell variables
#
# RATCHET_AIRGAP_CACHE   the cache (default ~/.cache/ratchet/airgap)
set -euo pipefail

AIRGAP_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
source "$AIRGAP_DIR/lib.sh"
# shellcheck source=engine.sh
source "$AIRGAP_DIR/engine.sh"
# shellcheck source=tools.sh
source "$AIRGAP_DIR/tools.sh"
# shellcheck source=images.sh
source "$AIRGAP_DIR/images.sh"
# shellcheck source=node.sh
source "$AIRGAP_DIR/node.sh"
# shellcheck source=operator.sh
source "$AIRGAP_DIR/operator.sh"

# Takes no lock: it must answer while another call builds.
print_env() {
  cat <<ENV
TOOLS='$CACHE/bin'
NODE_IMAGE='$(node_image)'
BASE_IMAGE='$PYTHON_IMAGE'
BUSYBOX_IMAGE='$BUSYBOX_IMAGE'
INIT_IMAGE='$INIT_IMAGE'
S3_IMAGE='$S3_IMAGE'
PROMETHEUS_IMAGE='$PROMETHEUS_IMAGE'
REGISTRY_IMAGE='$REGISTRY_IMAGE'
OPERATOR_IMAGE='$(operator_image)'
OPERATOR_MANIFESTS='$(operator_manifests)'
ENV
}

make_part() {
  case $1 in
    engine) engine_up ;;
    tools) tools_up ;;
    images) images_up ;;
    node) node_up ;;
    all)
      engine_up
      tools_up
      images_up
      node_up
      docker image prune --force --filter label=ratchet.recipe >/dev/null
      ;;
    *) die "unknown part '$1': engine, tools, images, node or all" ;;
  esac
}

main() {
  [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] || die "only Linux on x86_64"
  mkdir -p "$CACHE"
  if [[ ${1:-} == env ]]; then
    print_env
    return
  fi
  # One build at a time; a second caller waits and then finds everything made.
  exec 9>"$CACHE/lock"
  flock 9
  rm -rf "$CACHE/tmp"
  apt_need ca-certificates curl jq
  export PATH="$CACHE/bin:$PATH"
  (($#)) || set -- all
  local part
  for part in "$@"; do make_part "$part"; done
}

main "$@"
