module ratchet.test/airgap/crictl

go 1.24.1

require sigs.k8s.io/cri-tools v1.34.0
