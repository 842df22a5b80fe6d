#!/usr/bin/env bash
# Emulate a cluster on this machine: NODES nodes of RANKS_PER_NODE ranks.  Each node has a link to a
# common switch, which carries RATE in each direction at once.
#
#   bash jobs/emulate.sh NODES RANKS_PER_NODE RATE -- COMMAND...       COMMAND on all ranks
#   bash jobs/emulate.sh NODES RANKS_PER_NODE RATE --head COMMAND...   COMMAND once, as on a login
#                                      node: mpiexec and run_mpi in it start ranks on the nodes
#
#   bash jobs/emulate.sh 4 1 50mbit -- python drivers/attention.py data/minilm_l3_1536.h5 --trials 1
#
# RATE is written as for tc: 10mbit, 1gbit, ...; none means no limit.  Ranks fill node00, then node01,
# ...  They share memory within a node, and use TCP between nodes.  All nodes share the files, but each
# node has its own /dev/shm.  The exit code is the code of the command.  It is 124 if the time is over,
# and 2, with one line, if an argument or this machine cannot be used.  Environment variables:
#
#   EMULATE_TIMEOUT=600   seconds for COMMAND; 0 means no limit
#   EMULATE_LINKS=FILE    write the bytes on each node's link: node, bytes sent, bytes received
#   EMULATE_CORES=0.1     cores that each node may use, even if others are idle.  Ranks then compute as
#                         on separate machines, and the rank with the most work ends last
#   EMULATE_BURST=8k      bytes that a link sends at once
#   EMULATE_QUEUE=8m      bytes that wait at a link at most
#
# Needs Linux, root, iproute2 and util-linux.  Paths are relative to the repository's root.
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

# The emulation lives in namespaces without names, which end with their first process, head.sh.
# head.sh is killed when unshare dies, and unshare is killed when this shell dies.  So nothing is
# left, whatever happens.  Signals of a terminal reach this shell only.
spaces=(setsid setpriv --pdeathsig KILL
  unshare --fork --kill-child --pid --mount-proc --net --uts --ipc)
reason=$("${spaces[@]}" true 2>&1) || refuse "cannot make namespaces: ${reason##*$'\n'}"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -n ${EMULATE_LINKS:-} ]]; then
  [[ -d $(dirname "$EMULATE_LINKS") && ! -d $EMULATE_LINKS ]] ||
    refuse "cannot write EMULATE_LINKS, $EMULATE_LINKS"
fi
source jobs/env.sh
use_env mpich "" numba

# end CODE: end all processes of the emulation, and exit when they are gone.
end() {
  trap '' INT TERM HUP
  set +e
  # Kill head.sh, the child of unshare: it ends when all other processes are gone, and unshare waits
  # for it.
  local head
  head=$(grep -slx "PPid:[[:space:]]*$!" /proc/[0-9]*/status)
  head=${head//[!0-9]/}
  kill -KILL "${head:-$!}"
  wait "$!"
  exit "$1"
} 2>/dev/null
# sweep: remove the files with the topology of a node, which a killed mpiexec leaves in /tmp.  They may
# belong to another emulation.  Its ranks then detect the topology themselves.
sweep() {
  # Remove limits of cores.  Only those of emulations that have ended are empty and can be removed.
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
