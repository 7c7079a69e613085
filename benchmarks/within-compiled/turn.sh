#!/bin/sh
# One turn on a machine with a GPU: that budgets are walls, then rows, with those of torch.compile from an earlier turn:
#   sh benchmarks/within-compiled/turn.sh OUT [SECONDS]
# With the default it takes at most 375 s.
out=$1
seconds=${2:-270}
here=benchmarks/within-compiled
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out"
for share in 1.0 0.7; do
    timeout 100 python -m pytest tests/compiled/test_limit_gpu.py -m gpu -k "wall and $share" -s -p no:cacheprovider \
        >"$out/limit-$share.log" 2>&1 &
done
wait
tail -n 15 "$out"/limit-*.log
python $here/run.py --out "$out" --precisions bf16 --sizes batch --seconds "$seconds" --processes 14 \
    --networks vgg19,convnext_tiny,gpt,mobilenet_v3,unet,resnet50,bert,inception_v3,swin_t,unet3d,vit_b_16 \
    --resume $here/results/2026-11-17-h200-batch-bf16.jsonl
