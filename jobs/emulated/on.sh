#!/usr/bin/env bash
# on.sh NODE COMMAND: run a shell command on a node of the emulated cluster, from the head.  mpiexec
# uses this script as ssh, and also passes options of ssh.
set -euo pipefail
while [[ ${1:-} == -* ]]; do shift; done
limit=/dev/shm/emulated/$1.cores
if [[ -e $limit ]]; then echo 0 >"$(<"$limit")"; fi # this process and all that it starts
pid=$(cat "/dev/shm/emulated/$1")
exec nsenter --target "$pid" --net --uts --ipc --mount --wd="$PWD" bash -c "${*:2}"
