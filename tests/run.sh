#!/usr/bin/env bash
# Lint, types and tests, in the environment that the recipes use. Arguments go to pytest: bash tests/run.sh -k wire
#   --fast              only tests that start no process: an answer in a minute
#   --benchmarks        the tests below benchmarks/ in place of those below tests/
#   FSDP_DEMO_SLOW=1    the slow tests, too
#   FSDP_DEMO_JOBS=0    one test after another; default: three workers, two with --fast
#   FSDP_DEMO_AGAIN=5   up to so many tests that failed are run once more, alone, and count then; default: 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

words=() fast=0
for word in "$@"; do
    case "$word" in
        --fast) fast=1 ;;
        --benchmarks) words+=(benchmarks/tests) ;;
        *) words+=("$word") ;;
    esac
done

bash recipes/setup.sh

# One thread per process: the tests start several processes at once.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=.venv/bin/python

"$python" -m ruff check . || { echo "tests/run.sh: ruff found the above; tests were not run" >&2; exit 1; }
# Beside the tests, which do not keep two cores busy all the time.
"$python" -m mypy &
types=$!

# A hundred processes import these: compile them once. pytest keeps what it makes of the tests' assertions, too: a third of a collection.
unset PYTHONDONTWRITEBYTECODE
"$python" -m compileall -q fsdp_demo deepspeed_ext recipes benchmarks

# Whole files go to a worker, whose rank server then has their imports; tests without processes go to the worker that is free.
# Three workers keep two cores busy: ranks wait for each other a third of their time.
selection="" dist=loadfile jobs=3
[ "${FSDP_DEMO_SLOW:-0}" = 1 ] || selection="not slow"
[ "$fast" = 0 ] || { selection="not ranks and not launch and not slow"; dist=worksteal jobs=2; }
words=(-n "${FSDP_DEMO_JOBS:-$jobs}" --dist "$dist" -m "$selection" "${words[@]+"${words[@]}"}")
again=${FSDP_DEMO_AGAIN:-0} status=0 first=()
[ "$again" = 0 ] || first=(--cache-clear)
"$python" -m pytest "${words[@]}" "${first[@]+"${first[@]}"}" || status=$?

# Several workers with several ranks each, on a machine that others use: a test may fail for want of time alone. It is named.
if [ "$status" = 1 ] && [ "$again" != 0 ]; then
    names=$("$python" -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")' < .pytest_cache/v/cache/lastfailed)
    if [ "$(printf '%s\n' "$names" | wc -l)" -le "$again" ]; then
        printf 'tests/run.sh: these failed, and run once more, alone:\n%s\n' "$names" >&2
        status=0
        "$python" -m pytest "${words[@]}" -n 0 --last-failed --last-failed-no-failures none || status=$?
        [ "$status" != 0 ] || printf 'tests/run.sh: UNSTEADY, failed once and passed alone:\n%s\n' "$names" >&2
    fi
fi
wait "$types" || { echo "tests/run.sh: mypy found errors, which stand above" >&2; status=1; }
exit $status
