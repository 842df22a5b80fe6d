# shellcheck shell=bash
# What the head and the nodes of an emulated cluster have in common.  To be sourced by both, in
# their namespaces.

prefix=10.77.0 # of all addresses

# address NUMBER, mac NUMBER: of a node; the head comes after the last one.
address() {
  echo "$prefix.$(($1 + 1))"
}
mac() {
  printf '02:77:00:00:00:%02x\n' "$1"
}

# limit DEVICE RATE: what tc -batch takes to limit what the device sends.
limit() {
  [[ $2 != none ]] || return 0
  # Not tbf: with such a burst it gave rings of 16 nodes 45 % of the rate.
  echo "qdisc add dev $1 root handle 1: htb default 1"
  echo "class add dev $1 parent 1: classid 1:1 htb rate $2 ceil $2 quantum 60000" \
    "burst $EMULATE_BURST cburst $EMULATE_BURST"
  echo "qdisc add dev $1 parent 1:1 bfifo limit $EMULATE_QUEUE"
}

# set_sysctl NAME VALUE: what this kernel does not have is left.
set_sysctl() {
  [[ ! -e /proc/sys/net/$1 ]] || echo "$2" >"/proc/sys/net/$1"
}
set_sysctl ipv6/conf/all/disable_ipv6 1 # its announcements would be counted
set_sysctl ipv6/conf/default/disable_ipv6 1
# The kernel's choice may be another; and no connection starts slowly again after computing.
set_sysctl ipv4/tcp_congestion_control reno
set_sysctl ipv4/tcp_slow_start_after_idle 0
set_sysctl ipv4/tcp_no_metrics_save 1
# Nothing is lost here, but much may queue: a slow answer is no reason to send again.
set_sysctl ipv4/tcp_early_retrans 0
# What is waiting in a link delays what comes after it: let each connection keep its own.
set_sysctl ipv4/tcp_limit_output_bytes 16384
