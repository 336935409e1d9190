"""A configuration and the facts of a run whose checkpoint fits it, to be changed by the tests of this room."""

from pathlib import Path

import pytest

from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.load import flatten, load_config
from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.facts import CheckpointFacts, DataIdentity, LoraSpec, RunFacts

MODULES = tuple(f"decoder.layers.{layer}.self_attention.linear_qkv" for layer in range(4))


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return a configuration of 200 steps."""
    data = tmp_path_factory.mktemp("data") / "train.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    return load_config({"model": {"pretrained": "org/base"}, "data": {"train": str(data)}, "train": {"steps": 200}}, [])


@pytest.fixture(scope="session")
def empty_run(config: RunConfig) -> RunFacts:
    """Return the facts of a run whose directory holds nothing."""
    return RunFacts(
        run_dir=Path("RUN"),
        base=BaseIdentity(fingerprint="b" * 64, name="org/base", revision=None, num_bytes=1000),
        tokenizer_fingerprint="t" * 64,
        data=DataIdentity(fingerprint="d" * 64),
        lora=LoraSpec(settings=config.lora, modules=MODULES),
        layout=Layout(tensor=1, pipeline=1, context=1, expert=1, data=1),
        versions={"torch": "2.11.0"},
    )


@pytest.fixture(scope="session")
def checkpoint(config: RunConfig, empty_run: RunFacts) -> CheckpointFacts:
    """Return what the checkpoint at step 100 of that run says."""
    return CheckpointFacts(
        path=Path("RUN/checkpoints/step-00000100"),
        run_id="r",
        step=100,
        consumed_samples=800,
        consumed_tokens=9000,
        base=empty_run.base,
        tokenizer_fingerprint=empty_run.tokenizer_fingerprint,
        data=DataIdentity(fingerprint="d" * 64, num_samples=400, num_rows=50),
        lora=empty_run.lora,
        layout=empty_run.layout,
        has_optimizer=True,
        has_rng=True,
        config=flatten(config),
        versions={"torch": "2.11.0"},
    )
