#!/usr/bin/env bash
# Trains a small Llama on this machine as islands that exchange momentum; makes the environment first. See --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash recipes/quickstart.sh [OPTIONS] [OPTIONS OF pretrain.py]

Makes .venv (a second run reuses it), then trains a small Llama on the source text of this machine's Python library, as
2 islands of 2 processes, with the demo preset. Results: OUTPUT/summary.json, report.html and a folder per island.

  --exchange NAME       a preset (.venv/bin/fsdp-demo presets lists them), auto, or a yaml file   (demo)
  --islands N           islands                                                     (2)
  --procs P             processes per island, FSDP2 between them                    (2)
  --steps N             optimizer steps                           (80; 200 with --compare)
  --output FOLDER       where results go                                            (outputs/quickstart)
  --link RATE           rate of each island's link, as in 100Mbit                   (not limited)
  --rtt TIME            round trip between islands, as in 40ms                      (none)
  --launcher NAME       accelerate or torchrun                                      (accelerate)
  --cpu                 use the CPU even where there are GPUs
  --compare A,B,C       run each of these presets, then print one table; also OUTPUT/compare.md, compare.json, report.html
  --help                this text

Options of pretrain.py that can be added: --model --data --tokenizer --sequence-length --batch-size --accumulation --set --clip
--no-shard --bf16 --activation-checkpointing --compile --lr --schedule --warmup-steps --seed --eval-every --eval-batches --log-every
--peak-tflops --save-every --keep --remote --save-async --resume --take-over --fresh-exchange --report-to --kept-energy (--mesh is for one launch over all machines, not for islands)
For example: bash recipes/quickstart.sh --data my_texts/ --set codec.topk=16 --lr 0.001
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exchange=demo islands=2 procs=2 steps="" output="" compare=""
rehearse=() pretrain=()
changes=() # what follows --set

fail() { echo "quickstart: $*" >&2; exit 2; }

# Options of pretrain.py, by what follows them: a value, a word or nothing, nothing.
values=" model data tokenizer sequence-length batch-size accumulation clip lr schedule warmup-steps seed eval-every eval-batches log-every \
    peak-tflops save-every keep remote report-to "
words=" compile resume "
flags=" no-shard bf16 activation-checkpointing save-async take-over fresh-exchange kept-energy "

while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    name=${1#--}
    name=${name//_/-}
    case "$values exchange islands procs steps output compare link rtt launcher set " in
        *" $name "*) [ $# -ge 2 ] || fail "$1 needs a value" ;;
    esac
    case $1 in
        --help | -h) usage; exit 0 ;;
        --exchange) exchange=$2; shift 2 ;;
        --islands) islands=$2; shift 2 ;;
        --procs) procs=$2; shift 2 ;;
        --steps) steps=${2:-none}; shift 2 ;;
        --output) output=$2; shift 2 ;;
        --compare) compare=$2; shift 2 ;;
        --link | --rtt | --launcher) rehearse+=("$1" "$2"); shift 2 ;;
        --cpu) rehearse+=("$1"); shift ;;
        --set)
            shift
            [[ $1 == *=* && $1 != --* ]] || fail "--set $1: must read path=value, as in --set codec.topk=16 schedule.sync_every=50"
            while [ $# -gt 0 ] && [[ $1 == *=* && $1 != --* ]]; do changes+=("$1"); shift; done ;;
        --*)
            case "$values" in *" $name "*) pretrain+=("--$name" "$2"); shift 2; continue ;; esac
            case "$flags" in *" $name "*) pretrain+=("--$name"); shift; continue ;; esac
            case "$words" in *" $name "*) ;; *) usage >&2; fail "unknown option $1; the options are above" ;; esac
            pretrain+=("--$name"); shift
            if [ $# -gt 0 ] && [[ $1 != --* ]]; then pretrain+=("$1"); shift; fi ;;
        *) usage >&2; fail "unknown option $1; the options are above" ;;
    esac
