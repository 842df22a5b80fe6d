#!/usr/bin/env bash
# Run the tests with MPICH, and then with Open MPI the tests whose result another MPI may change.
# The serial tests run on two processes; then come the tests on ranks.  docs/testing.md explains the
# tiers.  The job fails if any test fails, hangs or is skipped.
#
#   bash jobs/test.sh                       every feature once: six minutes on two cores
#   bash jobs/test.sh all                   the whole suite, with the tests marked `thorough`
#   bash jobs/test.sh openmpi -k causal     one MPI only; pytest gets the other options.  Also after `all`
#   bash jobs/test.sh gpu                   the tests for GPUs, on real GPUs, in about ten minutes
#   bash jobs/test.sh torch                 the tests of a2d_mpi.torch, which `all` runs, too
#   bash jobs/test.sh cudnn                 graphs of two versions of cuDNN, built without a GPU; needs 2.6 GB of packages
#
# With A2D_MPI_ENV=active the job uses the active MPI only.  `all` then uses PyTorch if it is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh
source jobs/gpu.sh

mpis=(mpich openmpi) rank_counts=(1 4 6) second_counts=(4) tier=" and not thorough" torch=""
cudnn="" deaths=" and not thorough"
if [[ ${1:-} == all ]]; then
  rank_counts=(1 4 5 6) tier="" torch=yes && shift
fi
case ${1:-} in
  mpich | openmpi | gpu) mpis=("$1") torch="" && shift ;;
  torch) mpis=() torch=yes deaths="" && shift ;;
  cudnn) mpis=() torch="" cudnn=yes && shift ;;
esac
if [[ ${A2D_MPI_ENV:-} == active && ${#mpis[@]} == 2 ]]; then
  mpis=(any)
  if [[ $torch ]] && ! python -c 'import torch, transformers' 2>/dev/null; then torch=missing; fi
fi
tests=(tests) most=900 # seconds of one run
if [[ ${mpis[*]} == gpu ]]; then
  rank_counts=(1 4 6) most=400 tier=""
  tests=(tests/gpu/test_gpu_kernels.py tests/gpu/test_cudnn.py tests/gpu/test_device.py -k real)
  export A2D_TEST_GPU=1 # a GPU that is not found is a failure
fi
for option in "$@"; do
  if [[ $option == -m* ]]; then
    echo "test.sh: $option would replace the marks that choose the tests of each run: use -k" >&2
    exit 2
  fi
done
narrowed=$#
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 143' TERM # by way of EXIT
export A2D_TEST_RECORD=$folder/record # each test that begins, its outcome and its end
export A2D_TEST_RESULTS=$folder/results # float64 results, which all numbers of ranks need
mkdir "$A2D_TEST_RESULTS"
unset PYTHONDONTWRITEBYTECODE # every rank would compile every module anew
lines=() passed=0 failed=0

# count WORD LOG: print the number before WORD in the last line of pytest's report, or 0.
count() {
  # -a reads the log as text: Open MPI gives its ranks a terminal, and control characters remain.
  grep -aE '[0-9]+ [a-z]+.* in [0-9.]+s' "$2" | tail -n 1 |
    grep -aoE "[0-9]+ $1" | cut -d ' ' -f 1 || echo 0
}

# recorded OUTCOME: print the tests of the present run with an outcome, in the order of their names.
recorded() {
  sed -n "s/^$1 //p" "$A2D_TEST_RECORD" | LC_ALL=C sort -u
}

# record NAME COMMAND...: run pytest and add its numbers to the totals.
record() {
  local name=$1 start=$SECONDS status=0
  shift
  echo "=== $name"
  : >"$A2D_TEST_RECORD"
  "$@" 2>&1 | tee "$folder/log" || status=$?
  add "$name" "$start" "$status" "$folder/log"
}

# yielding COMMAND...: run a command whose ranks leave the core to others when they wait.
yielding() (
  share_cores 1000000
  export OMPI_MCA_mpi_yield_when_idle=1
  "$@"
)

# add NAME START STATUS LOG: add the numbers of a run of pytest that began at START.
add() {
  local name=$1 start=$2 status=$3 p f s note=""
  p=$(count passed "$4") s=$(count skipped "$4")
  f=$(($(count failed "$4") + $(count error "$4")))
  # 5: pytest found no test, which may happen in a narrowed suite.
  if ((status == 5 && narrowed > 0)); then status=0; fi
  case $status in
    0) ;;
    124 | 137) # pytest may not have come to its report
      note=", out of time"
      p=$(recorded passed | wc -l) f=$(recorded failed | wc -l)
      recorded failed | sed 's/^/failed: /'
      comm -23 <(recorded began) <(recorded ended) | sed 's/^/not ended: /'
      ;;
    *) note=", exit code $status" ;;
  esac
  if ((s > 0)); then note+=", $s skipped (no GPU)"; fi
  # A run that was cut off may report no failure.  MPICH returns 0 if a rank left with 0.
  if ((f == 0 && (status != 0 || p == 0 && narrowed == 0))); then f=1; fi
  lines+=("$name: $p passed, $f failed, $((SECONDS - start)) s$note")
  passed=$((passed + p)) failed=$((failed + f))
}

