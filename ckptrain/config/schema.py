"""What a run can be told: one frozen class a section, each field with its default, its meaning and its bounds.

This file is the only place where defaults live. `doc` is shown by `ckptrain explain`; `at_least`, `above`, `at_most`
and `below` are checked by `load` together with the types, so that a config's problems are all told at once. The LoRA
keys are those of NeMo-RL and Megatron-Bridge, with their meaning unchanged.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from ckptrain.config.fields import option, section

LoraKind = Literal["auto", "lora", "canonical", "dora"]
RecordFormat = Literal[
    "auto",
    "messages",
    "prompt_completion",
    "input_output",
    "alpaca",
    "sharegpt",
    "squad",
    "tulu3_sft_mixture",
    "openmathinstruct2",
    "gsm8k",
]


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The pretrained base model, and how Megatron holds it."""

    pretrained: str = option(
        "A Hub id, a local Hugging Face directory, a .gguf file, or `package:NAME/FILE` for a file shipped in an"
        " installed Python package. Relative paths are relative to the config file."
    )
    revision: str | None = option("Branch, tag or commit of a Hub id; a local path has none.", default=None)
    adapter: str | None = option(
        "Start from this adapter instead of a new one: a run or a checkpoint of ckptrain, a directory or its URL in an"
        " object store; a Hugging Face PEFT directory; or a LoRA checkpoint of Megatron-Bridge or NeMo-RL.",
        default=None,
    )
    dtype: Literal["bfloat16", "float32"] = option(
        "Type of the base weights and of the arithmetic; with bfloat16 the optimizer keeps float32 masters.",
        default="bfloat16",
    )
    fp8: Literal["rowwise"] | None = option(
        "Hold the frozen linear layers in 8 bits (e4m3, one scale for each row) and compute them so: half the memory"
        " and half the time for those layers; adapters, attention and the output layer stay as they are. A GPU must be"
        " of the Hopper generation or later.",
        default=None,
    )
    backend: Literal["auto", "transformer_engine", "local"] = option(
        "Layers of Transformer Engine, or megatron-core's own; auto takes Transformer Engine where it is installed and"
        " there is a GPU.",
        default="auto",
    )
    verify: Literal["auto", "always", "never"] = option(
        "Compare the logits of a short probe with Hugging Face after loading; auto does so where the base has at most"
        " 1.5 billion parameters, and says so where it does not.",
        default="auto",
    )


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters: y = W x + (alpha / dim) * B A x, with W frozen (Hu et al. 2021, arXiv:2106.09685).

    DoRA (Liu et al. 2024, arXiv:2402.09353) scales each row of W + (alpha / dim) * B A to a length that is learnt.
    """

    enabled: bool = option("ckptrain trains adapters only; false is refused.", default=True)
    kind: LoraKind = option(
        "lora: one adapter for each of Megatron's layers, so that q, k and v share an A, and gate and up do; canonical:"
        " each has its own, as in Hugging Face PEFT; dora: canonical with a magnitude for every output feature, as"
        " PEFT's use_dora (magnitudes are float32 in any case; not for experts, and without dropout); auto: that of"
        " what the run starts from or goes on with, or lora.",
        default="auto",
    )
    target_modules: tuple[str, ...] = option(
        "Modules to adapt: Megatron names (linear_qkv, linear_proj, linear_fc1, linear_fc2), wildcards on full names"
        " (*.layers.0.*.linear_qkv), Hugging Face names (q_proj) or all-linear. Empty: every linear layer.",
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    )
    exclude_modules: tuple[str, ...] = option(
        "Modules to leave out, in the same notation; needs an empty target_modules.", default=()
    )
    dim: int = option("Rank of the adapters.", default=8, at_least=1)
    alpha: int = option("Scale: an adapter's output is multiplied by alpha / dim.", default=32, at_least=1)
    dropout: float = option("Dropout on the adapter's path.", default=0.0, at_least=0.0, below=1.0)
    dropout_position: Literal["pre", "post"] = option(
        "Dropout before A (as Hugging Face PEFT has it) or after B.", default="post"
    )
    lora_A_init_method: Literal["xavier", "normal", "kaiming", "zero"] = option(
        "Initial A: Xavier normal over the whole (not the sharded) matrix, normal with deviation 0.2, Kaiming uniform"
        " with a = sqrt(5), or zeros.",
        default="xavier",
    )
    lora_B_init_method: Literal["xavier", "normal", "kaiming", "zero"] = option(
        "Initial B, like lora_A_init_method; zero starts from the base model exactly.", default="zero"
    )
    a2a_experimental: bool = option(
        "All-to-all instead of all-gather for adapters under sequence parallelism (Megatron-Bridge, experimental).",
        default=False,
    )
    fused: Literal["auto", "always", "never"] = option(
        "Compute a layer and its adapters as one, which needs less time and memory; auto does so on a GPU where the"
        " model and the adapters are of a kind that this was written for, and says so where it does not.",
        default="auto",
    )
    lora_dtype: Literal["bfloat16", "float32"] | None = option(
        "Type of the adapter weights; null is the model's.", default=None
    )

    @property
    def splits_fused(self) -> bool:
        """Whether the parts of a fused layer have adapters of their own."""
        return self.kind in ("canonical", "dora")

    @property
    def has_magnitudes(self) -> bool:
        """Whether there is a magnitude for every output feature beside A and B."""
        return self.kind == "dora"


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """How the model is laid over processes; what is left of the world is data parallel."""

    tensor: int = option("Tensor parallel size; must divide the attention heads.", default=1, at_least=1)
    pipeline: int = option("Pipeline stages; must divide the layers.", default=1, at_least=1)
    context: int = option(
        "Context parallel size: processes that share the tokens of every sample (model.backend=local).",
        default=1,
        at_least=1,
    )
    expert: int = option("Expert parallel size (mixture-of-experts models).", default=1, at_least=1)
    sequence: bool = option(
        "Sequence parallelism: shard the activations between tensor parallel regions.", default=False
    )


@attrs.frozen(kw_only=True)
class SourceConfig:
    """Rows from one place; a path or a Hub id alone may be written as plain text."""

    path: str | None = option(
        "A file (JSONL, JSON, Parquet, CSV, Arrow), a glob, a directory, or the id of a dataset on the Hub; null is the"
        " Hub home of a format that has one (squad, tulu3_sft_mixture, openmathinstruct2, gsm8k).",
        default=None,
    )
    name: str | None = option("Configuration of a Hub dataset, as `datasets` calls it.", default=None)
    split: str | None = option(
        "Split, or a slice of it as in `datasets` (train[:1000], train+test); null is `train` for data.train and"
        " `validation` for data.validation.",
        default=None,
    )
    revision: str | None = option("Branch, tag or commit of a Hub dataset.", default=None)
    format: RecordFormat | None = option("Form of the rows; null is that of data.format.", default=None)
    columns: dict[str, Any] = option(
        "Which column has what the format asks for, where the names differ: {prompt: question}.", factory=dict
    )
    weight: float | None = option(
        "Share of the rows that come from here, against the weights of the other sources; null takes every row once.",
        default=None,
        above=0.0,
    )


@attrs.frozen(kw_only=True)
class DataConfig:
    """Which samples, and how they become tokens."""

    train: tuple[SourceConfig, ...] = option("Training samples; paths are relative to the config file.")
    validation: tuple[SourceConfig, ...] | None = option(
        "Validation samples; null trains without, or with those of split_validation_size.", default=None
    )
    split_validation_size: float | None = option(
        "Keep so much of the training samples for validation, drawn by train.seed: a share below 1, or a number.",
        default=None,
        above=0.0,
    )
    format: RecordFormat = option(
        "Form of the rows: messages, prompt_completion, input_output, alpaca, sharegpt, or that of a known dataset;"
        " auto decides by the keys of a source's first row. docs/data.md describes each.",
        default="auto",
    )
    chat_template: str | None = option(
        "File of a chat template (Jinja) to use in the place of the tokenizer's own.", default=None
    )
    sequence_length: int = option("Tokens in one row of a batch.", default=1024, at_least=8)
    packing: bool = option(
        "Several samples in a row, which never attend to each other; false gives each sample a row of its own.",
        default=True,
    )
    loss_on: Literal["assistant", "last_assistant", "completion", "all"] = option(
        "Tokens that are learnt: all assistant turns, the last one only, everything after the prompt, or all.",
        default="assistant",
    )
    on_too_long: Literal["refuse", "drop", "truncate"] = option(
        "A sample longer than sequence_length: an error that names it, left out (and counted), or cut at its end.",
        default="refuse",
    )
    workers: int | None = option(
        "Processes that tokenise data which is not in the cache yet, and steps whose batches are laid out ahead in a"
        " thread; 0 does all of it in the training process, null decides by the size of the data and of the machine.",
        default=None,
        at_least=0,
    )

    @property
    def has_validation(self) -> bool:
        """Whether there are validation samples."""
        return self.validation is not None or self.split_validation_size is not None


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = option("Peak learning rate.", default=1.0e-4, above=0.0)
    min_lr: float = option("Learning rate at the end of the cosine.", default=0.0, at_least=0.0)
    weight_decay: float = option("Decoupled weight decay.", default=0.0, at_least=0.0)
    betas: tuple[float, float] = option("Decay rates of the two moments.", default=(0.9, 0.95), at_least=0.0, below=1.0)
    eps: float = option("Term added to the denominator.", default=1.0e-8, above=0.0)
    clip_grad: float = option("Largest global gradient norm; 0 does not clip.", default=1.0, at_least=0.0)
    schedule: Literal["cosine", "constant"] = option("Learning rate after the warm-up.", default="cosine")
    warmup_steps: int = option("Steps of linear warm-up from 0.", default=0, at_least=0)


@attrs.frozen(kw_only=True)
class TrainConfig:
    """How long, in which portions, from where."""

    steps: int = option("Optimizer steps in all, those before a resume included.", default=100, at_least=1)
    micro_batch_size: int = option("Rows of sequence_length in one forward pass of one process.", default=1, at_least=1)
    global_batch_size: int = option(
        "Rows in one optimizer step, over all processes; a multiple of micro_batch_size times the data parallel size.",
        default=8,
        at_least=1,
    )
    seed: int = option("Seed of adapters, order of samples and dropout.", default=1234, at_least=0)
    start: Literal["auto", "fresh", "resume"] = option(
        "auto resumes where this run has a checkpoint and starts otherwise; fresh and resume insist.", default="auto"
    )
    deterministic: bool = option("Refuse operations that are not reproducible bit for bit.", default=False)
    recompute: Literal["none", "selective", "full"] = option(
        "What the backward pass computes again instead of keeping it: nothing, the MLPs (most of the memory), or whole"
        " layers (least memory, a third more time).",
        default="none",
    )
    max_minutes: float | None = option("Save and stop (exit status 75) after this long.", default=None, above=0.0)
    timeout_minutes: float = option(
        "How long a step may take, or a process say nothing, before the run ends on all of several processes.",
        default=10.0,
        above=0.0,
    )
    eval_every_steps: int | None = option(
        "Validate every so many steps; null validates at the start and at the end only.", default=None, at_least=1
    )
    cuda_graphs: Literal["auto", "always", "never"] = option(
        "Record the kernels of the fused layers once for each shape and launch them together: the same numbers, and the"
        " GPU does not wait for Python. It holds the memory of a micro-batch. auto: where the GPU was seen to wait.",
        default="auto",
    )
    profile: int | None = option(
        "Profile so many steps, after the second: RUN/profile gets a trace and a table of where they went.",
        default=None,
        at_least=1,
    )


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every_steps: int = option("Save every so many steps; the last step is always saved.", default=50, at_least=1)
    keep_last: int = option("Newest checkpoints to keep.", default=3, at_least=1)
    keep_every: int | None = option(
        "Keep the checkpoints of every so many steps as well, for good.", default=None, at_least=1
    )
    keep_best: int = option("Best checkpoints by `metric` to keep as well.", default=0, at_least=0)
    metric: Literal["val_loss", "loss"] = option(
        "What keep_best goes by; lower is better. Checkpoints of steps at which it was not measured do not count.",
        default="val_loss",
    )
    asynchronous: bool = option(
        "Train on while a checkpoint is written: a save stops training for the copy to host memory only. The bytes"
        " written are the same.",
        default=True,
    )
    on_damaged: Literal["fallback", "refuse"] = option(
        "A damaged checkpoint at a start: move it to quarantine/ and use the one before, or stop.", default="fallback"
    )


@attrs.frozen(kw_only=True)
class RestoreConfig:
    """What a resume takes from the checkpoint besides the adapter; leaving something out is journaled and shown."""

    optimizer: bool = option("Moments and masters of the optimizer; false starts them anew.", default=True)
    rng: bool = option(
        "States of the random number generators; false seeds them from (seed, step, rank).", default=True
    )


@attrs.frozen(kw_only=True)
class LogConfig:
    """What a run tells while it goes."""

    every_steps: int = option("Print and record every so many steps.", default=1, at_least=1)
    tensorboard: bool = option("Write TensorBoard events to RUN/tensorboard.", default=True)
    wandb: dict[str, Any] | None = option(
        "Arguments of wandb.init (extra `wandb`); {mode: offline} needs no server.", default=None
    )
    mlflow: dict[str, Any] | None = option(
        "{tracking_uri, experiment, run_name} (extra `mlflow`); RUN/mlruns where no server is named.", default=None
    )
    sample_tokens: int = option(
        "Answer the first validation sample before and after training, greedily, in up to so many tokens; 0 does not.",
        default=0,
        at_least=0,
    )


@attrs.frozen(kw_only=True)
class RunConfig:
    """Everything one run is told."""

    model: ModelConfig = section(ModelConfig)
    lora: LoraConfig = section(LoraConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    data: DataConfig = section(DataConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    train: TrainConfig = section(TrainConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    restore: RestoreConfig = section(RestoreConfig)
    log: LogConfig = section(LogConfig)
