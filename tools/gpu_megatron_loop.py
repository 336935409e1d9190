"""A bare loop over megatron-core with Transformer Engine's layers and Megatron-Bridge's LoRA, for bench_gpu.py.

ckptrain imports Bridge's LoRA (`import megatron.bridge` needs packages that a GPU machine may lack) and takes no other
part. Without Transformer Engine the layers are megatron-core's local ones, so that it can be tried on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import torch
import torch.distributed as dist
from gpu_shapes import ALPHA, CLIP_GRAD, LR, RANK, Shape
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor


def transformer_config(shape: Shape, *, on_gpu: bool) -> TransformerConfig:
    """Return megatron-core's configuration of a Llama, with every fusion that a GPU has."""
    fusions = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        cross_entropy_loss_fusion=on_gpu,
        cross_entropy_fusion_impl="native",  # megatron-core warns that Transformer Engine's is not stable
        persist_layer_norm=on_gpu,
        gradient_accumulation_fusion=False,  # a kernel of Apex, for weight gradients that the frozen base has none of
        **dict.fromkeys(fusions, on_gpu),
    )


def build(shape: Shape) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """Return a function that makes a step on token ids [rows, length], and the settings."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(shape, on_gpu=on_gpu)
    spec = (
        specs.get_gpt_layer_with_transformer_engine_spec()
        if on_gpu
        else specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    model: Any = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.sequence_length,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
    )
    model = LoRA(dim=RANK, alpha=ALPHA)(model.cuda() if on_gpu else model, training=True)
    model = model.cuda() if on_gpu else model
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        Float16Module(config, model) if on_gpu else model,
    )
    config.no_sync_func, config.finalize_model_grads_func = wrapped.no_sync, finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=0.0,
            clip_grad=CLIP_GRAD,
            bf16=on_gpu,
            params_dtype=config.params_dtype,
        ),
        [wrapped],
    )
    config.grad_scale_func = optimizer.scale_loss

    def forward(batches: Iterator[Tensor], of_model: Any) -> tuple[Tensor, Any]:
        ids = next(batches)
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
        losses = of_model(ids, positions, None, labels=ids.roll(-1, dims=1))
        return losses, lambda of_tokens: ((mean := of_tokens.float().mean()), {"loss": mean.detach().clone()})

    def step(ids: Tensor) -> Tensor:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        (report,) = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([ids]),
            model=[wrapped],
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=False,
        )
        optimizer.step()
        loss: Tensor = report["loss"]
        return loss

    return step, {"layers": "Transformer Engine" if on_gpu else "local", "loss": config.cross_entropy_fusion_impl}
