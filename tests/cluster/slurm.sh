#!/usr/bin/env bash
# Runs the batch script jobs/slurm.sh for real: SLURM on an emulated cluster of four nodes.
# Needs root, SLURM and munge (Debian and Ubuntu: slurm-wlm, munge); takes minutes.  Ends at
# the first job that fails.  Not part of jobs/test.sh.
#
#   bash tests/cluster/slurm.sh
#   bash tests/cluster/slurm.sh 16 10mbit    only a training of which a rank dies, on 16 nodes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

missing=()
for tool in slurmctld slurmd sbatch srun sinfo munged; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if ((${#missing[@]} > 0)); then
  echo "slurm.sh: not found: ${missing[*]} (Debian and Ubuntu: slurm-wlm, munge)" >&2
  exit 2
fi

tmp=$(mktemp -d) # all nodes see it
EMULATE_TIMEOUT=900 bash jobs/emulate.sh "${1:-4}" 2 "${2:-200mbit}" \
  --head bash tests/cluster/slurm_head.sh "$tmp" "${1:-4}" &
trap 'kill "$!" 2>/dev/null && wait "$!"; rm -rf "$tmp"' EXIT
trap 'exit 130' INT # for the other, started with &, there is no Ctrl-C
trap 'exit 143' TERM HUP
wait "$!"
