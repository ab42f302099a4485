#!/usr/bin/env bash
# Does it work on your GPUs? A few minutes: islands with FSDP2, islands with the whole model on every GPU, a mesh; then one table to
# paste into a report. Also runs on a CPU. Options: bash recipes/check.sh --help
#
# With a torch of your own (CUDA): FSDP_DEMO_PYTHON=/path/to/python bash recipes/check.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=recipes/setup.sh
[ -n "${FSDP_DEMO_PYTHON:-}" ] || source "$root/recipes/setup.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"  # that Python may not have this package installed
exec "$FSDP_DEMO_PYTHON" "$root/recipes/check.py" "$@"
