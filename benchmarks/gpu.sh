#!/usr/bin/env bash
# Run the GPU tests and measurements and write gpu.md and gpu.json: benchmarks/gpu.py --help. 31 minutes at most.
# Needs PyTorch and transformers; WHEELS names a directory with the other wheels, which `--dry-run` lists.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
	# a directory beside PyTorch's own, which stay as they are
	"$python" -m pip install --quiet --no-index --no-deps --upgrade --target runs/gpu/site "$WHEELS"/*.whl
	export PYTHONPATH=$PWD/runs/gpu/site${PYTHONPATH:+:$PYTHONPATH}
fi
"$python" -c 'import torch, transformers' 2>/dev/null || {
	echo "error: $python needs torch and transformers: activate the virtual environment, or set PYTHON to its python" >&2
	exit 2
}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "$python" benchmarks/gpu.py "$@"
