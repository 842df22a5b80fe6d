#!/usr/bin/env bash
# Measure the study: grids and rings on emulated clusters of this machine, side by side.
#
#   bash jobs/study.sh results/study                      all of it, 85 minutes on two cores
#   bash jobs/study.sh results/study 64x1 scaling         some of it
#   bash jobs/study.sh results/study triangle nodes       the triangle and the node-aware grid
#   bash jobs/study.sh results/study masks                four masks of docs/masks.md
#   bash jobs/study.sh results/study large                large messages, 40 minutes
#   bash jobs/study.sh results/study crossover            the ratio of computing to transfers, 40 minutes
#   bash jobs/study.sh results/study train                training steps of docs/models.md
#
# Each cluster is calibrated first.  Then it runs all methods and the planner's picks.  Each cluster
# has a profile and a file of results.  Runs that a file holds already are not run again.  Afterwards
# python drivers/report.py study data/results/*.h5 prints the results, and drivers/plot.py results
# draws them.
#
# The rates are so low that two cores can carry all messages, and that transfers decide.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:?usage: study.sh FOLDER [16x1] [64x1] [16x4] [ratio] [large] [crossover] [scaling] [overlap] [triangle] [nodes] [masks] [train]}
shift
mkdir -p "$output"
source jobs/env.sh
use_env mpich

sizes=(--nheads 16 --headdim 16 --seqlens 768 --trials 3 --resume)

# on CLUSTER RATE COMMAND...: run a command on an emulated cluster, NODESxRANKS_PER_NODE.
on() {
  EMULATE_TIMEOUT=3000 bash jobs/emulate.sh "${1%x*}" "${1#*x}" "$2" -- python "${@:3}"
}

# stem CLUSTER: print the common stem of the files of a cluster.
stem() {
  echo "$output/$1${EMULATE_CORES:+-$EMULATE_CORES}"
}

# calibrated CLUSTER RATE: measure the profile of a cluster.  More ranks than cores disturb each other
# in this measurement as they do in the study.
calibrated() {
  local name="$1 emulated, $2${EMULATE_CORES:+, $EMULATE_CORES cores a node}"
  [[ -e $(stem "$1").toml ]] ||
    on "$1" "$2" drivers/calibrate.py --output "$(stem "$1").toml" --name "$name"
}

# bench CLUSTER RATE OPTIONS...: run bench.py on a cluster, with its profile.
bench() {
  on "$1" "$2" drivers/bench.py --output "$(stem "$1").h5" --profile "$(stem "$1").toml" \
    "${sizes[@]}" --spans picked "${@:3}"
}

# cluster NAME RATE PLANS [MORE]: run all plans forward with gradients (MORE with full masks only),
# and the planner's picks, overall and of each method, forward alone.
cluster() {
  local mask plans
  calibrated "$1" "$2"
  for mask in full causal; do
    plans=auto:4,auto:each,ring,$3
    # The striped ring differs for causal masks only.
    if [[ $mask == causal ]]; then plans+=",striped ring"; else plans+=${4:+,$4}; fi
    bench "$1" "$2" --masks "$mask" --nheads-kv 16,2 --plans "$plans" --backward
  done
  bench "$1" "$2" --masks full,causal --nheads-kv 16,2 --plans "auto:4,auto:each,ring,${3%%,*}"
}

