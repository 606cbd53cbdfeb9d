#!/usr/bin/env bash
# Checks a built image as a cluster would run it: a user id it has never heard of, group 0, no
# capabilities, a read-only root file system with nothing writable but /tmp.
#
#   image/smoke.sh IMAGE
set -euo pipefail
IMAGE=${1:?usage: image/smoke.sh IMAGE}
NAME=ratchet-smoke-$$
LOG=$(mktemp)
trap 'if (($?)); then echo FAILED; tail -n 30 "$LOG"; fi; rm -f "$LOG"; docker rm --force "$NAME" >/dev/null 2>&1' EXIT

RESTRICTED=(--read-only --user 12345:0 --cap-drop ALL --security-opt no-new-privileges --tmpfs /tmp)
STORE=(--store.url file:///tmp/store)

# in_pod OPTION... -- WORD...: run the image, options of docker before the dashes.
in_pod() {
  local options=()
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  docker run --rm --name "$NAME" "${RESTRICTED[@]}" "${options[@]}" "$IMAGE" "$@"
}

# check NAME FUNCTION: a failing command in FUNCTION ends the script.
check() {
  printf '%-64s' "$1 ..."
  "$2" >"$LOG" 2>&1
  echo ok
}

the_doctor_finds_nothing_wrong() { in_pod -- doctor "${STORE[@]}"; }

a_short_run_ends_complete() {
  in_pod -- run digits "${STORE[@]}" --train.epochs 2 | tee /dev/stderr | grep -q '"exit_code": 0'
}

the_working_folder_is_group_0s() {
  docker run --rm --user 12345:0 --cap-drop ALL --entrypoint sh "$IMAGE" -c 'touch /work/here && test -w /tmp'
}

the_user_is_a_number_and_not_root() {
  [[ $(docker image inspect --format '{{ .Config.User }}' "$IMAGE") =~ ^[1-9][0-9]*:0$ ]]
}

pid_1_is_an_init_that_passes_signals_on() {
  docker run --detach --name "$NAME" "${RESTRICTED[@]}" "$IMAGE" run digits "${STORE[@]}" --train.epochs 100000
  for _ in {1..300}; do
    docker logs "$NAME" 2>&1 | grep -q '"event": "step"' && break
    sleep 0.2
  done
  docker top "$NAME" -o pid,args | sed -n 2p | grep -q /usr/bin/tini
  docker stop --time 60 "$NAME"
  docker logs "$NAME" 2>&1 | tail -n 5
  [[ $(docker inspect --format '{{ .State.ExitCode }}' "$NAME") == 143 ]]
  docker logs "$NAME" 2>&1 | grep -q '"event": "checkpoint committed"'
  docker rm "$NAME"
}

nothing_can_be_installed_or_compiled() {
  # shellcheck disable=SC2016 # the container's shell expands it
  in_pod --entrypoint sh -- -c '
    for program in pip pip3 gcc cc make uv; do ! command -v "$program" || exit 1; done
    for python in python /usr/bin/python3 /usr/local/bin/python3; do
      test ! -x "$python" || ! "$python" -c "import pip" || exit 1
    done
    ! python -c "import pip" && test ! -e /root/.cache'
}

bytecode_is_there_already() {
  in_pod --entrypoint python -- -c '
import pathlib, torch, trainer
for package in (torch, trainer):
    path = pathlib.Path(package.__file__)
    assert list((path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc")), path'
}

check "ratchet doctor: any user id, read-only root" the_doctor_finds_nothing_wrong
check "digits trains to the end" a_short_run_ends_complete
check "SIGTERM to PID 1: a checkpoint, then exit code 143" pid_1_is_an_init_that_passes_signals_on
check "the user is a number and not root" the_user_is_a_number_and_not_root
check "group 0 may write the working folder" the_working_folder_is_group_0s
check "no pip, no compiler" nothing_can_be_installed_or_compiled
check "bytecode is there already" bytecode_is_there_already
