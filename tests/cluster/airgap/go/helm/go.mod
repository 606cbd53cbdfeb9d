module ratchet.test/airgap/helm

go 1.24.0

require helm.sh/helm/v3 v3.19.2