(($# > 0)) || set -- 16x1 64x1 16x4 ratio scaling overlap
for name in "$@"; do
  case $name in
    16x1)
      cluster 16x1 10mbit "attention2d:4x4,attention2d:16x1,attention2d:1x16,attention2d:1x1x16,\
attention2d:2x2x4,ring:4x1x4,double ring:4x4,double ring:2x2x4"
      ;;
    64x1)
      cluster 64x1 2.5mbit "attention2d:8x8,attention2d:64x1,attention2d:1x64,attention2d:4x4x4,\
attention2d:2x2x16,ring:4x1x16,double ring:8x8,double ring:2x2x16"
      ;;
    16x4)
      # These plans also have each axis inside a node.  Gathering all keys or queries takes very long.
      cluster 16x4 5mbit "attention2d:8x8,attention2d:4x4x4,attention2d:2x2x16@urc,\
ring:4x1x16@urc,double ring:16x4,double ring:2x2x16@urc" "attention2d:64x1,attention2d:1x64"
      ;;
    ratio) # only the square grid and the ring, with more trials
      for cluster in "16x1 10mbit" "64x1 2.5mbit"; do
        on $cluster drivers/bench.py --output "$output/ratio.h5" "${sizes[@]}" --trials 7 \
          --plans attention2d,ring --masks full,causal --backward --spans none
      done
      ;;
    large) # messages of 100 KB to 1 MB, as in long sequences; seven trials of few plans
      large=("${sizes[@]}" --trials 7 --backward --spans none --output "$output/large.h5")
      for mask in causal full; do
        on 16x1 10mbit drivers/bench.py "${large[@]}" --nheads 8 --headdim 64 --seqlens 2048 \
          --masks "$mask" --plans attention2d:4x4,ring
        on 64x1 10mbit drivers/bench.py "${large[@]}" --nheads 16 --headdim 32 --seqlens 4096 \
          --masks "$mask" --plans attention2d:8x8,ring
        on 16x4 10mbit drivers/bench.py "${large[@]}" --nheads 16 --headdim 32 --seqlens 4096 \
          --masks "$mask" --plans attention2d:8x8,node_aware:8x8@rcu/2x2,attention2d:4x4x4,ring
      done
      ;;
    crossover) # one workload, from links that decide everything to links that hardly count
      while read -r rate EMULATE_CORES; do
        export EMULATE_CORES
        (
          output+=/crossover/$rate
          mkdir -p "$output"
          calibrated 16x1 "$rate"
          bench 16x1 "$rate" --nheads 8 --headdim 64 --seqlens 8K --masks causal --spans none \
            --backward --plans auto,attention2d:4x4,ring:4x1x4,ring </dev/null
        )
      done <<<$'1gbit 0.05\n300mbit 0.05\n100mbit 0.05\n30mbit 0.05\n10mbit 0.1'
      unset EMULATE_CORES
      ;;
    scaling) # links so slow that computing does not count
      for nodes in 4 16 64; do
        on "${nodes}x1" 1mbit drivers/bench.py --output "$output/scaling.h5" "${sizes[@]}" \
          --seqlens 512 --plans attention2d,ring --masks full --backward
      done
      ;;
    triangle) # the best grids, the ring and what the planner picks beside it
      for cluster in "6x1 10mbit 2x3" "10x1 10mbit 2x5" "15x1 10mbit 3x5" "28x1 5mbit 4x7" \
        "12x1 10mbit 2x3x2" "24x1 5mbit 2x3x4"; do
        read -r nodes rate grid <<<"$cluster"
        calibrated "$nodes" "$rate"
        heads=${grid#*x}
        [[ $heads == *x* ]] && heads=${heads#*x} || heads=1
        bench "$nodes" "$rate" --masks causal --seqlens 960 --trials 7 --spans none --backward \
          --plans "auto:2,attention2d:$grid,triangle:$((${nodes%x*} / heads))x1x$heads,ring"
      done
      ;;
    nodes) # node-aware grids beside the best plain ones
      calibrated 16x4 5mbit
      for mask in causal full; do
        on 16x4 5mbit drivers/bench.py --output "$output/nodes.h5" --profile "$output/16x4.toml" \
          "${sizes[@]}" --trials 7 --spans none --masks "$mask" --nheads-kv 16,2 --backward \
          --plans "auto,attention2d:8x8,node_aware:8x8@rcu/2x2,node_aware:16x2x2@rcu/2x2,ring"
      done
      ;;
    masks) # two heads only; first transfers decide, then computing decides
      for cluster in "16x1 10mbit 2K 4x4" "16x1 500mbit 8K 4x4 0.1" "64x1 2.5mbit 2K 8x8" \
        "64x1 200mbit 8K 8x8 0.03"; do
        read -r nodes rate seqlen grid cores <<<"$cluster"
        export EMULATE_CORES=$cores
        calibrated "$nodes" "$rate"
        bench "$nodes" "$rate" --nheads 2 --headdim 64 --seqlens "$seqlen" --spans none --backward \
          --masks causal,causal_document,share_question,sliding_window_causal \
          --plans "auto:2,auto:each,attention2d:$grid,ring"
      done
      unset EMULATE_CORES
      ;;
    train) # activations by ranks; then a layer on nodes, with GPT-3's ratio of length to width at 128K
      for ranks in 1 2 4 8; do
        run_mpi "$ranks" 900 python drivers/bench_gpt.py train --output "$output/memory.h5" --resume \
          --preset tiny --seqlen 4K --recompute --trials 1 --plans attention2d
      done
      calibrated 16x1 10mbit
      on 16x1 10mbit drivers/bench_gpt.py train --output "$output/step.h5" --resume \
        --profile "$output/16x1.toml" --preset gpt3-175b-layer --width 192 --nheads 12 \
        --positions rotary --seqlen 2K --plans auto:2,attention2d:4x4,ring --trials 7
      ;;
    overlap) # computing and communicating at once and in turn, where both take equally long
      on 16x1 100mbit drivers/bench.py --output "$output/overlap.h5" "${sizes[@]}" \
        --plans attention2d:4x4 --nheads 8 --headdim 64 --seqlens 16K --backward \
        --overlap --no-overlap
      ;;
    *)
      echo "study.sh: no part $name: 16x1, 64x1, 16x4, ratio, large, crossover, scaling, overlap, triangle, nodes, masks, train" >&2
      exit 2
      ;;
  esac
done
