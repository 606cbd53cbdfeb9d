#!/bin/bash
# Stands in for runc on a machine that lacks CAP_SYS_RESOURCE. There runc refuses
# any container or exec whose spec asks for it ("unable to apply caps: operation
# not permitted"), so every --privileged one. This removes that one name from the
# spec, then hands over to the real runc.
set -euo pipefail

readonly REAL=${RATCHET_REAL_RUNC:-/usr/sbin/runc}

# strip FILE FILTER: edits FILE in place with a jq filter.
strip() {
  [[ -f $1 ]] || return 0
  jq -c "$2" "$1" >"$1.ratchet"
  cat "$1.ratchet" >"$1"
  rm "$1.ratchet"
}

without='(if .capabilities then .capabilities |= map_values(. - ["CAP_SYS_RESOURCE"]) else . end)'
bundle=$PWD process='' verb='' previous=''
for word in "$@"; do
  case $previous in
    --bundle | -b) bundle=$word ;;
    --process | -p) process=$word ;;
  esac
  case $word in
    --bundle=*) bundle=${word#*=} ;;
    --process=*) process=${word#*=} ;;
    create | run | exec) verb=${verb:-$word} ;;
  esac
  previous=$word
done

case $verb in
  create | run) strip "$bundle/config.json" "if .process then .process |= $without else . end" ;;
  exec) [[ -z $process ]] || strip "$process" "$without" ;;
esac
exec "$REAL" "$@"
