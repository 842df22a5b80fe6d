#!/usr/bin/env bash
# Checks of jobs/emulate.sh; needs root, takes a minute and a half.  A line for each check that
# passed; ends at the first that fails.  Not part of jobs/test.sh.
#
#   bash tests/cluster/emulate.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
trap 'exit 130' INT

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
emulate=(timeout 120 bash jobs/emulate.sh)
out=$tmp/out err=$tmp/err

failed() {
  echo "FAILED: $*" >&2
  tail -n 20 "$out" "$err" >&2
  exit 1
}

passed() {
  echo "ok: $*"
}

# run CODE COMMAND...: fails if it ends with another exit code.
run() {
  local code=$1 status=0
  shift
  "$@" >"$out" 2>"$err" </dev/null || status=$?
  ((status == code)) || failed "exit code $status, not $code: $*"
}

# refused WORDS COMMAND...: it ends with 2 and one line that has these words.
refused() {
  local words=$1
  shift
  run 2 "$@"
  [[ ! -s $out && $(wc -l <"$err") == 1 && $(<"$err") == *"$words"* ]] ||
    failed "not one line with \"$words\": $*"
  passed "refused: $(cat "$err")"
}

# gone WHAT: no process is left in the PID namespace that $out names, no device, no mount.
gone() {
  local space left
  space=$(grep -oE -m 1 'pid:\[[0-9]+\]' "$out") || failed "the command did not start"
  left=$(find /proc/[0-9]*/ns/pid -maxdepth 0 -lname "${space//[\[\]]/?}" 2>/dev/null || true)
  [[ -z $left ]] || failed "left after $1: $left"
  [[ $1 == SIGKILL ]] || # the next start does that
    left=$(find /tmp -maxdepth 1 -name 'hydra_*' -newer "$tmp" -exec grep -sl '"node0' {} + || true)
  [[ -z $left ]] || failed "left after $1: $left"
  [[ $(outside) == "$outside" ]] || failed "changed by $1: $outside, now $(outside)"
}
# What an emulation would leave outside its namespaces; others may use the machine.
outside() {
  find /sys/class/net -name 'port*'
  awk '$5 ~ "^/(dev/shm|etc/hosts|proc|sys)$" { print $5, $(NF - 2) }' /proc/self/mountinfo
}
outside=$(outside)

# Bad arguments.
refused usage "${emulate[@]}" 2 1 10mbit
refused usage "${emulate[@]}" 2 1 10mbit --
refused "NODES must" "${emulate[@]}" 0 1 10mbit -- true
refused "NODES must" "${emulate[@]}" 251 1 10mbit -- true
refused "RANKS_PER_NODE must" "${emulate[@]}" 2 1x 10mbit -- true
refused "RATE must" "${emulate[@]}" 2 1 10 -- true
refused "RATE must" "${emulate[@]}" 2 1 0mbit -- true
refused "after RATE" "${emulate[@]}" 2 1 10mbit true -- true
refused EMULATE_TIMEOUT env EMULATE_TIMEOUT=1.5 "${emulate[@]}" 2 1 10mbit -- true
refused EMULATE_BURST env EMULATE_BURST=no "${emulate[@]}" 2 1 10mbit -- true
refused EMULATE_CORES env EMULATE_CORES=0.0 "${emulate[@]}" 2 1 10mbit -- true
refused EMULATE_CORES env EMULATE_CORES=few "${emulate[@]}" 2 1 10mbit -- true
refused EMULATE_LINKS env EMULATE_LINKS="$tmp/no/links" "${emulate[@]}" 2 1 10mbit -- true

# A machine that cannot.
refused "only root" setpriv --reuid 65534 --regid 65534 --clear-groups \
  bash -c "$(<jobs/emulate.sh)" emulate.sh 2 1 10mbit -- true
mkdir "$tmp/bin"
for tool in ip unshare nsenter setpriv setsid mount; do
  ln -s "$(command -v "$tool")" "$tmp/bin"
done
refused "not found: tc " env PATH="$tmp/bin" "$BASH" jobs/emulate.sh 2 1 10mbit -- true
refused "cannot make namespaces" setpriv --bounding-set=-sys_admin \
  "${emulate[@]}" 2 1 10mbit -- true

# links NODES RANKS_PER_NODE RATE MIB: sets payload, and link to the most bytes that a node sent or
# received, whichever is less.
links() {
  run 0 env EMULATE_LINKS="$tmp/links" "${emulate[@]}" "$1" "$2" "$3" -- \
    python tests/cluster/links.py "$4"
  payload=$(value payload "$out")
  link=$(awk 'NR > 1 { if ($2 > s) s = $2; if ($3 > r) r = $3 } END { print s < r ? s : r }' \
    "$tmp/links")
  [[ $(wc -l <"$tmp/links") == $(($1 + 1)) ]] || failed "not a line per node in EMULATE_LINKS"
}
value() {
  sed -n "s/^$1 //p" "$2"
}
# check_rate NAME MBIT FILE
check_rate() {
  local rate
  rate=$(value "$1" "$3")
  awk -v x="$rate" -v y="$2" 'BEGIN { exit !(0.85 * y <= x && x <= 1.02 * y) }' ||
    failed "$1: $rate Mbit/s, not $2"
  rates+=" $1 $rate"
}

# Rates, with both directions of every link in use, and bytes.
for job in "4 1 50 4" "16 1 20 2" "2 2 50 4"; do
  read -r nodes per_node mbit mib <<<"$job"
  links "$nodes" "$per_node" "${mbit}mbit" "$mib"
  name="${nodes}x$per_node at $mbit Mbit/s" rates=""
  for pattern in ring into from; do check_rate "$pattern" "$mbit" "$out"; done
  passed "$name: measured$rates"
  ((payload <= link && link <= payload * 105 / 100)) ||
    failed "$name: $payload bytes between nodes, $link over the link"
  passed "$name: $payload bytes between nodes, $link over the link"
