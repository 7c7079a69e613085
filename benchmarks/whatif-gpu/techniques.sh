#!/bin/sh
# Techniques on a GPU: sh benchmarks/whatif-gpu/techniques.sh FOLDER; about five minutes. Compilers run at the same time in
# processes of their own first, so that the trials find what they wrote in the cache.
set -u
folder=${1:?where results go}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TORCHINDUCTOR_FX_GRAPH_CACHE=1
export TORCHINDUCTOR_CACHE_DIR=/tmp/whatif-inductor
mkdir -p "$folder"
for network in alexnet resnet18 resnet50 vgg11 mobilenet_v2 convnext_tiny encoder unet; do
    TORCHINDUCTOR_COMPILE_THREADS=2 timeout 110 \
        python benchmarks/whatif-gpu/trials.py warm - 0 $network >/dev/null 2>&1 &
done
wait
timeout 280 python benchmarks/whatif-gpu/trials.py techniques "$folder/techniques.jsonl" 250 2>"$folder/techniques.log"
wc -l "$folder/techniques.jsonl"
