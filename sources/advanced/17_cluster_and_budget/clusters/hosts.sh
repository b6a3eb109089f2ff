#!/bin/sh
# The hosts of a Slurm on one machine, as namespaces. Called by slurm.py, as root of namespaces:
#   hosts.sh head FOLDER NODES   the first process: controller, bridge, nodes; ends with its input
#   hosts.sh link FOLDER I       start node I and join it to the bridge
#   hosts.sh node FOLDER I       the first process of node I, in namespaces of its own
set -eu
role=$1 folder=$2 number=$3
export SLURM_CONF="$folder/slurm.conf"
case $role in
head)
  hostname head
  mount --bind "$folder/hosts" /etc/hosts
  ip link set lo up
  ip link add bridge type bridge
  ip address add 10.78.0.1/24 dev bridge
  ip link set bridge up
  munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --num-threads=2 \
    --pid-file="$folder/munged.pid" --log-file="$folder/log/munged" --seed-file="$folder/munge.seed"
  slurmctld
  for i in $(seq "$number"); do sh "$0" link "$folder" "$i"; done
  echo ready
  cat
  ;;
link)
  # A node has its own network, name and processes: when its first process is killed, all end.
  unshare --net --uts --pid --fork --kill-child --mount-proc \
    sh "$0" node "$folder" "$number" </dev/null >"$folder/log/start.n$number" 2>&1 &
  until inside=$(pgrep -P $!); do sleep 0.01; done
  echo "$inside" >"$folder/n$number.inside"
  ip link add "n$number" type veth peer name eth0 netns "/proc/$inside/ns/net"
  ip link set "n$number" master bridge up
  ;;
node)
  hostname "n$number"
  ip link set lo up
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done
  ip address add "10.78.0.1$number/24" dev eth0
  ip link set eth0 up
  slurmd -N "n$number"
  while true; do sleep 3600; done
  ;;
esac
