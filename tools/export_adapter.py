"""uv run python tools/export_adapter.py CKPT OUT [--dtype float32|bfloat16|float16] [--overwrite] [--no-verify]

Write the adapter of a checkpoint, or of a run's newest one, as a Hugging Face PEFT directory; the base model is not
needed. The same as `ckptrain export`.
"""

from __future__ import annotations

import sys

from ckptrain.cli.main import cli

if __name__ == "__main__":
    cli.main(["export", *sys.argv[1:]])
