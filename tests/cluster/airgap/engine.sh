# shellcheck shell=bash
# A Docker engine. One that already answers is used as it is; otherwise Debian's
# is installed and dockerd started by hand (no systemd is needed).

docker_works() { timeout 10 docker info; }

lacks_sys_resource() {
  local bounding
  bounding=$(awk '/^CapBnd:/ { print $2 }' /proc/self/status)
  ((!(16#$bounding >> 24 & 1)))
}

engine_up() {
  if docker_works >/dev/null 2>&1; then return 0; fi
  [[ $EUID -eq 0 ]] || die "no Docker engine answers, and only root can start one"
  apt_need docker.io iptables jq ca-certificates

  local flags=()
  if lacks_sys_resource; then
    log "this machine lacks CAP_SYS_RESOURCE: containers run through runc-wrapper.sh"
    install -D -m 755 "$AIRGAP_DIR/runc-wrapper.sh" "$CACHE/engine/runc"
    flags=(--add-runtime "ratchet=$CACHE/engine/runc" --default-runtime ratchet)
  fi
  forget_dead_engine
  mkdir -p "$CACHE/logs"
  log "dockerd starts; its log is $CACHE/logs/dockerd.log"
  # Without the lock's descriptor, which it would hold for as long as it runs.
  setsid nohup dockerd "${flags[@]}" >>"$CACHE/logs/dockerd.log" 2>&1 </dev/null 9>&- &
  local pid=$! end=$((SECONDS + 90))
  until docker_works >/dev/null 2>&1; do
    if ! kill -0 "$pid" 2>/dev/null || ((SECONDS >= end)); then
      tail -n 20 "$CACHE/logs/dockerd.log" >&2
      die "dockerd did not start"
    fi
    sleep 0.2
  done
}

# After a kill the pid files of dockerd and of its containerd stay; when another
# process has such a number now, dockerd would refuse to start.
forget_dead_engine() {
  local file pid
  for file in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
    [[ -f $file ]] || continue
    pid=$(<"$file")
    case $(cat "/proc/$pid/comm" 2>/dev/null || true) in
      dockerd | containerd) die "dockerd (pid $pid) runs but does not answer" ;;
    esac
    rm -f "$file"
  done
}
