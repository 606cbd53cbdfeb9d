# shellcheck shell=bash disable=SC2034
# The one switch: where the cluster's images and tools come from. Everything
# after `choose_images` is the same for both. The other rooms use the variables.

# choose_images: sets MODE and the image variables.
#   stock   the published images and the tools on PATH
#   airgap  both made from source by airgap/build.sh
choose_images() {
  MODE=${RATCHET_CLUSTER_IMAGES:-}
  if [[ -z $MODE && -f $STATE/mode ]]; then MODE=$(<"$STATE/mode"); fi
  if [[ -z $MODE ]]; then MODE=$(detect_mode); fi
  case $MODE in
    stock) stock_images ;;
    airgap) airgap_images ;;
    *) die "RATCHET_CLUSTER_IMAGES is '$MODE'; it can be stock or airgap" ;;
  esac
}

# Stock, when Docker works and a registry answers quickly. A registry that asks
# for credentials (401) has answered.
detect_mode() {
  local code
  if timeout 10 docker info >/dev/null 2>&1; then
    code=$(curl --silent --max-time 5 --output /dev/null --write-out '%{http_code}' \
      https://registry-1.docker.io/v2/ 2>/dev/null || true)
    if [[ $code == 200 || $code == 401 ]]; then
      echo stock
      return
    fi
  fi
  echo airgap
}

stock_images() {
  NODE_IMAGE=kindest/node:v1.34.0
  BASE_IMAGE=python:3.11-slim-bookworm
  BUSYBOX_IMAGE=busybox:1.36
  INIT_IMAGE=alpine:3.10 # the operator's own choice
  S3_IMAGE=chrislusf/seaweedfs:4.48
  PROMETHEUS_IMAGE=prom/prometheus:v3.13.5
  REGISTRY_IMAGE=registry:2
  OPERATOR_IMAGE=ghcr.io/kubeflow/training-v1/training-operator:v1-d6eb98e
  OPERATOR_MANIFESTS="https://github.com/kubeflow/trainer.git//manifests/overlays/standalone?ref=v1.9.3"
  OWN_CNI=false
  TOOLS=
}

airgap_images() {
  local made
  made=$("$CLUSTER_DIR/airgap/build.sh" env)
  eval "$made"
  OWN_CNI=true
  PATH="$TOOLS:$PATH"
}

# provide_images: makes (airgap) what the cluster starts from, or checks (stock)
# that the tools are there. Sets nothing.
provide_images() {
  if [[ $MODE == airgap ]]; then
    # Without this script's lock: the engine that it may start would hold it.
    "$CLUSTER_DIR/airgap/build.sh" 8>&-
    return
  fi
  local tool
  for tool in docker kind kubectl git; do
    command -v "$tool" >/dev/null ||
      die "$tool is not on PATH; install it, or set RATCHET_CLUSTER_IMAGES=airgap to build it"
  done
  pull "$NODE_IMAGE"
  pull "$REGISTRY_IMAGE"
  pull "$BASE_IMAGE"
}

# pull IMAGE: makes sure that the engine has a published image.
pull() {
  local said
  docker image inspect "$1" >/dev/null 2>&1 || said=$(docker pull --quiet "$1" 2>&1) ||
    die "can't pull $1: ${said##*$'\n'} (a limit for unnamed users? docker login helps; RATCHET_CLUSTER_IMAGES=airgap needs no registry)"
}

# registry_name IMAGE: IMAGE's name in our registry. A name that has a registry of
# its own keeps only its path.
registry_name() {
  local path=$1 first=${1%%/*}
  if [[ $path == */* && ($first == *.* || $first == *:* || $first == localhost) ]]; then
    path=${path#*/}
  fi
  echo "$REGISTRY/$path"
}

# publish IMAGE: pushes a local image to our registry; prints its name there.
publish() {
  local reference
  reference=$(registry_name "$1")
  [[ $reference == "$1" ]] || docker tag "$1" "$reference"
  docker push --quiet "$reference" >&2
  echo "$reference"
}

# pod_name IMAGE: an infrastructure image's name in a pod. Published images are
# pulled from where they are; those made here come from our registry.
pod_name() {
  if [[ $MODE == airgap ]]; then registry_name "$1"; else echo "$1"; fi
}

# offer IMAGE: makes sure that a pod can pull pod_name IMAGE; prints that name.
offer() {
  if [[ $MODE == airgap ]]; then publish "$1"; else echo "$1"; fi
}
