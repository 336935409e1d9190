"""What planning a start costs."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "megatron", "numpy", "datasets", "huggingface_hub", "gguf", "peft")


def test_planning_and_reading_manifests_import_nothing_heavy() -> None:
    """`ckptrain plan` and `ckptrain status` answer in well under a second, also where torch is broken."""
    code = (
        "import sys, ckptrain.lifecycle.start_plan, ckptrain.lifecycle.phases, ckptrain.lifecycle.journal,"
        " ckptrain.checkpoint.resolve;"
        f" print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
