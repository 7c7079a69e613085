#!/bin/sh
# Techniques on a GPU: sh benchmarks/whatif-gpu/techniques.sh FOLDER [KNOWN.jsonl [NETWORK,...]]; at most five minutes. All
# networks are compiled at the same time first; what KNOWN.jsonl has already is not run again.
set -u
folder=${1:?where results go}
networks=${3:-convnext_tiny,encoder,unet,resnet50,mobilenet_v2,vgg11,resnet18,alexnet}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/whatif-inductor}" TORCHINDUCTOR_COMPILE_THREADS=3
mkdir -p "$folder"
timeout 285 python benchmarks/whatif-gpu/trials.py techniques "$folder/techniques.jsonl" 265 "$networks" \
    --known "${2:-/dev/null}" 2>"$folder/techniques.log"
wc -l "$folder/techniques.jsonl"
