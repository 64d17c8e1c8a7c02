#!/bin/sh
# Forms one Cluster of Valkey or Redis nodes. Each node becomes the master of its share of the slots:
#
#     form-cluster.sh HOST:PORT...
#
# Running it again is safe, because it leaves finished steps as they are. Run it once after every
# start, or let it repeat every EVERY seconds; it then also finds nodes whose addresses changed. CLI
# names the client program, REDISCLI_AUTH the password. If the Cluster does not form within WITHIN
# seconds, the exit status is 1.
set -eu

cli=${CLI:-valkey-cli}
within=${WITHIN:-60}
every=${EVERY:-0}

ask() { # HOST:PORT COMMAND...
    at=$1
    shift
    timeout 2 "$cli" -h "${at%:*}" -p "${at##*:}" "$@" 2>/dev/null || true
}

address_of() { # HOST:PORT; `cluster meet` takes an address, not a name
    getent ahosts "${1%:*}" | awk '{ print $1; exit }'
}

form() {
    number=0
    for node in "$@"; do
        first=$((number * 16384 / $#))
        number=$((number + 1))
        last=$((number * 16384 / $# - 1))
        # A node refuses each of these two commands if it is done already, and nothing changes.
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
