#!/usr/bin/env bash
# The head of an emulated cluster.  jobs/emulate.sh runs this script with the same arguments, as the
# first process in new namespaces.  The head is also the switch: its eth0 is a bridge with a port for
# each node.  The link of the head has no limit.
set -euo pipefail
source jobs/env.sh

fail() {
  echo "emulate.sh: $*" >&2
  exit 2
}

(($$ == 1)) || fail "start jobs/emulate.sh instead"
nodes=$1 per_node=$2 rate=$3 mode=$4
shift 4

mount -t tmpfs tmpfs /dev/shm
dir=/dev/shm/emulated # on.sh uses this folder, too
mkdir "$dir"
echo head >/proc/sys/kernel/hostname
source jobs/emulated/network.sh

names=()
for ((i = 0; i < nodes; i++)); do names+=("$(printf 'node%02d' "$i")"); done
{
  echo "127.0.0.1 localhost"
  for i in "${!names[@]}"; do echo "$(address "$i") ${names[i]}"; done
  echo "$(address "$nodes") head"
} >"$dir/hosts"
mount --bind "$dir/hosts" /etc/hosts
printf "%s:$per_node\n" "${names[@]}" >"$dir/mpi_hosts"

# Set all neighbours permanently.  All namespaces share the kernel's table of learnt neighbours, which
# is too small for 64 nodes.
for ((i = 0; i <= nodes; i++)); do
  echo "neigh replace $(address "$i") lladdr $(mac "$i") dev eth0 nud permanent"
done >"$dir/neighbours"

{
  echo "link set lo up"
  echo "link add eth0 address $(mac "$nodes") type bridge stp_state 0 forward_delay 0" \
    "mcast_snooping 0"
  echo "addr add $(address "$nodes")/24 dev eth0"
  echo "link set eth0 up"
  cat "$dir/neighbours"
} | ip -batch - || fail "cannot make the switch"

mkfifo "$dir/ready"
exec 3<>"$dir/ready"
pids=()
for i in "${!names[@]}"; do
  unshare --net --uts --ipc --mount bash jobs/emulated/node.sh "$i" "${names[i]}" "$rate" "$dir" &
  pids+=("$!")
  echo "$!" >"$dir/${names[i]}"
done
for i in "${!names[@]}"; do
  answer=late
  read -r -t 60 answer <&3 || true
  [[ $answer == ready ]] || fail "cannot set up the nodes"
done
exec 3>&-

for i in "${!names[@]}"; do
  echo "link set port$i master eth0 up"
done | ip -batch - || fail "cannot connect the nodes"
for i in "${!names[@]}"; do
  limit "port$i" "$rate" # what the node receives; node.sh limits what it sends
done | tc -batch - || fail "cannot limit the links"

# limit_cores NODE: limit all processes of a node to EMULATE_CORES cores together; see on.sh.
limit_cores() {
  local groups=/sys/fs/cgroup folder quota=1000 period
  period=$(awk -v cores="$EMULATE_CORES" -v quota="$quota" 'BEGIN { print int(quota / cores) }')
  ((period <= 1000000)) || fail "EMULATE_CORES must be at least 0.001, got $EMULATE_CORES"
  # The period of a node with many cores must not be too short.
  while ((period < 1000)); do quota=$((2 * quota)) period=$((2 * period)); done
  [[ -e $groups/cgroup.controllers ]] || groups+=/cpu
  folder=$groups/a2d_emulated.$cluster.$1
  mkdir "$folder" 2>/dev/null || fail "cannot limit cores: no cgroup can be made in $groups"
  if [[ -e $folder/cpu.cfs_quota_us ]]; then
    echo "$period" >"$folder/cpu.cfs_period_us" && echo "$quota" >"$folder/cpu.cfs_quota_us"
  else
    echo +cpu >"$groups/cgroup.subtree_control" && echo "$quota $period" >"$folder/cpu.max"
  fi || fail "cannot limit cores by $folder"
  echo "$folder/cgroup.procs" >"$dir/$1.cores"
}
if [[ -n $EMULATE_CORES ]]; then
  cluster=$RANDOM$RANDOM
  for name in "${names[@]}"; do limit_cores "$name"; done
fi
# Ranks cannot read it: each node mounts /sys anew, and sees all cores of the host.
export A2D_MPI_NODE_CORES=${EMULATE_CORES:-$(awk -v n="$nodes" -v cores="$(nproc)" 'BEGIN { print cores / n }')}

# count: print the bytes sent and received so far, a line for each node.
count() {
  local pid
  for pid in "${pids[@]}"; do
    sed -n 's/^ *eth0: *//p' "/proc/$pid/net/dev" | awk '{ print $9, $1 }'
  done
}

# Let MPICH's UCX send large messages over TCP without a rendezvous.  The receiver's answer would queue
# behind its own messages, for the second in which a slow link empties its queue.  Two ranks that send
# to each other would then take turns.
export UCX_RNDV_THRESH=${UCX_RNDV_THRESH:-inf}

# With these variables MPICH's mpiexec starts its ranks on the nodes.
export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC=$PWD/jobs/emulated/on.sh
export HYDRA_HOST_FILE=$dir/mpi_hosts

count >"$dir/before"
status=0
if [[ $mode == -- ]]; then
  run_mpi "$((nodes * per_node))" "$EMULATE_TIMEOUT" bash jobs/emulated/rank.sh "$@" || status=$?
else
  share_cores "$((nodes * per_node))"
  limited "$EMULATE_TIMEOUT" "$@" || status=$?
fi
if ((status == 124)); then echo "emulate.sh: out of time after $EMULATE_TIMEOUT s" >&2; fi

count >"$dir/after"
printf '%s\n' "${names[@]}" | paste -d ' ' - "$dir/before" "$dir/after" |
  awk 'BEGIN { print "node sent received" } { print $1, $4 - $2, $5 - $3 }' >"$dir/links"
awk 'NR > 1 {
    sent += $2; received += $3
    if ($2 > most_sent) most_sent = $2
    if ($3 > most_received) most_received = $3
  }
  END {
    print "emulate.sh: bytes over the links, all told         sent       received"
    printf "emulate.sh: largest of one node         %14.0f %14.0f\n", most_sent, most_received
    printf "emulate.sh: all nodes                   %14.0f %14.0f\n", sent, received
  }' "$dir/links" >&2
if [[ -n ${EMULATE_LINKS:-} ]]; then
  cp "$dir/links" "$EMULATE_LINKS" || fail "cannot write EMULATE_LINKS"
fi
exit "$status"
