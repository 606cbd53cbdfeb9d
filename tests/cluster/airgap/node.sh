# shellcheck shell=bash
# The kind node image: Debian with systemd, the files of kind's own base image
# (from kind's Go module), containerd, kubelet and kubeadm, and a containerd
# content store that already holds the images of the control plane.

readonly PAUSE_VERSIONS=(3.10 3.10.1) # kind's containerd configuration, kubeadm
readonly NODE_PACKAGES=systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,e2fsprogs,ca-certificates,curl,jq,procps,socat,runc,containernetworking-plugins

node_image() { echo "ratchet-airgap/node:$(go_version kubernetes)"; }

node_up() {
  local kubernetes containerd crictl images=() hash
  build_kubernetes
  kubernetes=$BUILT
  build_containerd
  containerd=$BUILT
  build_crictl
  crictl=$BUILT
  control_plane_images "$kubernetes"
  rootfs node "$NODE_PACKAGES"
  hash=$(recipe "$AIRGAP_DIR/node.sh" "$AIRGAP_DIR/node.Dockerfile" "$AIRGAP_DIR/runc-wrapper.sh" \
    "$(cache_names "$ROOTFS" "$kubernetes" "$containerd" "$crictl")" "$(go_version kind)" \
    "$(docker image inspect -f '{{ .Id }}' "${images[@]}")")
  ! image_is "$(node_image)" "$hash" || return 0

  rootfs_image "ratchet-airgap/node-root:$SUITE"
  local context
  context=$(new_dir)
  mkdir -p "$context/bin" "$context/kube" "$context/files"
  cp -r --no-preserve=mode "$(module_dir kind)/images/base/files/." "$context/files/"
  cp "$containerd"/* "$crictl"/* "$context/bin/"
  cp "$kubernetes"/{kubeadm,kubectl,kubelet} "$context/kube/"
  install -m 755 "$AIRGAP_DIR/runc-wrapper.sh" "$context/runc"
  go_version kubernetes | tr -d '\n' >"$context/version"
  step node-store content_store "$containerd" "$context/store" "${images[@]}"
  cp "$AIRGAP_DIR/node.Dockerfile" "$context/Dockerfile"
  build_image "$(node_image)" "$hash" "$context"
}

# control_plane_images KUBERNETES: appends to the caller's `images`.
control_plane_images() {
  local name version tag wanted etcd coredns
  version=$(go_version kubernetes)
  wanted=$("$1/kubeadm" config images list --kubernetes-version "$version" 2>/dev/null)
  etcd=$(grep /etcd: <<<"$wanted")
  coredns=$(grep /coredns: <<<"$wanted")
  for name in kube-apiserver kube-controller-manager kube-scheduler; do
    scratch_image "registry.k8s.io/$name:$version" "$name" "$1/$name"
    images+=("registry.k8s.io/$name:$version")
  done
  rootfs kube-proxy iptables,conntrack,kmod
  rootfs_image "ratchet-airgap/kube-proxy-root:$SUITE"
  binary_image "ratchet-airgap/kube-proxy-root:$SUITE" "registry.k8s.io/kube-proxy:$version" \
    kube-proxy "$1/kube-proxy"
  build_etcd
  scratch_image "$etcd" etcd "$BUILT/etcd"
  build_coredns
  scratch_image "$coredns" coredns "$BUILT/coredns"
  images+=("registry.k8s.io/kube-proxy:$version" "$etcd" "$coredns")
  build_pause
  for tag in "${PAUSE_VERSIONS[@]}"; do
    scratch_image "registry.k8s.io/pause:$tag" pause "$BUILT/pause"
    images+=("registry.k8s.io/pause:$tag")
  done
}

build_pause() {
  local new
  BUILT="$CACHE/pause-$(recipe "$AIRGAP_DIR/pause.c")"
  [[ ! -d $BUILT ]] || return 0
  apt_need gcc libc6-dev
  new=$(new_dir)
  step pause gcc -Os -static -s -o "$new/pause" "$AIRGAP_DIR/pause.c"
  install_dir "$new" "$BUILT"
}

# content_store CONTAINERD DIR IMAGE...: a containerd root folder that holds the
# images as content, not unpacked, just as `kind build node-image` leaves it.
content_store() (
  local bin=$1 store=$2 state pid
  shift 2
  state=$(mktemp -d)
  printf 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n' >"$state/config.toml"
  "$bin/containerd" --config "$state/config.toml" --root "$store" --state "$state/run" \
    --address "$state/sock" &
  pid=$!
  trap 'kill "$pid"; wait "$pid"; rm -rf "$state"' EXIT
  wait_for 30 containerd "$bin/ctr" --address "$state/sock" version
  docker save "$@" | "$bin/ctr" --address "$state/sock" --namespace k8s.io \
    images import --no-unpack --digests - || return
  "$bin/ctr" --address "$state/sock" --namespace k8s.io images list -q
)
