module ratchet.test/airgap/kubeconform

go 1.24.0

require github.com/yannh/kubeconform v0.7.0
