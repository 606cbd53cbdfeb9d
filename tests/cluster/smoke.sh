#!/usr/bin/env bash
# Checks the test cluster itself, without Ratchet: nodes, DNS and TCP between
# nodes, the registry, S3, Prometheus, and an elastic PyTorchJob. Run it after
# `cluster.sh up` when a test fails and the cluster is the suspect.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
eval "$(./cluster.sh env)"
readonly NAMESPACE=ratchet-smoke

LOG=$(mktemp)
readonly LOG
trap 'if (($?)); then echo FAILED; tail -n 20 "$LOG"; fi; rm -f "$LOG"' EXIT

# check NAME FUNCTION: a failing command in FUNCTION ends the script.
check() {
  printf '%-56s' "$1 ..."
  "$2" >"$LOG" 2>&1
  echo ok
}

in_pod() { kubectl -n "$NAMESPACE" exec "$@"; }

three_nodes_are_ready() {
  [[ $(kubectl get nodes --no-headers | awk '$2 == "Ready"' | wc -l) -eq 3 ]]
}

# A server on one worker, a client on the other, both from our registry.
pods_start_from_the_registry() {
  local image worker
  image=$(./cluster.sh load "$BASE_IMAGE")
  kubectl delete namespace "$NAMESPACE" --ignore-not-found
  kubectl create namespace "$NAMESPACE"
  for worker in worker worker2; do
    kubectl -n "$NAMESPACE" apply -f - <<YAML
apiVersion: v1
kind: Pod
metadata: {name: on-$worker, labels: {app: on-$worker}}
spec:
  nodeName: $RATCHET_CLUSTER_NAME-$worker
  terminationGracePeriodSeconds: 0
  containers:
    - name: main
      image: $image
      imagePullPolicy: Always
      command: [python3, -m, http.server, "8000"]
      readinessProbe: {tcpSocket: {port: 8000}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: on-$worker}
spec:
  selector: {app: on-$worker}
  ports: [{port: 8000}]
YAML
  done
  kubectl -n "$NAMESPACE" wait --for=condition=Ready pod --all --timeout=120s
}

# fetch FROM HOST: an HTTP request from pod FROM.
fetch() {
  in_pod "$1" -- python3 -c \
    "import urllib.request as u; print(u.urlopen('$2', timeout=10).status)"
}

pods_reach_each_other_by_address() {
  fetch on-worker "http://$(kubectl -n "$NAMESPACE" get pod on-worker2 -o jsonpath='{.status.podIP}'):8000"
  fetch on-worker2 "http://$(kubectl -n "$NAMESPACE" get pod on-worker -o jsonpath='{.status.podIP}'):8000"
}

pods_reach_services_by_name() {
  local from to
  for from in on-worker on-worker2; do
    for to in on-worker on-worker2; do fetch "$from" "http://$to:8000"; done
  done
}

# Signed with nothing but the standard library would be long; botocore is not in
# the base image. So: put and get through the S3 API with a presigned URL made here.
s3_stores_and_returns() {
  local path=/$RATCHET_CLUSTER_S3_BUCKET/smoke-$$ put get
  put=$(presign PUT "$path")
  get=$(presign GET "$path")
  in_pod on-worker -- python3 -c "
import urllib.request as u
body = b'ratchet' * 100000
u.urlopen(u.Request('$put', data=body, method='PUT'), timeout=20)
assert u.urlopen('$get', timeout=20).read() == body"
}

# presign METHOD PATH: an S3 URL with a version 4 signature in its query.
presign() {
  python3 - "$1" "$2" <<'PY'
import hashlib, hmac, os, sys, time
from urllib.parse import quote, urlparse

method, path = sys.argv[1:]
env = os.environ
endpoint = env["RATCHET_CLUSTER_S3_ENDPOINT"]
host, now = urlparse(endpoint).netloc, time.gmtime()
day, stamp = time.strftime("%Y%m%d", now), time.strftime("%Y%m%dT%H%M%SZ", now)
scope = f"{day}/us-east-1/s3/aws4_request"
query = "&".join(f"{k}={quote(v, safe='')}" for k, v in sorted({
    "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
    "X-Amz-Credential": f"{env['RATCHET_CLUSTER_S3_ACCESS_KEY_ID']}/{scope}",
    "X-Amz-Date": stamp, "X-Amz-Expires": "300", "X-Amz-SignedHeaders": "host"}.items()))
request = f"{method}\n{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
key = ("AWS4" + env["RATCHET_CLUSTER_S3_SECRET_ACCESS_KEY"]).encode()
for part in (day, "us-east-1", "s3", "aws4_request"):
    key = hmac.new(key, part.encode(), hashlib.sha256).digest()
print(f"{endpoint}{path}?{query}&X-Amz-Signature={hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}")
PY
}

prometheus_answers() {
  local query='/api/v1/query?query=up'
  fetch on-worker "$RATCHET_CLUSTER_PROMETHEUS$query"
  curl --silent --fail "$RATCHET_CLUSTER_PROMETHEUS_FROM_HOST$query" | grep -q '"success"'
}

# Two workers that find worker-0's name and port, as torchrun's rendezvous does.
an_elastic_job_succeeds() {
  kubectl -n "$NAMESPACE" apply -f - <<YAML
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: elastic}
spec:
  nprocPerNode: "1"
  elasticPolicy: {minReplicas: 1, maxReplicas: 3, rdzvBackend: c10d}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          topologySpreadConstraints:
            - maxSkew: 1
              topologyKey: kubernetes.io/hostname
              whenUnsatisfiable: DoNotSchedule
              labelSelector: {matchLabels: {training.kubeflow.org/job-name: elastic}}
          containers:
            - name: pytorch
              image: $RATCHET_CLUSTER_PYTHON_IMAGE
              command: [python3, -c]
              args:
                - |
                  import os, socket, time
                  name, port = os.environ["PET_RDZV_ENDPOINT"].rsplit(":", 1)
                  if socket.gethostname() == name:
                      with socket.create_server(("", int(port))) as server:
                          print("met", server.accept()[1])
                  else:
                      for _ in range(100):
                          try:
                              print("met", socket.create_connection((name, int(port)), 2))
                              break
                          except OSError as error:
                              print(error)
                              time.sleep(0.3)
                      else:
                          raise SystemExit("worker-0 was not found")
YAML
  kubectl -n "$NAMESPACE" wait --for=condition=Succeeded pytorchjob/elastic --timeout=120s
}

check "three nodes are Ready" three_nodes_are_ready
check "pods start from an image in the registry" pods_start_from_the_registry
check "pods on two nodes reach each other by address" pods_reach_each_other_by_address
check "pods reach services by name" pods_reach_services_by_name
check "S3 stores an object and returns it" s3_stores_and_returns
check "an elastic PyTorchJob on two nodes succeeds" an_elastic_job_succeeds
check "Prometheus answers inside and outside" prometheus_answers
kubectl delete namespace "$NAMESPACE" --wait=false >/dev/null
