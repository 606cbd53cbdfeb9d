#!/bin/bash
# Runs in a kind node, by way of lib/nodes.sh: `bash -s OWN_CIDR POD_NETWORK PEERS`,
# where PEERS has a line "CIDR ADDRESS" for each other node. Safe to repeat.
set -euo pipefail

readonly own=$1 all=$2 peers=$3
readonly conflist=/etc/cni/net.d/10-ratchet.conflist

cat >"$conflist.new" <<JSON
{
  "cniVersion": "0.4.0",
  "name": "ratchet",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": false,
      "ipam": {
        "type": "host-local",
        "dataDir": "/run/cni-ipam-state",
        "routes": [{"dst": "0.0.0.0/0"}],
        "ranges": [[{"subnet": "$own"}]]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
JSON
mv "$conflist.new" "$conflist"

while read -r cidr address; do
  ip route replace "$cidr" via "$address"
done <<<"$peers"

masquerade=(POSTROUTING -s "$own" ! -d "$all" -j MASQUERADE)
iptables -t nat -C "${masquerade[@]}" 2>/dev/null || iptables -t nat -A "${masquerade[@]}"
