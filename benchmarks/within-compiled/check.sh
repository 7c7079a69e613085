#!/bin/sh
# All tests of compiled plans, those of CUDA graphs with what their attempts take, and predicted beside stored times,
# side by side on one machine with a GPU: sh benchmarks/within-compiled/check.sh OUT [SECONDS]
out=$1
seconds=${2:-140}
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
logs=$(mktemp -d)
timeout "$seconds" python benchmarks/within-compiled/graph_memory.py --out "$out" >"$logs/graphs.log" 2>&1 &
timeout "$seconds" python benchmarks/within-compiled/predicted_times.py --out "$out/predicted.jsonl" --processes 5 \
    >"$logs/predicted.log" 2>&1 &
for name in choices forward offload search wrapped discard node_times fused_times host_times reserved; do
    timeout "$seconds" python -m pytest "tests/compiled/test_$name.py" -m "not gpu and not slow" --show-capture=no \
        -p no:cacheprovider >"$logs/test_$name.log" 2>&1 &
done
timeout "$seconds" python -m pytest tests/compiled/test_wrapped.py -m slow --show-capture=no -p no:cacheprovider \
    >"$logs/two-ranks.log" 2>&1 &
wait
for log in "$logs"/*.log; do
    echo "== $(basename "$log")"
    tail -n 40 "$log" | cut -c1-400
done | tee "$out/check.log"
