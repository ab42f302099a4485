#!/usr/bin/env bash
# Makes the environment .venv in the repository root, or reuses it (a second run takes a fraction of a second).
# Run it (bash recipes/setup.sh) or source it; sourcing also sets FSDP_DEMO_PYTHON to the environment's python.
# With the word "run" (the quickstart) it leaves out DeepSpeed and what tests and docs need, which come when they are asked for.
# uv installs, with pip's index, links, constraints and certificate; pip does where uv cannot be had, or fails.
#
#   FSDP_DEMO_PIP=1   pip installs
#   FSDP_DEMO_TORCH   what to install as torch instead of the pinned version, as pip takes it; nothing is checked then. Example:
#                     FSDP_DEMO_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu128"
#   FSDP_DEMO_BASE    the python that makes the environment (default: python3.11, else another of 3.11 or newer)

if [ "${BASH_SOURCE[0]}" != "$0" ]; then
    # Sourced: the work is done by a process of its own, so that no option or variable of it reaches this shell.
    bash "${BASH_SOURCE[0]}" "${1:-}" || return 1
    FSDP_DEMO_PYTHON="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python"
    export FSDP_DEMO_PYTHON
    return 0
fi

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=.venv/bin/python
constraints=recipes/constraints-cpu.txt
part=all extras=hf,deepspeed,lightning,report,docs,dev
[ "${1:-}" != run ] || part=run extras=hf,report
stamp=.venv/.fsdp-demo-stamp
pip=("$python" -m pip install -qq --disable-pip-version-check)

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# pip_settings: what pip is configured with, as words for uv, a line each.
pip_settings() {
    "$python" -m pip config list | "$python" -c '
import re, shlex, sys
flags = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links", "constraint": "--constraints",
         "trusted-host": "--allow-insecure-host"}
for line in sys.stdin:
    name, _, value = line.strip().partition("=")
    for word in " ".join(shlex.split(value)).split():
        if flag := flags.get(name.rpartition(".")[2]):
            print(flag, word, sep="\n")
'
}

# install WORDS: as pip install WORDS
install() {
    if [ -n "$uv" ]; then
        if "$uv" pip install --quiet --python "$python" ${settings[@]+"${settings[@]}"} "$@" 2>"$scratch/uv"; then return; fi
        say "uv could not install $*; pip does: $(tail -n 1 "$scratch/uv")"
        uv=""
    fi
    "${pip[@]}" "$@"
}

# uv=PATH where it can be had, else empty
get_uv() {
    uv="" settings=()
    local word
    [ "${FSDP_DEMO_PIP:-}" != 1 ] && "${pip[@]}" uv 2>/dev/null && [ -x .venv/bin/uv ] || return 0
    uv=.venv/bin/uv
    while IFS= read -r word; do settings+=("$word"); done < <(pip_settings)
    export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}" UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # as pip: the best of all indexes
    SSL_CERT_FILE="${SSL_CERT_FILE:-$("$python" -m pip config list | sed -n "s/^[^=]*\.cert='\(.*\)'$/\1/p" | tail -n 1)}"
    if [ -n "$SSL_CERT_FILE" ]; then export SSL_CERT_FILE; fi
}

# What the environment was made from. The path counts: scripts in an environment hold it.
digest() {
    { echo "$root|${FSDP_DEMO_TORCH:-}"; cat pyproject.toml "$constraints" fsdp_demo/version.py fsdp_demo/compression/_kernels.c; } |
        { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; } | cut -d ' ' -f 1
}

# The stamp has what was installed, and the digest. Whoever has all has what a run needs.
up_to_date() { [ -x "$python" ] && [ -f "$stamp" ] && case "$(cat "$stamp")" in "$part $wanted" | "all $wanted") ;; *) false ;; esac; }

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_base() {
    local name names="${FSDP_DEMO_BASE:-python3.11 python3 python3.12 python3.13}"
    for name in $names; do
        if recent_enough "$name"; then echo "$name"; return; fi
    done
    die "needs Python 3.11 or newer; tried: $names. Install one, or set FSDP_DEMO_BASE=/path/to/python"
}

