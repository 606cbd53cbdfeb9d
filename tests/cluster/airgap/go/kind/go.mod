module ratchet.test/airgap/kind

go 1.24.0

require sigs.k8s.io/kind v0.33.0
