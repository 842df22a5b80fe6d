#!/usr/bin/env bash
# A cluster emulated on this machine: NODES nodes of RANKS_PER_NODE ranks, each node with a link of
# RATE to a common switch, that much in either direction at once.
#
#   bash jobs/emulate.sh NODES RANKS_PER_NODE RATE -- COMMAND...       COMMAND on all ranks
#   bash jobs/emulate.sh NODES RANKS_PER_NODE RATE --head COMMAND...   COMMAND once, as on a login
#                                      node: mpiexec and run_mpi in it start ranks on the nodes
#
#   bash jobs/emulate.sh 4 1 50mbit -- python drivers/attention.py data/minilm_l3_1536.h5 --trials 1
#
# RATE is tc's: 10mbit, 1gbit, ...; none for no limit.  Ranks fill node00, then node01, ...  They
# share memory within a node; between nodes there is only TCP.  Files are shared by all, but
# /dev/shm is each node's own.  The exit code is the command's, or 124 out of time, or 2 with one
# line if something that you gave, or this machine, cannot be used.  By environment:
#
#   EMULATE_TIMEOUT=600   seconds for COMMAND; 0 for no limit
#   EMULATE_LINKS=FILE    write what crossed each node's link: node, bytes sent, bytes received
#   EMULATE_CORES=0.1     of a core for each node, no more even if others are idle: ranks then compute
#                         as if on machines of their own, and the one with the most work is the last
#   EMULATE_BURST=8k, EMULATE_QUEUE=8m   bytes sent at once, and waiting at most, for each limit
#
# Needs Linux, root, iproute2 and util-linux; paths are relative to the repository's root.
set -euo pipefail

refuse() {
  echo "emulate.sh: $*" >&2
  exit 2
}

(($# >= 5)) || refuse "usage: emulate.sh NODES RANKS_PER_NODE RATE -- COMMAND..."
nodes=$1 per_node=$2 rate=$3 mode=$4
[[ $nodes =~ ^[1-9][0-9]{0,2}$ && $nodes -le 250 ]] ||
  refuse "NODES must be 1 to 250, got $nodes"
[[ $per_node =~ ^[1-9][0-9]{0,2}$ ]] || refuse "RANKS_PER_NODE must be 1 to 999, got $per_node"
[[ $rate == none || $rate =~ ^([0-9]+|[0-9]*\.[0-9]+)[kmg]?bit$ && $rate == *[1-9]* ]] ||
  refuse "RATE must be none or like 50mbit, got $rate"
[[ $mode == -- || $mode == --head ]] || refuse "after RATE comes -- or --head, got $mode"
export EMULATE_TIMEOUT=${EMULATE_TIMEOUT:-600}
export EMULATE_BURST=${EMULATE_BURST:-8k} EMULATE_QUEUE=${EMULATE_QUEUE:-8m}
[[ $EMULATE_TIMEOUT =~ ^[0-9]+$ ]] ||
  refuse "EMULATE_TIMEOUT must be whole seconds, got $EMULATE_TIMEOUT"
for name in EMULATE_BURST EMULATE_QUEUE; do
  [[ ${!name} =~ ^[1-9][0-9]*[km]?$ ]] || refuse "$name must be bytes like 32k, got ${!name}"
done
export EMULATE_CORES=${EMULATE_CORES:-}
if [[ -n $EMULATE_CORES ]]; then
  [[ $EMULATE_CORES =~ ^[0-9]{0,3}(\.[0-9]{1,3})?$ && $EMULATE_CORES == *[1-9]* ]] ||
    refuse "EMULATE_CORES must be a number of cores like 0.1, got $EMULATE_CORES"
fi
((EUID == 0)) || refuse "only root can make network namespaces"
missing=()
for tool in ip tc unshare nsenter setpriv setsid mount; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
((${#missing[@]} == 0)) ||
  refuse "not found: ${missing[*]} (Debian and Ubuntu: iproute2, util-linux)"

# All of it lives in namespaces without names, which end with their first process, head.sh; that is
# killed when unshare dies, and unshare when this shell does.  So nothing is left, whatever happens.
# What a terminal sends comes to this shell only.
spaces=(setsid setpriv --pdeathsig KILL
  unshare --fork --kill-child --pid --mount-proc --net --uts --ipc)
reason=$("${spaces[@]}" true 2>&1) || refuse "cannot make namespaces: ${reason##*$'\n'}"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -n ${EMULATE_LINKS:-} ]]; then
  [[ -d $(dirname "$EMULATE_LINKS") && ! -d $EMULATE_LINKS ]] ||
    refuse "cannot write EMULATE_LINKS, $EMULATE_LINKS"
fi
source jobs/env.sh
use_env mpich

# end CODE: ends all processes of the emulation, and exits when they are gone.
end() {
  trap '' INT TERM HUP
  set +e
  # Not unshare, which waits for its child, head.sh; that ends when all others are gone.
  local head
  head=$(grep -slx "PPid:[[:space:]]*$!" /proc/[0-9]*/status)
  head=${head//[!0-9]/}
  kill -KILL "${head:-$!}"
  wait "$!"
  exit "$1"
} 2>/dev/null
# What mpiexec leaves in /tmp when it is killed, here or in an emulation before: the topology of a
# node.  A rank that misses it, of another emulation, finds out by itself.
sweep() {
  # Limits of cores, empty when their emulation has ended.
  find /sys/fs/cgroup /sys/fs/cgroup/cpu -maxdepth 2 -depth -path '*/a2d_emulated*' -type d \
    -exec rmdir {} + 2>/dev/null || true
  grep -sl 'name="HostName" value="node[0-9]*"' /tmp/hydra_hwloc_xmlfile_* | xargs -r rm -f || true
}
sweep
trap sweep EXIT

"${spaces[@]}" bash jobs/emulated/head.sh "$@" </dev/null &
trap 'end 130' INT
trap 'end 143' TERM
trap 'end 129' HUP
wait "$!"
