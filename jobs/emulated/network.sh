# shellcheck shell=bash
# Functions for the head and the nodes of an emulated cluster.  Both source this file, in their
# namespaces.

prefix=10.77.0 # of all addresses

# address NUMBER, mac NUMBER: print an address of a node; the head comes after the last node.
address() {
  echo "$prefix.$(($1 + 1))"
}
mac() {
  printf '02:77:00:00:00:%02x\n' "$1"
}

# limit DEVICE RATE: print the lines for tc -batch that limit the rate at which a device sends.
limit() {
  [[ $2 != none ]] || return 0
  # Use htb, not tbf: with this burst tbf gave rings of 16 nodes 45 % of the rate.
  echo "qdisc add dev $1 root handle 1: htb default 1"
  echo "class add dev $1 parent 1: classid 1:1 htb rate $2 ceil $2 quantum 60000" \
    "burst $EMULATE_BURST cburst $EMULATE_BURST"
  echo "qdisc add dev $1 parent 1:1 bfifo limit $EMULATE_QUEUE"
}

# set_sysctl NAME VALUE: set a parameter of the kernel, if this kernel has it.
set_sysctl() {
  [[ ! -e /proc/sys/net/$1 ]] || echo "$2" >"/proc/sys/net/$1"
}
set_sysctl ipv6/conf/all/disable_ipv6 1 # its announcements would be counted
set_sysctl ipv6/conf/default/disable_ipv6 1
# Set the congestion control, as the kernel's default may differ.  Connections must not start slowly
# again after computing.
set_sysctl ipv4/tcp_congestion_control reno
set_sysctl ipv4/tcp_slow_start_after_idle 0
set_sysctl ipv4/tcp_no_metrics_save 1
# No packet is lost here, but many may queue: a slow answer is no reason to send again.
set_sysctl ipv4/tcp_early_retrans 0
# Packets that wait at a link delay all later ones, so let each connection keep most of its data.
set_sysctl ipv4/tcp_limit_output_bytes 16384