for mpi in "${mpis[@]}"; do
  if [[ $mpi == gpu ]]; then use_gpu pytest,pytest_mpi,hypothesis test; else use_env "$mpi" test; fi
  if [[ $mpi == any ]]; then
    mpi=$active_mpi mpis=("$active_mpi")
    lines+=("the active environment: $mpi only")
    echo "${lines[0]}"
  fi
  # Only the runner is serial: these tests start drivers on ranks of this MPI.  MPIs differ only in
  # the tests that are marked `launches`, so the second MPI runs no others.
  marks="not mpi$tier" counts=("${rank_counts[@]}")
  if [[ $mpi != "${mpis[0]}" ]]; then marks+=" and launches" counts=("${second_counts[@]}"); fi
  # Most serial tests leave a core idle.  The files of tests/unit are quick, and come last.
  spread=(-n 2 --dist loadfile --no-loadscope-reorder)
  if [[ $mpi == gpu ]]; then spread=(); fi
  if [[ $mpi == "${mpis[0]}" || -z $tier ]]; then
    record "$mpi, serial" yielding limited "$most" \
      python -m pytest "${tests[@]}" -q --color=no "${spread[@]}" -m "$marks" "$@"
  fi
  for ranks in "${counts[@]}"; do
    marks="mpi$tier" second="" short=""
    if [[ $mpi != "${mpis[0]}" ]]; then second=yes; fi
    # The first tier runs all of its tests on 1 and 4 ranks, with one MPI.  5 ranks are for what is
    # uneven, the second MPI is for transport.
    if [[ $second || $ranks == 5 || ($tier && $ranks == 6) ]]; then short=yes; fi
    if [[ $short ]]; then marks+=" and not one_mpi"; fi
    if ((ranks > 4)) || [[ $short ]]; then marks+=" and not grids"; fi
    if ((ranks == 1)); then marks+=" and not multirank"; fi
    record "$mpi, $ranks ranks" run_mpi "$ranks" "$most" \
      python -m pytest "${tests[@]}" -q --color=no --with-mpi -m "$marks" "$@"
  done
done

# PyTorch is large and has separate environments.
if [[ $torch == missing ]]; then
  lines+=("torch: not in the active environment, so its tests were not run")
elif [[ $torch ]]; then
  use_env any test,torch,trainers test,torch,trainers .venv-torch
  record "torch, serial" yielding limited "$most" \
    python -m pytest tests/torch -q --color=no -m "not mpi" "$@"
  record "torch, 4 ranks" run_mpi 4 "$most" \
    python -m pytest tests/torch -q --color=no --with-mpi -m mpi "$@"
  # Only Open MPI continues when ranks die.
  if [[ ${A2D_MPI_ENV:-} != active ]]; then
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    torch_site=$(python -c "$site")
    use_env openmpi test test .venv-torch-openmpi
    echo "$torch_site" >"$(python -c "$site")/torch.pth" # its PyTorch, with this MPI
    record "torch, openmpi, serial" yielding limited "$most" \
      python -m pytest tests/torch -q --color=no -m "not mpi and launches$deaths" "$@"
  fi
fi

# cuDNN is large, too, and takes minutes: only this mode runs these tests.
if [[ $cudnn ]]; then
  export A2D_TEST_GPU=1 # what is not installed is a failure
  for extra in cudnn cudnn-early; do
    use_env any "test,$extra" "test,$extra" ".venv-$extra"
    # -s prints the seconds of each graph.
    record "$extra" limited "$most" \
      python -m pytest tests/gpu/test_deviceless.py -q -s --color=no "$@"
  done
fi

echo
printf '%s\n' "${lines[@]}"
echo "$passed passed, $failed failed"
((failed == 0 && passed > 0))
