#!/bin/sh
# Makes one Cluster of Valkey or Redis nodes, each the master of its share of the slots:
#
#     form-cluster.sh HOST:PORT...
#
# What is done already is left as it is, so it may run again: once after every start, or every
# EVERY seconds, which also finds nodes again whose addresses changed. CLI is the client to use,
# REDISCLI_AUTH the password. Exit status 1: within WITHIN seconds there was no such Cluster.
set -eu

cli=${CLI:-valkey-cli}
within=${WITHIN:-60}
every=${EVERY:-0}

ask() { # HOST:PORT COMMAND...
    at=$1
    shift
    timeout 2 "$cli" -h "${at%:*}" -p "${at##*:}" "$@" 2>/dev/null || true
}

address_of() { # HOST:PORT; a Cluster meets addresses, not names
    getent ahosts "${1%:*}" | awk '{ print $1; exit }'
}

form() {
    number=0
    for node in "$@"; do
        first=$((number * 16384 / $#))
        number=$((number + 1))
        last=$((number * 16384 / $# - 1))
        # Both are refused where they are done, and then nothing changes.
        ask "$node" cluster addslotsrange "$first" "$last" >/dev/null
        ask "$node" cluster set-config-epoch "$number" >/dev/null
        ask "$1" cluster meet "$(address_of "$node")" "${node##*:}" >/dev/null
    done
}

formed() {
    for node in "$@"; do
        info=$(ask "$node" cluster info | tr -d '\r')
        for wanted in cluster_state:ok cluster_slots_assigned:16384 "cluster_size:$#"; do
            echo "$info" | grep -qx "$wanted" || return 1
        done
    done
}

ends=$(($(date +%s) + within))
until formed "$@"; do
    if [ "$(date +%s)" -ge "$ends" ]; then
        echo "form-cluster: no Cluster of $* after $within s" >&2
        exit 1
    fi
    form "$@"
    sleep 1
done
echo "form-cluster: $* are one Cluster"

while [ "$every" -gt 0 ]; do
    sleep "$every"
    formed "$@" || form "$@"
done
