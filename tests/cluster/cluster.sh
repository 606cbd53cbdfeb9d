#!/usr/bin/env bash
# The test cluster: kind with three nodes, a registry, the training operator, an
# S3 server and Prometheus.
#
#   cluster.sh up            creates the cluster, or reuses one that works
#   cluster.sh down          removes it, its registry included
#   cluster.sh env           prints shell exports: eval "$(tests/cluster/cluster.sh env)"
#   cluster.sh load IMAGE    pushes a local image; prints the name to use in a pod
#
# RATCHET_CLUSTER_IMAGES=stock|airgap   published images, or all made from source
#     (default: stock when Docker works and a registry answers, else airgap)
# RATCHET_CLUSTER_STATE   the kubeconfig and rendered files
#     (default ~/.cache/ratchet/cluster)
set -euo pipefail

CLUSTER_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
STATE="${RATCHET_CLUSTER_STATE:-$HOME/.cache/ratchet/cluster}"
CLUSTER=ratchet
REGISTRY_NAME=ratchet-registry
REGISTRY_PORT=5001
REGISTRY=localhost:$REGISTRY_PORT
BUCKET=ratchet
export KUBECONFIG="$STATE/kubeconfig"

log() { printf '[cluster %4ds] %s\n' "$SECONDS" "$*" >&2; }
die() {
  printf '[cluster] ERROR: %s\n' "$*" >&2
  exit 1
}

# wait_for SECONDS WHAT COMMAND...: polls COMMAND until it succeeds.
wait_for() {
  local limit=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || die "waited $limit s for $what"
    sleep 0.3
  done
}

# shellcheck source=lib/images.sh
source "$CLUSTER_DIR/lib/images.sh"
# shellcheck source=lib/nodes.sh
source "$CLUSTER_DIR/lib/nodes.sh"
# shellcheck source=lib/install.sh
source "$CLUSTER_DIR/lib/install.sh"

up() {
  choose_images
  log "images: $MODE"
  provide_images
  create_cluster
  echo "$MODE" >"$STATE/mode"
  connect_pods
  start_registry
  install_all
  wait_for_nodes
  log "the cluster is up; eval \"\$($0 env)\" to use it"
}

# down: by Docker alone, so that it works without the images and the tools, and half made. Kubernetes
# is not asked; the nodes are killed.
down() {
  local nodes
  timeout 10 docker info >/dev/null 2>&1 || die "Docker does not answer: start it, then 'down' again"
  nodes=$(docker ps --all --quiet --filter "label=io.x-k8s.kind.cluster=$CLUSTER")
  # shellcheck disable=SC2086 # one word for each
  timeout 300 docker rm --force --volumes $nodes "$REGISTRY_NAME" >/dev/null 2>&1 || true
  nodes=$(docker ps --all --filter "label=io.x-k8s.kind.cluster=$CLUSTER" --format '{{ .Names }}' | xargs)
  [[ -z $nodes ]] || die "not removed after 300 s: $nodes; 'docker rm --force $nodes' says why"
  docker volume rm --force "$REGISTRY_NAME" >/dev/null 2>&1 || true
  rm -rf "$STATE"/{mode,kubeconfig,kind.yaml,operator,operator.yaml}
}

print_env() {
  choose_images
  cat <<ENV
export RATCHET_CLUSTER_IMAGES='$MODE'
export KUBECONFIG='$KUBECONFIG'
export PATH='${TOOLS:+$TOOLS:}'"\$PATH"
export BASE_IMAGE='$BASE_IMAGE'
export RATCHET_CLUSTER_NAME='$CLUSTER'
# One name for both: docker push to it on this machine, use it in a pod's image.
export RATCHET_CLUSTER_REGISTRY='$REGISTRY'
export RATCHET_CLUSTER_SMALL_IMAGE='$(pod_name "$BUSYBOX_IMAGE")'
export RATCHET_CLUSTER_PYTHON_IMAGE='$(pod_name "$BASE_IMAGE")'
export RATCHET_CLUSTER_S3_ENDPOINT='http://s3.ratchet-infra.svc.cluster.local:8333'
export RATCHET_CLUSTER_S3_ENDPOINT_FROM_HOST='http://127.0.0.1:30833'
export RATCHET_CLUSTER_S3_BUCKET='$BUCKET'
export RATCHET_CLUSTER_S3_ACCESS_KEY_ID='ratchet'
export RATCHET_CLUSTER_S3_SECRET_ACCESS_KEY='ratchet-secret'
export RATCHET_CLUSTER_PROMETHEUS='http://prometheus.ratchet-infra.svc.cluster.local:9090'
export RATCHET_CLUSTER_PROMETHEUS_FROM_HOST='http://127.0.0.1:30909'
ENV
}

main() {
  mkdir -p "$STATE"
  case ${1:-} in
    up | down)
      exec 8>"$STATE/lock"
      flock --nonblock 8 || {
        log "another cluster.sh up or down is at work: this one waits for it"
        flock 8
      }
      "$1"
      ;;
    env) print_env ;;
    load)
      (($# == 2)) || die "load takes one image"
      publish "$2"
      ;;
    *) die "usage: cluster.sh up | down | env | load IMAGE" ;;
  esac
}

main "$@"
