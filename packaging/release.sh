#!/usr/bin/env bash
# Build wheel and source archive, twice, and compare: a release is what its source says, byte for byte.
#
#     packaging/release.sh [FOLDER]       needs: pip install build
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-dist}"

# Times in the archives are those of the commit.
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH PYTHONHASHSEED=0
umask 022

first="$(mktemp -d)" second="$(mktemp -d)"
trap 'rm -rf "$first" "$second"' EXIT
for folder in "$first" "$second"; do
    git archive --prefix=source/ HEAD | tar -x -C "$folder"
    python3 -m build --sdist --wheel --outdir "$folder/dist" "$folder/source" > /dev/null
done
for file in "$first"/dist/*; do
    cmp "$file" "$second/dist/$(basename "$file")"
done
mkdir -p "$out"
cp "$first"/dist/* "$out"
(cd "$out" && sha256sum outcore-*.whl outcore-*.tar.gz | tee SHA256SUMS)
