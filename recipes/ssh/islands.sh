#!/usr/bin/env bash
# Islands over plain ssh: one per host, a store on the first. Every host has this repository at the same path, at the same commit, with
# .venv (bash recipes/setup.sh), and lets this machine in without a password. Two hosts, or four:
#
#     HOSTS="node-a node-b" ADDRESSES="10.0.0.1 10.0.0.2" bash recipes/ssh/islands.sh
#     HOSTS="a b c d" LAUNCHER=torchrun EXCHANGE=recipes/exchange/demo.yaml bash recipes/ssh/islands.sh
#
# An island that is lost is started again on its host, RESTARTS times at most, and joins the others,
# which train on. ISLAND_* variables of this shell (ISLAND_MIN, ISLAND_TOKEN, ISLAND_DEAD ...) reach all islands and the store, on no
# command line.
#
# Ctrl-C (or SIGTERM) here tells every island to save and end with status 75; RESUME=1 and the same hosts in the same order go on. With
# RESUME=auto an island that holds no checkpoint takes over from the others; status 78: a person must choose between what they hold.
# Each start has a run name of its own (RUN, by default the time). Its store ends with this script, and its file, under /tmp on the first
# host, goes with it. RESUME goes by the checkpoints in OUTPUT alone.
# Without ssh between the machines, type the commands of docs/two-machines.md, "Four commands", on each.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) echo "islands.sh: $1: takes no arguments, only variables; --help names them" >&2; exit 2 ;;
esac
[ -n "${HOSTS:-}" ] || { echo "islands.sh: HOSTS is not set: the hosts as ssh knows them, one island each, as in HOSTS=\"node-a node-b\"" >&2; exit 2; }
ADDRESSES=${ADDRESSES:-$HOSTS}            # where the hosts reach each other, in the same order: private or WireGuard addresses
PORT=${PORT:-29400}                       # of the store, on the first host
MODEL=${MODEL:-llama-3.2-1b}
DATA=${DATA:-stdlib}                      # a file or folder, or a hub id; stdlib needs the same Python on every host
TOKENIZER=${TOKENIZER:-bytes}
EXCHANGE=${EXCHANGE:-recipes/exchange/diloco.yaml}
STEPS=${STEPS:-10000}
SAVE_EVERY=${SAVE_EVERY:-200}             # steps between checkpoints; a crash costs at most these, 0 saves none
PROCS=${PROCS:-8}                         # GPUs per host
OPTIONS=${OPTIONS:---bf16}                # more options of recipes/pretrain.py
LAUNCHER=${LAUNCHER:-accelerate}          # or torchrun
CONFIG=${CONFIG:-recipes/accelerate/fsdp2-island.yaml}
OUTPUT=${OUTPUT:-outputs/islands}
FOLDER=${FOLDER:-$PWD}                    # the repository on the hosts
PYTHON=${PYTHON:-$FOLDER/.venv/bin/python}
RUN=${RUN:-$(date +%Y%m%d-%H%M%S)-$$}     # a run id is used once per store
RESTARTS=${RESTARTS:-9}                   # how often an island is started again
again="--resume auto"
case ${RESUME:-} in "") ;; auto) OPTIONS="$OPTIONS --resume auto"; again= ;; *) OPTIONS="$OPTIONS --resume" ;; esac

read -r -a hosts <<<"$HOSTS"
read -r -a addresses <<<"$ADDRESSES"
if [ ${#hosts[@]} != ${#addresses[@]} ]; then
    echo "islands.sh: ${#hosts[@]} HOSTS and ${#addresses[@]} ADDRESSES: must be as many" >&2
    exit 2
fi

case $LAUNCHER in
    accelerate) launch="accelerate launch --config_file $CONFIG --num_processes $PROCS" ;;
    torchrun) launch="torchrun --standalone --nproc-per-node $PROCS" ;;
    *) echo "islands.sh: LAUNCHER=$LAUNCHER: accelerate or torchrun" >&2; exit 2 ;;
esac

# A process on a host leaves its id in a file, so that it can be told to end by a second ssh: a signal to ssh does not cross it.
file() { echo "/tmp/fsdp-demo-$RUN-$1.pid"; }
exports() { # what of ISLAND_* this script does not set itself, as commands of a shell: ssh carries no variables, and a token shows in no list
    local name
    for name in $(compgen -e ISLAND_); do
        case $name in ISLAND_RANK|ISLAND_COUNT|ISLAND_ENDPOINT|ISLAND_ADDRESS|ISLAND_RUN|ISLAND_STATUS|ISLAND_NAME|ISLAND_ATTEMPT) continue ;; esac
        printf "export %s='%s'\n" "$name" "${!name//\'/\'\\\'\'}"
    done
}
start() { # start HOST NAME COMMAND: in the background
    ssh -o BatchMode=yes "$1" "cd $FOLDER && echo \$\$ >$(file "$2") && eval \"\$(cat)\" && exec $3 </dev/null" < <(exports; echo :) &
}
stop() { ssh -o BatchMode=yes "$1" "kill \$(cat $(file "$2")) 2>/dev/null; rm -f $(file "$2")*" </dev/null || true; }
stop_islands() { for rank in "${!hosts[@]}"; do stop "${hosts[rank]}" "$rank"; done; }
trap stop_islands INT TERM
finish() {
    kill "${watcher:-}" 2>/dev/null || true
    stop "${hosts[0]}" store
    for rank in "${!hosts[@]}"; do ssh -o BatchMode=yes "${hosts[rank]}" "rm -f $(file "$rank")" </dev/null || true; done
}
trap finish EXIT

endpoint=${addresses[0]}:$PORT
start "${hosts[0]}" store "$PYTHON -m fsdp_demo.cli store --bind $endpoint --file $(file store).sqlite"
store=$!
watch() { # a store that ends at once (its port is taken, say) ends the islands, too: they would wait for it
    for _ in $(seq 60); do sleep 1; kill -0 "$store" 2>/dev/null || { kill -TERM $$; return; }; done
}
watch &
watcher=$!
train="recipes/pretrain.py --model $MODEL --data $DATA --tokenizer $TOKENIZER --exchange $EXCHANGE --steps $STEPS --output $OUTPUT"
train="$train --save-every $SAVE_EVERY $OPTIONS"
islands=()
for rank in "${!hosts[@]}"; do
    variables="ISLAND_RANK=$rank ISLAND_COUNT=${#hosts[@]} ISLAND_ENDPOINT=$endpoint ISLAND_ADDRESS=${addresses[rank]}"
    variables="$variables ISLAND_RUN=$RUN"
    start "${hosts[rank]}" "$rank" "env $variables $PYTHON -m fsdp_demo.launch --restarts $RESTARTS --resume-args='$again' $launch $train"
    islands+=($!)
done

wait_for() { # the status of a process of ours; a signal ends `wait` early, so again while the process is there
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
    wait "$1"
}
status=0
for rank in "${!islands[@]}"; do
    ended=0
    wait_for "${islands[rank]}" || ended=$?
    [ $ended = 0 ] || echo "islands.sh: island $rank on ${hosts[rank]} ended with status $ended" >&2
    case $ended in 0) ;; 75) [ $status != 0 ] || status=75 ;; 78) status=78 ;; *) [ $status = 78 ] || status=1 ;; esac # 78: decide
done
exit $status
