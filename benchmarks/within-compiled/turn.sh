#!/bin/sh
# One turn on a machine with a GPU: that budgets are walls, then rows, with those of torch.compile from an earlier turn:
#   sh benchmarks/within-compiled/turn.sh OUT [SECONDS]
# With the default it takes at most 375 s.
out=$1
seconds=${2:-295}
here=benchmarks/within-compiled
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out"
for share in 1.0 0.7; do
    timeout 75 python -m pytest tests/compiled/test_limit_gpu.py -m gpu -k "wall and $share" -s -p no:cacheprovider \
        >"$out/limit-$share.log" 2>&1 &
done
wait
tail -n 15 "$out"/limit-*.log
python $here/run.py --out "$out" --precisions bf16 --sizes batch --seconds "$seconds" --processes 14 \
    --networks unet,convnext_tiny,resnet50,swin_t,mobilenet_v3,unet3d,vgg19,bert,gpt,inception_v3,vit_b_16 \
    --resume $here/results/2026-11-17-h200-batch-bf16.jsonl