done
[[ $(awk 'NF == 4 && $1 ~ /^[0-9]/ { print $2 }' "$out" | paste -sd ' ') == \
  "node00 node00 node01 node01" ]] || failed "ranks are not placed in blocks"
passed "2x2: ranks 0 and 1 on node00, 2 and 3 on node01"
[[ $(awk '$1 ~ /^[0-9]/ { print $3 }' "$out" | uniq -c | awk '{ print $1 }' | paste -sd ' ') == \
  "2 2" ]] || failed "not one IPC namespace per node"
[[ $(awk '$1 ~ /^[0-9]/ { print $4 }' "$out" | sort -u) == - ]] || failed "/dev/shm crosses nodes"
passed "2x2: shared memory of a node is its own, and its ranks'"
links 1 4 1mbit 2
((link < 100000)) || failed "1x4: $link bytes over the link"
passed "1x4: nothing over the link but the start, $link bytes"

# A tenth of a core for each node, though there are more.
run 0 env EMULATE_CORES=0.1 "${emulate[@]}" 2 1 none -- python -c '
import os, time
while time.process_time() < 0.5: pass
start = time.perf_counter()
while time.process_time() < 0.7: pass
print(os.environ["A2D_MPI_NODE_CORES"], time.perf_counter() - start)'
awk '$1 != "0.1" || $2 < 1.8 || $2 > 3 { exit 1 } END { exit NR != 2 }' "$out" ||
  failed "0.2 s of a tenth of a core took: $(<"$out")"
[[ -z $(find /sys/fs/cgroup -maxdepth 2 -name 'a2d_emulated*') ]] || failed "limits of cores are left"
passed "a tenth of a core a node: 0.2 s took $(awk '{ print $2 }' "$out" | paste -sd ' ') s"

# Every way to end.
say='import os; print(os.readlink("/proc/self/ns/pid"), flush=True)'
mpi="$say; import sys, time; from mpi4py import MPI; comm = MPI.COMM_WORLD"
run 0 "${emulate[@]}" 2 1 none -- python -c "$mpi"
gone success
passed "success: exit code 0, nothing left"
run 7 "${emulate[@]}" 2 2 10mbit -- python -c "$mpi; sys.exit(7 * (comm.rank == 1))"
gone failure
passed "failure: exit code 7, nothing left"
run 127 "${emulate[@]}" 2 1 10mbit --head bash -c "python -c '$say'; no_such_command"
gone failure
passed "failure on the head: exit code 127, nothing left"
run 0 "${emulate[@]}" 2 1 10mbit --head bash -c "python -c '$say'; mpiexec -n 2 hostname; hostname"
[[ $(grep -v pid: "$out" | sort | paste -sd ' ') == "head node00 node01" ]] ||
  failed "mpiexec on the head did not reach the nodes"
gone "two commands"
passed "on the head: mpiexec reaches the nodes"
run 124 env EMULATE_TIMEOUT=3 "${emulate[@]}" 2 1 10mbit -- python -c "$mpi; time.sleep(99)"
grep -q "out of time after 3 s" "$err" || failed "no message"
gone timeout
passed "timeout: exit code 124, nothing left"

# A rank is killed.
start=$SECONDS status=0
"${emulate[@]}" 2 2 10mbit -- python -c "$mpi; time.sleep(1)
comm.rank == 2 and os.kill(os.getpid(), 9); comm.recv(source=0)" \
  >"$out" 2>"$err" </dev/null || status=$?
((status != 0 && status != 124)) || failed "exit code $status"
grep -qx "emulate.sh: rank 2 on node01 ended by SIGKILL" "$err" || failed "the rank is not named"
gone "kill -9 of a rank"
passed "kill -9 of a rank: named, exit code $status after $((SECONDS - start)) s, nothing left"

# ended SIGNAL WHOM CODE: start it, send a signal to the process or to its group, as Ctrl-C does.
ended() {
  local job status=0 begin
  : >"$out"
  setsid env --default-signal bash jobs/emulate.sh 2 2 10mbit -- \
    python -c "$mpi; time.sleep(99)" >"$out" 2>"$err" </dev/null &
  job=$!
  for _ in {1..100}; do
    [[ $(grep -c pid: "$out") != 4 ]] || break
    sleep 0.1
  done
  begin=$SECONDS
  case $2 in
    process) kill -"$1" "$job" ;;
    group) kill -"$1" -- "-$job" ;;
  esac
  { wait "$job" || status=$?; } 2>/dev/null
  ((status == $3)) || failed "SIG$1: exit code $status"
  ((SECONDS - begin <= 5)) || failed "SIG$1: only after $((SECONDS - begin)) s"
  [[ $1 != KILL ]] || sleep 3 # nobody waits for the kernel
  gone "SIG$1"
  passed "SIG$1 to the $2: exit code $status, nothing left"
}
ended TERM process 143
ended INT process 130
ended INT group 130
ended HUP group 129
ended KILL process 137

# Two at once, with the same names and addresses inside.
"${emulate[@]}" 4 1 50mbit -- python tests/cluster/links.py 4 >"$tmp/other" 2>&1 </dev/null &
links 4 1 20mbit 2
wait "$!" || failed "the other of two at once: $(cat "$tmp/other")"
rates=""
check_rate ring 20 "$out"
check_rate ring 50 "$tmp/other"
passed "two at once, at 20 and 50 Mbit/s: measured$rates"
echo "all passed"