done
[ -n "$steps" ] || { [ -n "$compare" ] && steps=200 || steps=80; }
case $steps in *[!0-9]*) fail "--steps $steps: must be a number of steps, 1 or more" ;; esac
steps=$((10#$steps)) # 08 is no octal number
[ "$steps" -ge 1 ] || fail "--steps $steps: must be a number of steps, 1 or more"

given() { # given NAME: was this option of pretrain.py (or change of the exchange) given?
    local word
    for word in ${pretrain[@]+"${pretrain[@]}"} ${changes[@]+"${changes[@]}"}; do [[ $word == "$1" || $word == "$1="* ]] && return 0; done
    return 1
}

# Learning rates that were tried on this model, data and number of steps, or carried over from the study by the root of the width.
# Elsewhere the published one of the preset holds.
rate() {
    if given --model || given --lr; then return; fi
    case $1 in
        demo) echo 0.001 ;;
        random | stride | sign_loco) echo 0.004 ;;
        muloco) echo 0.0226 ;;      # the study's 0.032
        sign_muloco) echo 0.032 ;;  # the study's 0.045
        full | local_sgd | local_adam | desloc | diloco | streaming_diloco | decoupled_momentum | sparse_loco | auto) echo 0.003 ;;
    esac
}

# The published periods (16 to 500 steps) do not fit into a few hundred: take one that gives about 15 exchanges.
fit() {
    local period=$((steps >= 30 ? steps / 15 : 2)) word rise
    case $1 in full) given codec.value_dtype || given value_dtype || echo "codec.value_dtype=bf16" ;; esac # what most clusters reduce in, and what ratios are counted against
    case $1 in
        local_sgd | local_adam | desloc | diloco | streaming_diloco | muloco)
            given schedule.sync_every || given sync_every || given period || echo "period=$period" ;;
        decoupled_momentum | sparse_loco | sign_muloco) # sparser and oftener wins: benchmarks/results/study.md, and study-muon.md
            [ "$1" != sign_muloco ] || given beta || given accumulator.beta || echo "beta=0.6" # a short memory with it
            given schedule.sync_every || given sync_every || given period || echo "period=$((period < 5 ? period : 5))" ;;
        sign_loco) # its momentum rises over half of the rounds; its second phase gains in runs of some thousand steps: benchmarks/results/study-robust.md
            period=$((period < 5 ? period : 5))
            [ "$steps" -gt 1000 ] || given switch || echo "switch=0"
            given schedule.sync_every || given sync_every || given period || echo "period=$period"
            for word in ${changes[@]+"${changes[@]}"}; do
                case $word in schedule.sync_every=[1-9]* | sync_every=[1-9]* | period=[1-9]*) period=${word#*=} ;; esac
            done
            case $period in *[!0-9]*) return ;; esac # pretrain.py says what is wrong with it
            rise=$((steps / (2 * period)))
            given applier.momentum_warmup || given momentum_warmup || echo "momentum_warmup=$((rise > 0 ? rise : 1))" ;;
    esac
}

run() { # run PRESET FOLDER
    local own=() set=(${changes[@]+"${changes[@]}"}) lr fitted fitted_words
    lr=$(rate "$1")
    [ -z "$lr" ] || own+=(--lr "$lr")
    fitted=$(fit "$1" | paste -sd ' ' -)
    if [ -n "$fitted" ]; then
        read -r -a fitted_words <<<"$fitted"
        set+=("${fitted_words[@]}")
        echo "quickstart: $1 with $fitted, which fits this small run of $steps steps (--set takes other values)" >&2
    fi
    [ ${#set[@]} -eq 0 ] || own+=(--set "${set[@]}")
    "$FSDP_DEMO_PYTHON" -m fsdp_demo.cli rehearse --islands "$islands" --procs "$procs" ${rehearse[@]+"${rehearse[@]}"} -- \
        "$root/recipes/pretrain.py" --exchange "$1" --steps "$steps" --output "$2" ${own[@]+"${own[@]}"} ${pretrain[@]+"${pretrain[@]}"}
}

# An environment of your own: FSDP_DEMO_PYTHON=/path/to/python bash recipes/quickstart.sh
# shellcheck source=recipes/setup.sh
[ -n "${FSDP_DEMO_PYTHON:-}" ] || source "$root/recipes/setup.sh" run

if [ -z "$compare" ]; then
    run "$exchange" "${output:-outputs/quickstart}"
    echo "quickstart: results are in ${output:-outputs/quickstart}" >&2
else
    output=${output:-outputs/compare}
    IFS=, read -r -a names <<<"$compare"
    for name in "${names[@]}"; do run "$name" "$output/$name"; done
    "$FSDP_DEMO_PYTHON" "$root/recipes/compare.py" "$output" "${names[@]}"
    "$FSDP_DEMO_PYTHON" -m fsdp_demo.cli report "${names[@]/#/$output/}" --out "$output/report.html" >/dev/null
    echo "quickstart: the table is in $output/compare.md, the pictures in $output/report.html" >&2
fi
