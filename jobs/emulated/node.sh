#!/usr/bin/env bash
# node.sh NUMBER NAME RATE DIR: set up a node of an emulated cluster, write "ready" to file descriptor
# 3, and keep the namespaces of the node.  head.sh starts this script in these namespaces.
set -euo pipefail
trap 'echo failed >&3' EXIT
[[ -p $4/ready ]]

echo "$2" >/proc/sys/kernel/hostname
source jobs/emulated/network.sh
{
  echo "link set lo up"
  # The other end goes to the namespace of process 1, head.sh.
  echo "link add eth0 address $(mac "$1") type veth peer name port$1 netns 1"
  echo "addr add $(address "$1")/24 dev eth0"
  echo "link set eth0 up"
  echo "route replace $prefix.0/24 dev eth0 src $(address "$1") rto_min 5s"
  cat "$4/neighbours"
} | ip -batch -
limit eth0 "$3" | tc -batch -
# Mount /sys again: it shows the network devices of the namespace in which it was mounted.
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm

trap - EXIT
echo ready >&3
exec 3>&-
exec sleep infinity
