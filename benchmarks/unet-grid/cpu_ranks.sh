#!/bin/sh
# Ranks on the cores of a machine that does nothing else: predicted and measured steps, which plan is the fastest, and
# borders that travel under computing. About seven minutes; rows and traces are written to the folder given.
#
#   sh benchmarks/unet-grid/cpu_ranks.sh OUT
out=$1
here=$(dirname "$0")
python=${PYTHON:-python}
mkdir -p "$out"
timeout 170 "$python" "$here/times.py" --out "$out" --device cpu --cores 4 --measure 4 --limit 140
timeout 60 "$python" "$here/overlap.py" --out "$out" --links 1000:5 1000:10 --turns 1
timeout 230 "$python" "$here/choice.py" --out "$out" --cores 4 --measure 2