make_environment() {
    local base
    if recent_enough "$python" && "$python" -m pip --version >/dev/null 2>&1 && grep -q -F "$root/.venv" .venv/bin/activate; then
        return
    fi
    base=$(find_base)
    # --clear would empty what the link leads to
    [ ! -L .venv ] || die ".venv is a link to $(readlink .venv), made for another folder: remove the link and run this again"
    say "making .venv with $("$base" --version)"
    "$base" -m venv --clear .venv || die "'$base -m venv' failed (on Debian and Ubuntu: apt install python3-venv)"
}

# is_cpu_torch [VERSION]: does .venv hold a torch without CUDA (of this version)?
is_cpu_torch() {
    "$python" - "$@" 2>/dev/null <<'PYTHON'
import sys

import torch

right_version = sys.argv[1:] in ([], [torch.__version__.split("+")[0]])
sys.exit(not (right_version and torch.version.cuda is None))
PYTHON
}

# "+cpu" can only be a CPU wheel. The sources pip is configured with (PIP_FIND_LINKS, a mirror) come first, then PyTorch's own index.
# Dependencies come later, under all constraints.
install_cpu_torch() {
    local version
    version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$constraints")
    if is_cpu_torch "$version"; then return; fi
    say "installing torch $version, CPU build"
    if [ -n "$uv" ] && "$uv" pip install --quiet --python "$python" ${settings[@]+"${settings[@]}"} --no-deps "torch==$version+cpu" 2>/dev/null; then return; fi
    if "${pip[@]}" --no-deps "torch==$version+cpu" 2>"$scratch/log"; then return; fi
    grep -q -i "no matching distribution" "$scratch/log" || { cat "$scratch/log" >&2; die "pip could not install torch==$version+cpu (above)"; }
    "${pip[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" ||
        die "no CPU build of torch $version: neither pip's own sources nor PyTorch's CPU index gave one (above)." \
            "Put the wheel into a folder and set PIP_FIND_LINKS=folder, or set FSDP_DEMO_TORCH to another requirement"
}

install_all() {
    local cpu=no
    cp "$constraints" "$scratch/constraints.txt"
    if [ -n "${FSDP_DEMO_TORCH:-}" ]; then
        say "installing $FSDP_DEMO_TORCH"
        # shellcheck disable=SC2086  # a requirement and options, meant to be split
        "${pip[@]}" $FSDP_DEMO_TORCH
        grep -v "^torch==" "$constraints" >"$scratch/constraints.txt"
    elif [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        # Only Linux has wheels with CUDA in them on the default index.
        cpu=yes
        install_cpu_torch
    fi
    say "installing the package and what it needs (a minute or more the first time)"
    install -c "$scratch/constraints.txt" -e ".[$extras]"
    [ "$cpu" = no ] || is_cpu_torch ||
        die "no NVIDIA GPU here (no nvidia-smi), yet the torch in .venv has CUDA in it or does not import: remove .venv and run this again"
}

wanted=$(digest)
if up_to_date; then exit 0; fi
# One at a time: another start waits and then finds the work done. The lock ends with this process, however it ends.
if command -v flock >/dev/null; then
    exec 9<recipes/setup.sh
    flock -n 9 || { say "another start is at it, waiting"; flock 9; }
    if up_to_date; then exit 0; fi
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -f "$stamp" # an interrupted start leaves no stamp and is done again
make_environment
get_uv
install_all
# uv installs no bytecode: one process compiles what a run imports, or each rank would, and with PYTHONDONTWRITEBYTECODE at every start
(cd recipes && env -u PYTHONDONTWRITEBYTECODE "../$python" -c "import pretrain, transformers.models.llama.modeling_llama") ||
    say "pretrain.py could not be imported (above): a run will end with the same error"
echo "$part $wanted" >"$stamp.part"
mv "$stamp.part" "$stamp"
say "ready: $root/.venv"
