"""One optimizer step, and one look at data without learning, through megatron-core's forward-backward schedules."""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.nn.functional import cross_entropy

from ckptrain.data.batches import MicroBatch
from ckptrain.data.context import ContextPart, context_part, padded_length
from ckptrain.data.shapes import of_few_shapes
from ckptrain.megatron.dora import norms_kept
from ckptrain.megatron.fused.choice import adapters_changed
from ckptrain.megatron.fused.loss import linear_cross_entropy
from ckptrain.megatron.own_loss import OwnLoss
from ckptrain.megatron.platform import enter_platform


@attrs.frozen(kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the learnt tokens of the global batch: cross-entropy, in nats, or the loss of a program."""
    learnt_tokens: int
    grad_norm: float
    own_s: tuple[float, ...] = ()
    """Seconds that each of `megatron.pace.paced_processes` had computed in the step before; 0 where it had not."""


@attrs.frozen(kw_only=True)
class _Sums:
    """What processes have come to together."""

    mean: float
    """Of the losses."""
    learnt: int
    beside: float
    own_s: tuple[float, ...]


def _cut(batches: Sequence[MicroBatch], *, into_slices: bool) -> list[ContextPart]:
    """Return what this context parallel process computes of a step's micro-batches; all stages cut them alike.

    It is a multiple of the tensor parallel processes where these cut it `into_slices` (sequence parallelism).
    """
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    slices = parallel_state.get_tensor_model_parallel_world_size() if into_slices else 1
    # What is added is a sequence of its own, which context parallelism cuts like any other.
    multiple = math.lcm(size * slices, 2 * size) if size > 1 else slices
    lengths = [-(-padded_length(batch, size) // multiple) * multiple for batch in batches]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        # Stages exchange activations of one agreed shape, and padding sequences makes micro-batches differ.
        lengths = [max(lengths)] * len(lengths)
    return [context_part(batch, rank, size, length) for batch, length in zip(batches, lengths, strict=True)]


def _on_device(tensor: Tensor) -> Tensor:
    """Copy to the device; from page-locked memory, or the host would wait until the device has done all before."""
    platform = enter_platform()
    return tensor.pin_memory().to(platform.device, non_blocking=True) if platform.is_cuda else tensor


def _packed(part: ContextPart, layout: str) -> PackedSeqParams:
    is_cut = parallel_state.get_context_parallel_world_size() > 1
    padded = _on_device(part.cu_seqlens_padded)
    # To Transformer Engine padding is the end of its sequence, which causal attention hides from what comes before.
    boundaries = padded if not is_cut or layout == "thd" else _on_device(part.cu_seqlens)
    packed = PackedSeqParams(
        qkv_format=layout,
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded if is_cut else None,
        cu_seqlens_kv_padded=padded if is_cut else None,
        max_seqlen_q=part.max_seqlen,
        max_seqlen_kv=part.max_seqlen,
    )
    # For the fused layers: where each token is in its sequence, and whether all sequences are equally long.
    packed.position_ids = _on_device(part.position_ids.flatten())
    lengths = part.cu_seqlens_padded.diff()
    packed.is_even = bool((lengths == lengths[0]).all())
    return packed


@contextlib.contextmanager
def _angles_cut(part: ContextPart, model: Any) -> Iterator[None]:
    """Let our rotary embedding, which knows whole rows, compute the angles of a part; megatron-core cuts its own."""
    if parallel_state.get_context_parallel_world_size() == 1 or get_model_config(model).packed_format == "thd":
        yield
        return

    def cut(_: Any, given: tuple[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...]]:
        of_whole_row = given[0]  # of each token its position and its sequence's length
        origin = part.origin.clamp(min=0).to(of_whole_row[0].device)
        return (tuple(each[origin] for each in of_whole_row),)

    hook = get_attr_wrapped_model(model, "rotary_pos_emb").register_forward_pre_hook(cut)
    try:
        yield
    finally:
        hook.remove()


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
    if given["config"].loss_in_portions:
        weight = given["output_layer"].weight if given["output_weight"] is None else given["output_weight"]
        return linear_cross_entropy(hidden.squeeze(1), weight, labels[0])
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


def _losses_of_program(loss: OwnLoss, **given: Any) -> Tensor:
    """Let a function of the program make the losses of the learnt tokens, of logits that are whole: [learnt tokens]."""
    logits, where = _logits_where_asked(**given), given["context"]
    return loss.of(logits, given["labels"][0, where])


def _run_model(model: Any, part: ContextPart, processor: Any, where: Tensor) -> Tensor:
    with _angles_cut(part, model):
        output: Tensor = model(
            input_ids=_on_device(part.tokens),
            position_ids=_on_device(part.position_ids),
            attention_mask=None,
            labels=_on_device(part.labels),
            packed_seq_params=_packed(part, get_model_config(model).packed_format),
            output_processor=processor,
            output_processor_context=_on_device(where),
        )
    return output


def _forward_for_loss(
    parts: Iterator[ContextPart], model: Any, processor: Any = _losses_of_learnt_tokens
) -> tuple[Tensor, Any]:
    part = next(parts)
    where = part.loss_mask.flatten().nonzero().flatten()
    return _run_model(model, part, processor, where), _sum_losses


def _sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum, number of tokens, report): Megatron divides the gradient by the number in the global batch."""
    total = losses.float().sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)  # no copy that the host waits for
    return total, count, {"loss": torch.stack([total.detach().double(), count.double()])}


