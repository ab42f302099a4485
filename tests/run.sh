#!/usr/bin/env bash
# Lint, types and tests, in the environment that the recipes use. Arguments go to pytest: bash tests/run.sh -k wire
#   --fast              only tests that start no process: an answer in a minute
#   FSDP_DEMO_SLOW=1    the slow tests, too
#   FSDP_DEMO_JOBS=0    one test after another; default: two workers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

words=() fast=0
for word in "$@"; do
    if [ "$word" = --fast ]; then fast=1; else words+=("$word"); fi
done

bash recipes/setup.sh

# One thread per process: the tests start several processes at once.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=.venv/bin/python

"$python" -m ruff check . || { echo "tests/run.sh: ruff found the above; tests were not run" >&2; exit 1; }
mypy() { "$python" -m mypy || { echo "tests/run.sh: mypy found the above$1" >&2; exit 1; }; }
if [ "$fast" = 0 ]; then
    mypy "; tests were not run"
else # beside the tests, which do not keep two cores busy to their end
    mypy "" &
    types=$!
fi

# A hundred processes import these: compile them once. pytest keeps what it makes of the tests' assertions, too: a third of a collection.
unset PYTHONDONTWRITEBYTECODE
"$python" -m compileall -q fsdp_demo deepspeed_ext recipes

# Whole files go to a worker, whose rank server then has their imports; tests without processes go to the worker that is free.
selection="" dist=loadfile
[ "${FSDP_DEMO_SLOW:-0}" = 1 ] || selection="not slow"
[ "$fast" = 0 ] || { selection="not ranks and not launch and not slow"; dist=worksteal; }
words=(-n "${FSDP_DEMO_JOBS:-2}" --dist "$dist" -m "$selection" "${words[@]+"${words[@]}"}")
[ "$fast" = 1 ] || exec "$python" -m pytest "${words[@]}"
status=0
"$python" -m pytest "${words[@]}" || status=$?
wait "$types" || status=1
exit $status
