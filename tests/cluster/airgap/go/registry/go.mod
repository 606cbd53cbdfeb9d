module ratchet.test/airgap/registry

go 1.24.0

require github.com/distribution/distribution/v3 v3.0.0
