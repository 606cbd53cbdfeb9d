#!/usr/bin/env bash
# Builds the S3 servers that are Go programs, MinIO and versitygw, from source into the cache
# (~/.cache/ratchet/airgap/bin), where tests/servers/others.py finds them. go/NAME/go.mod says which
# version. Needs Go 1.26, or pip to fetch it; the first call takes minutes, later ones nothing.
set -euo pipefail

AIRGAP_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/airgap/lib.sh
source "$AIRGAP_DIR/../cluster/airgap/lib.sh"
# shellcheck source=tests/cluster/airgap/tools.sh
source "$AIRGAP_DIR/../cluster/airgap/tools.sh"

mkdir -p "$CACHE/bin"
go_program versitygw '' '' versitygw=github.com/versity/versitygw/cmd/versitygw
link_tool versitygw
go_program minio '' '' minio=github.com/minio/minio
link_tool minio
