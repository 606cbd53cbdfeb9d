# shellcheck shell=bash
# The kind nodes, the registry beside them, and (airgap) the pod network.

readonly POD_NETWORK=10.244.0.0/16
readonly NODE_COUNT=3

# cluster_usable: every node container runs, the API server answers, and it calls
# every node Ready.
cluster_usable() {
  local running ready
  running=$(docker ps --quiet --filter "label=io.x-k8s.kind.cluster=$CLUSTER" | wc -l)
  [[ $running -eq $NODE_COUNT && -f $KUBECONFIG ]] || return
  ready=$(kubectl get nodes --no-headers --request-timeout=5s 2>/dev/null | awk '$2 == "Ready"' | wc -l)
  [[ $ready -eq $NODE_COUNT ]]
}

cluster_exists() { kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; }

# create_cluster: reuses a cluster that works; one that does not (the engine was
# killed under it, say) is made anew.
create_cluster() {
  if cluster_usable; then
    log "the cluster '$CLUSTER' is there"
    return
  fi
  if cluster_exists; then
    log "the cluster '$CLUSTER' does not answer: it is made anew"
    kind delete cluster --name "$CLUSTER" --kubeconfig "$KUBECONFIG" >&2
  fi
  sed "s/OWN_CNI/$OWN_CNI/" "$CLUSTER_DIR/kind.yaml" >"$STATE/kind.yaml"
  # Not --wait: the nodes become Ready only with a pod network.
  kind create cluster --name "$CLUSTER" --image "$NODE_IMAGE" --kubeconfig "$KUBECONFIG" \
    --config "$STATE/kind.yaml" >&2 </dev/null
}

# start_registry: a registry on the nodes' network. The name localhost:PORT means
# it both to the host's engine and, through hosts.toml, to the nodes.
start_registry() {
  local running node
  running=$(docker inspect -f '{{ .State.Running }}' "$REGISTRY_NAME" 2>/dev/null || true)
  if [[ $running != true ]]; then
    docker rm --force "$REGISTRY_NAME" >/dev/null 2>&1 || true
    docker run --detach --restart=unless-stopped --name "$REGISTRY_NAME" \
      --publish "127.0.0.1:$REGISTRY_PORT:5000" --volume "$REGISTRY_NAME:/var/lib/registry" \
      --volume "$CLUSTER_DIR/infra/registry.yml:/etc/ratchet/registry.yml:ro" \
      "$REGISTRY_IMAGE" serve /etc/ratchet/registry.yml >/dev/null
  fi
  docker network connect kind "$REGISTRY_NAME" 2>/dev/null || true
  for node in $(kind get nodes --name "$CLUSTER"); do
    docker exec -i "$node" sh -c 'mkdir -p "$1" && cat >"$1/hosts.toml"' sh \
      "/etc/containerd/certs.d/$REGISTRY" <<<"[host.\"http://$REGISTRY_NAME:5000\"]"
  done
  wait_for 30 "the registry" curl --silent --fail "http://127.0.0.1:$REGISTRY_PORT/v2/"
}

# NODES: one line per node: name, pod network, address.
list_nodes() {
  NODES=$(kubectl get nodes -o jsonpath='{range .items[*]}{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}')
  [[ $(awk 'NF == 3' <<<"$NODES" | wc -l) -eq $NODE_COUNT ]]
}

# connect_pods: a pod network of standard CNI plugins: on each node a veth pair
# per pod (ptp), routes to the other nodes' pods, and masquerading for traffic
# that leaves the pods' network. It stands in for kindnet, without its policies.
connect_pods() {
  [[ $OWN_CNI == true ]] || return 0
  wait_for 60 "the nodes' pod networks" list_nodes
  local node cidr _
  while read -r node cidr _; do
    docker exec -i "$node" bash -seu - "$cidr" "$POD_NETWORK" \
      "$(awk -v self="$node" '$1 != self { print $2, $3 }' <<<"$NODES")" \
      <"$CLUSTER_DIR/lib/node-network.sh"
  done <<<"$NODES"
}

wait_for_nodes() {
  kubectl wait --for=condition=Ready nodes --all --timeout=180s >&2
}
