#!/usr/bin/env bash
# A mesh over plain ssh: all hosts are one world, FSDP2 shards inside a host, the exchange owns the axis between hosts. Requirements as
# in islands.sh; if one host is lost, all are. Two hosts, or four:
#
#     HOSTS="node-a node-b" ADDRESS=10.0.0.1 bash recipes/ssh/mesh.sh
#     HOSTS="a b c d" LAUNCHER=torchrun bash recipes/ssh/mesh.sh
#
# Ctrl-C (or SIGTERM) here tells every host to save and end with status 75. RESUME=1 and the same hosts in the same order go on from what
# is in OUTPUT. With RESUME=auto a host that holds no checkpoint takes over from the others; status 78: a person must choose between what
# they hold.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) echo "mesh.sh: $1: takes no arguments, only variables; --help names them" >&2; exit 2 ;;
esac
[ -n "${HOSTS:-}" ] || { echo "mesh.sh: HOSTS is not set: the hosts as ssh knows them, as in HOSTS=\"node-a node-b\"" >&2; exit 2; }
read -r -a hosts <<<"$HOSTS"
ADDRESS=${ADDRESS:-${hosts[0]}}           # of the first host, as the others reach it
PORT=${PORT:-29500}
MODEL=${MODEL:-llama-3.2-1b}
DATA=${DATA:-stdlib}
TOKENIZER=${TOKENIZER:-bytes}
EXCHANGE=${EXCHANGE:-recipes/exchange/diloco.yaml}
STEPS=${STEPS:-10000}
SAVE_EVERY=${SAVE_EVERY:-200}             # steps between checkpoints; a crash costs at most these, 0 saves none
PROCS=${PROCS:-8}                         # GPUs per host
OPTIONS=${OPTIONS:---bf16}                # more options of recipes/pretrain.py
LAUNCHER=${LAUNCHER:-accelerate}          # or torchrun
CONFIG=${CONFIG:-recipes/accelerate/fsdp2-mesh.yaml}
OUTPUT=${OUTPUT:-outputs/mesh}
FOLDER=${FOLDER:-$PWD}                    # the repository on the hosts
PYTHON=${PYTHON:-$FOLDER/.venv/bin/python}
case ${RESUME:-} in "") ;; auto) OPTIONS="$OPTIONS --resume auto" ;; *) OPTIONS="$OPTIONS --resume" ;; esac

count=${#hosts[@]}
train="recipes/pretrain.py --mesh --model $MODEL --data $DATA --tokenizer $TOKENIZER --exchange $EXCHANGE --steps $STEPS --output $OUTPUT"
train="$train --save-every $SAVE_EVERY $OPTIONS"
launch() { # launch RANK: the launcher's words on host number RANK
    case $LAUNCHER in
        accelerate)
            echo "accelerate launch --config_file $CONFIG --num_machines $count --num_processes $((count * PROCS)) --machine_rank $1" \
                "--main_process_ip $ADDRESS --main_process_port $PORT" \
                "--parallelism_config_dp_replicate_size $count --parallelism_config_dp_shard_size $PROCS" ;;
        torchrun) echo "torchrun --nnodes $count --node-rank $1 --nproc-per-node $PROCS --master-addr $ADDRESS --master-port $PORT" ;;
        *) echo "mesh.sh: LAUNCHER=$LAUNCHER: accelerate or torchrun" >&2; return 2 ;;
    esac
}

launch 0 >/dev/null
file=/tmp/fsdp-demo-mesh-$$-$(date +%s).pid
stop() {
    local host
    for host in "${hosts[@]}"; do ssh -o BatchMode=yes "$host" "kill \$(cat $file.* 2>/dev/null) 2>/dev/null; rm -f $file.*" </dev/null || true; done
}
trap stop INT TERM
nodes=()
for rank in "${!hosts[@]}"; do
    words="exec $PYTHON -m fsdp_demo.launch $(launch "$rank") $train"
    ssh -o BatchMode=yes "${hosts[rank]}" "cd $FOLDER && echo \$\$ >$file.$rank && $words" </dev/null &
    nodes+=($!)
done
status=0
for _ in "${nodes[@]}"; do wait -n || break; done # until one fails: the others then have half a minute to save and end
for _ in {1..30}; do [ -z "$(jobs -r)" ] || sleep 1; done
stop
for node in "${nodes[@]}"; do wait "$node" || status=$?; done
exit $status
