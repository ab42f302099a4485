#!/usr/bin/env bash
# Lint, types and tests, in the environment that the recipes use. Arguments go to pytest: bash tests/run.sh -k wire
# FSDP_DEMO_SLOW=1 runs the slow tests too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash recipes/setup.sh

# One thread per process: the tests start several processes at once.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=.venv/bin/python

"$python" -m ruff check . || { echo "tests/run.sh: ruff found the above; tests were not run" >&2; exit 1; }
"$python" -m mypy || { echo "tests/run.sh: mypy found the above; tests were not run" >&2; exit 1; }

selection=(-m "not slow")
[ "${FSDP_DEMO_SLOW:-0}" = 1 ] && selection=()
# Two workers, whole files each: most tests wait for processes of their own. FSDP_DEMO_JOBS=0 runs one after another.
exec "$python" -m pytest -n "${FSDP_DEMO_JOBS:-2}" --dist loadfile "${selection[@]+"${selection[@]}"}" "$@"
