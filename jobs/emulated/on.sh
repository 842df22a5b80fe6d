#!/usr/bin/env bash
# on.sh NODE COMMAND: a shell's command on a node of the emulated cluster, from its head.
# mpiexec takes this for ssh, and gives it ssh's options too.
set -euo pipefail
while [[ ${1:-} == -* ]]; do shift; done
limit=/dev/shm/emulated/$1.cores
if [[ -e $limit ]]; then echo 0 >"$(<"$limit")"; fi # this process and all that it starts
pid=$(cat "/dev/shm/emulated/$1")
exec nsenter --target "$pid" --net --uts --ipc --mount --wd="$PWD" bash -c "${*:2}"
