# shellcheck shell=bash
# What runs in the cluster beside the tests: the training operator, an S3 server
# with a bucket, Prometheus.

apply() { kubectl apply --server-side --force-conflicts -f - >/dev/null; }

# operator_yaml: the operator's standalone manifests with the chosen images, and a
# readiness probe that does not wait 10 s first.
operator_yaml() {
  local dir=$STATE/operator base=$OPERATOR_MANIFESTS init
  init=$(offer "$INIT_IMAGE")
  rm -rf "$dir"
  mkdir -p "$dir"
  [[ $base != /* ]] || base=$(realpath --relative-to="$dir" "$base")
  cat >"$dir/kustomization.yaml" <<YAML
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - $base
images:
  - name: ghcr.io/kubeflow/training-v1/training-operator
    newName: ${1%:*}
    newTag: ${1##*:}
patches:
  - target: {kind: Deployment, name: training-operator}
    patch: |
      - op: add
        path: /spec/template/spec/containers/0/args
        value: ["--pytorch-init-container-image=$init"]
      - op: replace
        path: /spec/template/spec/containers/0/readinessProbe/initialDelaySeconds
        value: 1
      - op: replace
        path: /spec/template/spec/containers/0/readinessProbe/periodSeconds
        value: 1
YAML
  kubectl kustomize "$dir"
}

# install_all: what is there already, by its signature, is left as it is.
install_all() {
  local now
  now=$(signature)
  if [[ $(kubectl -n ratchet-infra get configmap installed -o 'jsonpath={.data.signature}' 2>/dev/null) != "$now" ]]; then
    install_parts
    kubectl -n ratchet-infra create configmap installed --from-literal="signature=$now" \
      --dry-run=client -o yaml | apply
  fi
  available kube-system coredns
  available kubeflow training-operator
  available ratchet-infra s3
  available ratchet-infra prometheus
  wait_for 60 "the operator's webhook" a_job_is_accepted
  wait_for 60 "the bucket $BUCKET" make_bucket
}

# signature: a hash of all that install_parts depends on.
signature() {
  local images=("$OPERATOR_IMAGE" "$S3_IMAGE" "$PROMETHEUS_IMAGE" "$BASE_IMAGE" "$BUSYBOX_IMAGE" "$INIT_IMAGE")
  {
    printf '%s\n' "${images[@]}" "$OPERATOR_MANIFESTS"
    [[ $MODE != airgap ]] || docker image inspect -f '{{ .Id }}' "${images[@]}"
    cat "$CLUSTER_DIR"/infra/* "$CLUSTER_DIR/lib/install.sh"
  } | sha256sum | cut -c1-16
}

install_parts() {
  local operator s3 prometheus
  operator=$(offer "$OPERATOR_IMAGE")
  s3=$(offer "$S3_IMAGE")
  prometheus=$(offer "$PROMETHEUS_IMAGE")
  offer "$BASE_IMAGE" >/dev/null
  offer "$BUSYBOX_IMAGE" >/dev/null

  operator_yaml "$operator" >"$STATE/operator.yaml"
  apply <"$STATE/operator.yaml"
  apply <"$CLUSTER_DIR/infra/namespace.yaml"
  sed "s#image-of-s3#$s3#" "$CLUSTER_DIR/infra/s3.yaml" | apply
  sed "s#image-of-prometheus#$prometheus#" "$CLUSTER_DIR/infra/prometheus.yaml" | apply
}

# available NAMESPACE DEPLOYMENT
available() {
  kubectl -n "$1" rollout status "deployment/$2" --timeout=180s >&2 || {
    kubectl -n "$1" get pods -o wide >&2
    kubectl -n "$1" logs "deployment/$2" --tail=20 >&2 || true
    die "deployment $1/$2 is not Available. $(kubectl -n "$1" get pods -o \
      'jsonpath={range .items[*].status.containerStatuses[*].state.waiting}{.reason}: {.message} {end}')"
  }
}

# The webhook answers a little after the Deployment is Available.
a_job_is_accepted() {
  kubectl create --dry-run=server -f - <<'YAML'
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: probe, namespace: default}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 1
      template:
        spec:
          containers: [{name: pytorch, image: none}]
YAML
}

weed_shell() { kubectl -n ratchet-infra exec -i deployment/s3 -- weed shell; }

make_bucket() {
  weed_shell <<<"s3.bucket.list" | grep -qw "$BUCKET" ||
    { weed_shell <<<"s3.bucket.create -name $BUCKET" && weed_shell <<<"s3.bucket.list" | grep -qw "$BUCKET"; }
}
