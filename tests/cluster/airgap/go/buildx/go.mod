module ratchet.test/airgap/buildx

go 1.24.0

require github.com/docker/buildx v0.29.1
