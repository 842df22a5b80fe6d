#!/usr/bin/env bash
# Simulate what docs/study.md says of scale: plans for 64 to 4096 ranks of three machines, by SimGrid.
#
#   bash jobs/scale.sh results/scale                  all of it, four hours on one core
#   bash jobs/scale.sh results/scale 64 picks         some of it
#
# Files: scale.h5 (all methods by ranks and tokens, and the planner's picks), all.h5 (every plan for
# one workload), partitions.h5 (triangles), networks.h5 (networks that are worse than one
# switch), links.h5 (communication alone).  Simulations that a file holds already are not repeated.
# Afterwards python drivers/report.py scale prints tables, and drivers/plot.py results draws figures.
# jobs/simulate.sh says how to install SimGrid.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:?usage: scale.sh FOLDER [64] [256] [1024] [4096] [gathers] [picks] [all] [partitions] [networks] [links]}
shift
mkdir -p "$output"
source jobs/env.sh
use_env any

a100=data/machines/a100-16x4.toml one_nic=data/machines/a100-4-1nic.toml
h100=data/machines/h100-8.toml single=data/machines/h100-64x1.toml

# replay FILE RANKS TOKENS PLANS OPTIONS...: simulate causal plans with gradients, 32 heads of 128.
replay() {
  python drivers/simulate.py --output "$output/$1.h5" --resume --ranks "$2" --seqlens "$3" --plans "$4" \
    --backward --nheads 32 "${@:5}"
}

# methods RANKS TOKENS KV-HEADS PLANS...: simulate plans on the three machines.
methods() {
  local IFS=,
  replay scale "$1" "$2" "${*:4}" --nheads-kv "$3" --profile "$a100,$one_nic,$h100" \
    --coarse "${coarse:-0}"
}

(($# > 0)) || set -- 64 256 1024 4096 gathers picks all partitions networks links
for part in "$@"; do
  case $part in
    # Plans without a head axis, with 8 ranks that share the heads, and with 32.
    64)
      plans=(ring "ring:8x1x8" "double ring:16x4" "double ring:2x4x8" "attention2d:8x8"
        "attention2d:2x4x8" "node aware:8x8" "node aware:2x4x8")
      methods 64 64K,256K,1M,4M,16M 8,32 "${plans[@]}"
      methods 64 64K,256K,1M,4M,16M 32 "ring:2x1x32" "attention2d:1x2x32" "attention2d:2x1x32"
      ;;
    256)
      plans=(ring "ring:32x1x8" "double ring:64x4" "double ring:8x4x8" "attention2d:16x16"
        "attention2d:4x8x8" "node aware:16x16" "node aware:4x8x8")
      methods 256 64K,256K,1M,4M,16M 8,32 "${plans[@]}"
      methods 256 64K,256K,1M,4M,16M 32 "ring:8x1x32" "double ring:2x4x32" "attention2d:2x4x32"
      ;;
    1024)
      plans=("ring:128x1x8" "attention2d:32x32" "attention2d:8x16x8" "node aware:32x32")
      methods 1024 64K,256K,1M,4M,16M 32 "ring:32x1x32" "attention2d:4x8x32" \
        "ring:128x1x8" "attention2d:8x16x8"
      methods 1024 64K,256K,1M,4M 32 "${plans[@]}"
      methods 1024 64K,1M 8 "${plans[@]}"
      ;;
    4096)
      # Plans with 32 ranks that share the heads: the best by the model, or nearly the best.
      replay scale 4096 256K,1M,4M "ring:128x1x32,double ring:32x4x32@ruc,attention2d:8x16x32@cur" \
        --profile "$a100,$h100"
      replay scale 4096 1M,4M "ring:128x1x32@cur,attention2d:8x16x32@cur" --profile "$one_nic"
      replay scale 4096 1M "double ring:64x2x32@urc,double ring:32x4x32@ruc" --profile "$one_nic"
      ;;
    gathers) # exact to six in a thousand, because they take long
      coarse=1e-3
      gathers=("attention2d:64x1" "attention2d:1x64" "attention2d:8x1x8")
      methods 64 64K,256K,1M,4M 32 "${gathers[@]}"
      gathers=("attention2d:256x1" "attention2d:1x256" "attention2d:32x1x8")
      methods 256 64K,1M 32 "${gathers[@]}"
      coarse=0
      ;;
    picks) # the planner's pick of each method
      methods 64 64K,256K,1M,4M 8,32 auto:each
      methods 256 64K,256K,1M,4M 8,32 auto:each
      methods 1024 64K,256K,1M,4M 32 auto:each
      ;;
    all)
      replay all 256 64K all,auto --profile "$a100" --coarse 1e-4
      ;;
    partitions) # triangles have 66 and 253 ranks
      machines=(--profile "$a100,$one_nic,$h100")
      replay partitions 66 64K,1M "triangle:66x1,attention2d:6x11" "${machines[@]}"
      replay partitions 253 64K,1M "triangle:253x1,attention2d:11x23" "${machines[@]}"
      replay partitions 256 64K,1M "attention2d:16x16" "${machines[@]}"
      ;;
    networks)
      plans="ring,ring:32x1x8,double ring:64x4,attention2d:16x16,attention2d:4x8x8,node aware:16x16"
      for odd in "--networks switch,fat_tree,fat_tree:2,fat_tree:4,dragonfly" "--slow-rank 2" \
        "--slow-port 2" "--latency 10"; do
        # shellcheck disable=SC2086
        replay networks 256 64K,1M "$plans" --profile "$a100,$h100" $odd
      done
      ;;
    links) # a ring of 4096 ranks has 50 million messages
      replay links 64,256,1024,4096 1M "attention2d,ring" --links-alone --profile "$single"
      replay links 64,256,1024 1M "attention2d,ring,node aware" --links-alone --profile "$a100"
      replay links 4096 1M "attention2d,node aware" --links-alone --profile "$a100"
      ;;
    *)
      echo "scale.sh: no part $part: 64, 256, 1024, 4096, gathers, picks, all, partitions, networks, links" >&2
      exit 2
      ;;
  esac
done