def _run_schedule(model: Any, batches: Sequence[MicroBatch], *, forward_only: bool, forward: Any) -> list[Any]:
    config = get_model_config(model)
    if config.few_shapes and not forward_only:
        batches = [of_few_shapes(batch, config.seq_length) for batch in batches]
    parts = _cut(batches, into_slices=config.sequence_parallel)
    adapters_changed(model)
    with norms_kept(model):
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[model],
            num_microbatches=len(parts),
            seq_length=parts[0].whole_length,
            micro_batch_size=1,  # a micro-batch is one flat row of packed sequences
            forward_only=forward_only,
        )
    return results


def _sum_over_world(reports: list[dict[str, Tensor]], beside: Tensor | None = None, own_s: float = 0.0) -> _Sums:
    """Reduce the last stage's sums over data parallel ranks and tell every stage.

    `beside` is a number of this process that is read from the device together with them, since each reading waits for
    it; `own_s` is told to the others.
    """
    device = enter_platform().device
    num_processes = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    sums = torch.zeros(2 + num_processes, dtype=torch.double, device=device)
    if parallel_state.is_pipeline_last_stage():
        sums[:2] = torch.stack([report["loss"] for report in reports]).sum(0)
        sums[2 + parallel_state.get_data_parallel_rank(with_context_parallel=True)] = own_s
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            sums,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    more = sums.new_zeros(1) if beside is None else beside.to(sums.device).reshape(1)
    total, count, *each, read = torch.cat([sums, more]).tolist()
    return _Sums(mean=total / max(count, 1.0), learnt=int(count), beside=read, own_s=tuple(each))


def train_step(
    model: Any, optimizer: Any, batches: Sequence[MicroBatch], loss: OwnLoss | None = None, own_s: float = 0.0
) -> StepResult:
    """Learn from this rank's micro-batches of one global batch, by cross-entropy or by the loss of a program.

    `own_s` is what `Pace` says of the step before, for the others to know. The optimizer's learning rate is set by the
    caller. A loss or a gradient norm that is not finite is returned as it is; the caller decides what it means, the
    parameters are then not to be saved.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    processor = _losses_of_learnt_tokens if loss is None else partial(_losses_of_program, loss)
    forward = partial(_forward_for_loss, processor=processor)
    reports = _run_schedule(model, batches, forward_only=False, forward=forward)
    _, grad_norm, _ = optimizer.step()
    sums = _sum_over_world(reports, torch.as_tensor(grad_norm, dtype=torch.double), own_s)
    return StepResult(loss=sums.mean, learnt_tokens=sums.learnt, grad_norm=sums.beside, own_s=sums.own_s)


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[MicroBatch]) -> tuple[float, int]:
    """Return (mean loss over learnt tokens, their number) of micro-batches dealt to all ranks, without dropout."""
    model.eval()
    try:
        sums = _sum_over_world(_run_schedule(model, batches, forward_only=True, forward=_forward_for_loss))
        return sums.mean, sums.learnt
    finally:
        model.train()


@torch.no_grad()
def logits_at(model: Any, batch: MicroBatch, positions: Tensor) -> Tensor | None:
    """Return the logits of one micro-batch at flat positions, [positions, vocab] float32, on the last stage; else None.

    The vocabulary may be padded at its end for tensor parallelism.
    """

    def forward(parts: Iterator[ContextPart], model: Any) -> tuple[Tensor, Any]:
        part = next(parts)
        here, where = part.find(positions)
        output = _run_model(model, part, _logits_where_asked, where)
        return output, partial(_keep, here.to(output.device))

    model.eval()
    try:
        kept = _run_schedule(model, [batch], forward_only=True, forward=forward)
    finally:
        model.train()
    return kept[0] if kept else None


def _keep(here: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the logits of all asked positions, also those of other context parallel processes; `here` are our own."""
    if parallel_state.get_context_parallel_world_size() > 1:
        own, logits = logits, logits.new_zeros(len(here), logits.shape[1])
        logits[here] = own
        dist.all_reduce(logits, group=parallel_state.get_context_parallel_group())
    return logits.new_zeros(()), torch.tensor(1, dtype=torch.int, device=logits.device), logits
