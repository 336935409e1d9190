"""What is saved is the state of its moment, though training changes it before the copy is made.

python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def test_a_copy_holds_the_state_of_its_moment() -> None:
    """The GPU is a second behind; the copy is asked for, then the next steps, and the host has waited for neither."""
    import time

    import torch

    from ckptrain.megatron.adapters import Piece
    from ckptrain.megatron.state import HostCopy, StateView, _Stack

    weights = [torch.zeros(1000, 1000, device="cuda") for _ in range(4)]
    pieces = tuple(Piece(shape=(1000, 1000), offset=(0, 0), data=weight, is_main=True) for weight in weights)
    stack = _Stack(offset=(0, 0, 0), pieces=pieces, has_layer_axis=True)
    copy = HostCopy(StateView(stacks={"weight": [stack]}, shapes={"weight": (4, 1000, 1000)}))
    assert copy.state["weight"].shards[0].data.is_pinned()
    large = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()

    started = time.perf_counter()
    for step in range(1, 4):
        for _ in range(20):
            large = (large @ large).clamp(-1, 1)
        for weight in weights:
            weight.fill_(step)
        if step == 2:
            wait = copy.take()
    asked = time.perf_counter() - started
    torch.cuda.synchronize()
    done = time.perf_counter() - started
    wait()
    assert torch.equal(copy.state["weight"].shards[0].data, torch.full((4, 1000, 1000), 2.0))
    assert asked < done / 2, "the host did not wait for the copy"
