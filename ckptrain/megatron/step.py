"""One optimizer step, and one look at data without learning, through megatron-core's forward-backward schedules."""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn.functional import cross_entropy

from ckptrain.data.batches import MicroBatch
from ckptrain.megatron.dora import norms_kept
from ckptrain.megatron.platform import enter_platform


@attrs.frozen(kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Mean cross-entropy over the learnt tokens of the global batch, in nats."""
    learnt_tokens: int
    grad_norm: float


def _packed(batch: MicroBatch, layout: str, device: torch.device) -> PackedSeqParams:
    boundaries = batch.cu_seqlens.to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format=layout,
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def _losses_of_learnt_tokens(**given: Any) -> Tensor:
    """Compute the loss where something is learnt, and only there: [learnt tokens].

    Prompt tokens have no loss, so their logits (the largest product of a small model, and its largest activation) are
    never computed. Under sequence parallelism a rank holds a slice of the positions and the output layer gathers them,
    so there all positions are computed and the learnt ones taken after.
    """
    hidden, labels, where = given["hidden_states"], given["labels"], given["context"]
    sharded = given["config"].sequence_parallel
    if not sharded:
        hidden, labels = hidden[where], labels[:, where]
    logits, _ = given["output_layer"](hidden, weight=given["output_weight"])
    if _loss_is_local(given["config"]):
        return cross_entropy(logits.squeeze(1).float(), labels[0], reduction="none")
    losses: Tensor = given["compute_language_model_loss"](labels, logits).flatten()
    return losses[where] if sharded else losses


def _loss_is_local(config: Any) -> bool:
    """Tell whether torch's own loss will do: the vocabulary is whole, and Transformer Engine has no fused one."""
    return config.tensor_model_parallel_size == 1 and not config.cross_entropy_loss_fusion


def _logits_where_asked(**given: Any) -> Tensor:
    """Compute the logits at the asked positions, whole on every tensor parallel rank: [positions, vocab], float32."""
    hidden, where = given["hidden_states"], given["context"]
    sharded = given["config"].sequence_parallel
    logits, _ = given["output_layer"](
        hidden if sharded else hidden[where], weight=given["output_weight"], runtime_gather_output=True
    )
    return (logits[where] if sharded else logits).squeeze(1).float()


def _run_model(model: Any, batch: MicroBatch, processor: Any, where: Tensor) -> Tensor:
    device = enter_platform().device
    output: Tensor = model(
        input_ids=batch.tokens.to(device, non_blocking=True),
        position_ids=batch.position_ids.to(device, non_blocking=True),
        attention_mask=None,
        labels=batch.labels.to(device, non_blocking=True),
        packed_seq_params=_packed(batch, get_model_config(model).packed_format, device),
        output_processor=processor,
        output_processor_context=where.to(device),
    )
    return output


def _forward_for_loss(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    where = batch.loss_mask.flatten().nonzero().flatten()
    return _run_model(model, batch, _losses_of_learnt_tokens, where), _sum_losses


def _sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum, number of tokens, report): Megatron divides the gradient by the number in the global batch."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"loss": torch.stack([total.detach().double(), count.double()])}


def _run_schedule(model: Any, batches: Sequence[MicroBatch], *, forward_only: bool, forward: Any) -> list[Any]:
    with norms_kept(model):
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=1,  # a micro-batch is one flat row of packed sequences
            forward_only=forward_only,
        )
    return results


def _mean_over_world(reports: list[dict[str, Tensor]]) -> tuple[float, int]:
    """Reduce the last stage's sums over data parallel ranks and tell every stage: (mean loss, learnt tokens)."""
    device = enter_platform().device
    sums = torch.zeros(2, dtype=torch.double, device=device)
    if parallel_state.is_pipeline_last_stage():
        sums += torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            sums,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    total, count = sums.tolist()
    return total / max(count, 1.0), int(count)


def train_step(model: Any, optimizer: Any, batches: Sequence[MicroBatch]) -> StepResult:
    """Learn from this rank's micro-batches of one global batch.

    The optimizer's learning rate is set by the caller. A loss or a gradient norm that is not finite is returned as it
    is; the caller decides what it means, the parameters are then not to be saved.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = _run_schedule(model, batches, forward_only=False, forward=_forward_for_loss)
    _, grad_norm, _ = optimizer.step()
    loss, learnt = _mean_over_world(reports)
    return StepResult(loss=loss, learnt_tokens=learnt, grad_norm=float(grad_norm))


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[MicroBatch]) -> tuple[float, int]:
    """Return (mean loss over learnt tokens, their number) of micro-batches dealt to all ranks, without dropout."""
    model.eval()
    try:
        return _mean_over_world(_run_schedule(model, batches, forward_only=True, forward=_forward_for_loss))
    finally:
        model.train()


@torch.no_grad()
def logits_at(model: Any, batch: MicroBatch, positions: Tensor) -> Tensor | None:
    """Return the logits of one micro-batch at flat positions, [positions, vocab] float32, on the last stage; else None.

    The vocabulary may be padded at its end for tensor parallelism.
    """

    def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
        output = _run_model(model, next(batches), _logits_where_asked, positions)
        return output, partial(_keep, output)

    model.eval()
    try:
        kept = _run_schedule(model, [batch], forward_only=True, forward=forward)
    finally:
        model.train()
    return kept[0] if kept else None


def _keep(output: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return output.new_zeros(()), torch.tensor(1, dtype=torch.int, device=output.device), output
