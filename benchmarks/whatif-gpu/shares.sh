#!/bin/sh
# Shares of a GPU's multiprocessors by MPS: sh benchmarks/whatif-gpu/shares.sh FOLDER [NETWORK,...]; two to three minutes.
set -u
folder=${1:?where results go}
networks=${2:-encoder,unet,vgg19,densenet121,vit_b_16,inception_v3,vgg11,alexnet}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUDA_MPS_PIPE_DIRECTORY=/tmp/whatif-mps CUDA_MPS_LOG_DIRECTORY=/tmp/whatif-mps-log
mkdir -p "$folder" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d
for share in 100 50 25; do
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$share timeout 75 \
        python benchmarks/whatif-gpu/trials.py shares "$folder/shares.jsonl" 55 "$networks" 2>"$folder/shares-$share.log"
done
echo quit | nvidia-cuda-mps-control
wc -l "$folder/shares.jsonl"
