#!/usr/bin/env bash
# The doors of transformers and Accelerate beside the versions that other trainers pin (docs/yaml.md has the same table), and Ray Train.
# Rows s3: object storage with both ends of fsspec's versions, and a server (moto); .venv cannot hold them, botocore needs python-dateutil<3.
# Each row has an environment below .venv/oldest, made at its first use: what the row names, and all else (torch, pytest) by a path to .venv.
#   bash tests/oldest.sh                  all rows: some twenty minutes each on two cores
#   bash tests/oldest.sh ray -m slow      Ray Train, with its clusters
#   bash tests/oldest.sh axolotl -k saves those of one row whose names hold "saves"; further words go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

moto="moto[s3]>=5.2 flask flask-cors" s3="tests/checkpoint/test_remote.py tests/checkpoint/test_s3.py tests/recipes/test_pretrain_remote.py"
hf="tests/integrations tests/launch/test_unedited.py"
rows() { cat <<ROWS
llamafactory | transformers==5.6.0 accelerate==1.11.0 datasets==4.0.0 | $hf
axolotl | transformers==5.16.1 accelerate==1.13.0 datasets==4.8.4 | $hf
unsloth | transformers==5.17.0 accelerate==1.15.0 datasets==4.8.5 | $hf
ms-swift | transformers==5.19.0 accelerate==1.15.0 datasets==4.8.4 | $hf
ray | ray[train]==2.60.0 | tests/integrations/test_ray.py
s3-old | fsspec==2024.6.0 s3fs==2024.6.0 aiobotocore==2.26.0 boto3==1.41.5 $moto | $s3
s3 | fsspec==2026.9.0 s3fs==2026.9.0 aiobotocore==3.10.0 boto3==1.43.117 $moto | $s3
ROWS
}
trim() { sed -e 's/^ *//' -e 's/ *$//'; }

chosen="" words=()
for word in "$@"; do
    if [ "${#words[@]}" = 0 ] && rows | cut -d '|' -f 1 | trim | grep -qx -- "$word"; then chosen+=" $word"; else words+=("$word"); fi
done

bash recipes/setup.sh
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
first=$PWD/.venv/lib/python*/site-packages status=0
while IFS='|' read -r name wanted paths; do
    name=$(trim <<<"$name") wanted=$(trim <<<"$wanted") here=.venv/oldest/$name
    [ -z "$chosen" ] || grep -qw -- "$name" <<<"$chosen" || continue
    if [ "$(cat "$here/wanted" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$here"
        .venv/bin/python -m venv --without-pip "$here"
        # its own packages come first on the path
        printf '%s\n' $first "$PWD" >"$(echo "$here"/lib/python*/site-packages)/zz_first.pth"
        # shellcheck disable=SC2086  # several requirements
        DS_BUILD_OPS=0 "$here/bin/python" -m pip install -qq --disable-pip-version-check $wanted
        echo "$wanted" >"$here/wanted"
    fi
    echo "tests/oldest.sh: $name: $wanted"
    # shellcheck disable=SC2086  # several paths
    "$here/bin/python" -m pytest -n "${FSDP_DEMO_JOBS:-2}" --dist loadfile -m "not slow" $paths ${words[@]+"${words[@]}"} </dev/null || status=1
done < <(rows)
exit $status
