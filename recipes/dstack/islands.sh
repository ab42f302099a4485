#!/usr/bin/env bash
# Islands in several regions by dstack, each a run of its own, since dstack puts all nodes of one run into one region; and a run for the
# store. From a machine where `dstack` is logged in, with the image of recipes/kubernetes/Dockerfile in both files beside this one:
#
#     REGIONS="us-central1 europe-west4" bash recipes/dstack/islands.sh
#
# Private addresses must reach each other, as on Google Cloud between the regions of a network; elsewhere join the networks. An island that
# ends with 75 or is killed is started again in its run. A lost machine is replaced: the island takes over from the others. The store goes
# on when islands have ended: dstack stop NAME-store
set -euo pipefail
case ${1:-} in -h | --help) sed -n '/^set /q; /^# /s/^# //p; /^#$/s/#//p' "$0"; exit 0 ;; esac
[ -n "${REGIONS:-}" ] || { echo "islands.sh: REGIONS is not set: one region for each island, as in REGIONS=\"us-central1 europe-west4\"" >&2; exit 2; }
read -r -a regions <<<"$REGIONS"
NAME=${NAME:-islands}                     # what the names of the runs begin with
export ISLAND_TOKEN=${ISLAND_TOKEN:-$(openssl rand -hex 32)} ISLAND_COUNT=${#regions[@]}
export ISLAND_RUN=${ISLAND_RUN:-$(date +%Y%m%d-%H%M%S)}   # a run id is used once per store
files=$(dirname "$0")

start() { dstack apply --yes --detach --file "$files/$1.dstack.yml" --name "$2" --region "$3"; } # start FILE NAME REGION
start store "$NAME-store" "${regions[0]}"
address=
until [ -n "$address" ]; do # the private address of the machine, once there is one
    address=$(dstack run get "$NAME-store" --json | python3 -c '
import json, sys
(job,) = json.load(sys.stdin)["jobs"]
print((job["job_submissions"][-1]["job_provisioning_data"] or {}).get("internal_ip") or "")')
    sleep 2
done
export ISLAND_ENDPOINT=$address:29400
for rank in "${!regions[@]}"; do
    ISLAND_RANK=$rank start island "$NAME-island$rank" "${regions[rank]}"
done
