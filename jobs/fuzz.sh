#!/usr/bin/env bash
# Compare random configurations with a dense float64 computation.  The exit code is 1 if one is wrong.
#
#   bash jobs/fuzz.sh SECONDS [RANKS [FIRST]]   default: 4 ranks, and a random first seed
#   bash jobs/fuzz.sh --case SEED RANKS [WIRE]  run one configuration again, and print the errors
#   bash jobs/fuzz.sh openmpi ...               the same with Open MPI; default: MPICH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

usage() {
  grep '^#   ' "${BASH_SOURCE[0]}" >&2
  exit 2
}

mpi=any seconds=60
case ${1:-} in
  mpich | openmpi) mpi=$1 && shift ;;
esac
if [[ ${1:-} == --case ]]; then
  (($# == 3 || $# == 4)) || usage
  ranks=$3 options=(--case "$2" ${4:+--wire "$4"})
else
  (($# >= 1 && $# <= 3)) || usage
  seconds=$1 ranks=${2:-4} options=(--seconds "$1" ${3:+--first "$3"})
fi
[[ $seconds =~ ^[1-9][0-9]*$ && $ranks =~ ^[1-8]$ ]] || usage
use_env "$mpi" pytest
run_mpi "$ranks" $((seconds + 120)) python tests/fuzz.py "${options[@]}"
