#!/usr/bin/env bash
# slurm_head.sh DIR NODES: starts SLURM on an emulated cluster, with its files in DIR, and submits
# the jobs.  tests/cluster/slurm.sh runs it on the cluster's head; all that it starts ends with the
# cluster.
set -euo pipefail
dir=$1
mapfile -t nodes < <(seq -f 'node%02g' 0 $(($2 - 1)))
export SLURM_CONF=$dir/slurm.conf

failed() {
  echo "FAILED: $*" >&2
  tail -n 20 "$dir"/*.log "$dir"/*.out >&2
  exit 1
}

# Nothing here is confined or counted by SLURM, which would take more of a machine than namespaces.
cat >"$SLURM_CONF" <<END
ClusterName=emulated
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$dir/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[00-$(printf %02d $(($2 - 1)))] CPUs=4 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES
END
echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf" # or it looks for version 2, and needs systemd
# GPUs to be asked for; nobody opens them.
touch "$dir"/gpu{0..3}
echo "Name=gpu File=$dir/gpu[0-3]" >"$dir/gres.conf"

mkdir "$dir/state" "$dir/results"
(umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
  --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" ||
  failed "munged did not start"
slurmctld || failed "slurmctld did not start"
for node in "${nodes[@]}"; do
  mkdir "$dir/spool-$node"
  jobs/emulated/on.sh "$node" slurmd || failed "slurmd did not start on $node"
done
for _ in {1..60}; do
  [[ $(sinfo --noheader --Node --format %T | grep -c '^idle$') != "$2" ]] || break
  sleep 0.5
done
[[ $(sinfo --noheader --Node --format %T | grep -c '^idle$') == "$2" ]] || failed "nodes are not ready"
echo "ok: SLURM is up on ${nodes[*]}"

# submit HOSTS RANKS OPTION...: HOSTS and RANKS of the main job's results must be as given.
export mpi=pmi2 venv=.venv input=data/minilm_l3_1536.h5 trials=2 output=$dir/results
export device=cpu # the GPUs are none
submit() {
  local hosts=$1 ranks=$2 id method
  shift 2
  id=$(timeout 120 sbatch --parsable --wait --partition=main --cpus-per-task=1 \
    --output="$dir/%j.out" "$@" jobs/slurm.sh) || failed "jobs/slurm.sh with $*"
  for method in attention2d ring; do
    python tests/cluster/check_result.py "$output/$id-$method.h5" "$hosts" "$ranks" ||
      failed "jobs/slurm.sh with $*"
    echo "ok: jobs/slurm.sh with $*: $method on $ranks ranks of $hosts nodes"
  done
}
if (($2 == 4)); then
  submit 4 4 --ntasks=4 --ntasks-per-node=1
  submit 4 4 --nodes=4 --ntasks-per-node=1 --gpus-per-node=1
  submit 2 4 --nodes=2 --ntasks-per-node=2 --gpus-per-node=4
  submit 2 8 --nodes=2 --ntasks-per-node=4 --gpus-per-node=4
fi

# A rank is killed while it trains: the others go on, with Open MPI's ULFM.
if ! .venv-openmpi/bin/python -c 'import torch, transformers' 2>/dev/null; then
  echo "not run: there is no .venv-openmpi with PyTorch (use_env openmpi torch of jobs/env.sh makes it)"
else
  unset OMPI_MCA_pml OMPI_MCA_btl # the nodes share no memory
  id=$(survive=1 venv=.venv-openmpi sbatch --parsable --partition=main --account= --no-kill \
    --cpus-per-task=1 --ntasks-per-node=1 --nodes="$2" --output="$dir/%j.out" jobs/slurm.sh \
    python drivers/train.py llama-tiny README.md --folder "$dir/run" --resume --seqlen 256 \
    --steps 400 --set save_steps=5 --survive)
  for _ in {1..120}; do
    [[ ! -d $dir/run/checkpoint-5 ]] || break
    sleep 1
  done
  echo "a rank is killed at $(date --utc +%H:%M:%S.%3N)"
  kill -9 "$(pgrep -f "python drivers/train.py" | tail -n 1)"
  for _ in {1..30}; do
    ! grep -aq "resumes from" "$dir/$id.out" || break
    sleep 1
  done
  grep -a "continues without rank [0-9]*: $(($2 - 1)) ranks" "$dir/$id.out" ||
    failed "jobs/slurm.sh with survive=1"
  grep -a "resumes from" "$dir/$id.out"
  scancel "$id"
  echo "ok: jobs/slurm.sh with survive=1: a training went on without a rank"
fi
echo "all passed"
