"""What a start means, case by case."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptrain.config.layout import Layout
from ckptrain.config.load import flatten
from ckptrain.config.schedule import learning_rate
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CheckpointDamaged, StartRefused
from ckptrain.lifecycle.drift import REFUSED, RULES, Kind
from ckptrain.lifecycle.facts import AdapterFacts, CheckpointFacts, DamageFacts, DataIdentity, LoraSpec, RunFacts
from ckptrain.lifecycle.start_plan import (
    AlreadyDone,
    FreshStart,
    Resume,
    StartPlan,
    WarmStart,
    plan_from_dict,
    plan_start,
)

Change = Callable[[RunFacts], RunFacts]

DAMAGE = DamageFacts(name="step-00000150", step=150, problems=("state.json is missing",))


def told(config: RunConfig, **keys: object) -> RunConfig:
    """Return the configuration with some keys changed, given as section__key."""
    for dotted, value in keys.items():
        section, key = dotted.split("__")
        config = attrs.evolve(config, **{section: attrs.evolve(getattr(config, section), **{key: value})})
    return config


def refusal(config: RunConfig, run: RunFacts) -> str:
    """Return the problems that the start is refused for."""
    with pytest.raises(StartRefused) as caught:
        plan_start(config, run)
    return "\n".join(caught.value.problems)


@pytest.fixture
def run(empty_run: RunFacts, checkpoint: CheckpointFacts) -> RunFacts:
    """Return the facts of a run with a checkpoint at step 100."""
    return attrs.evolve(empty_run, checkpoint=checkpoint)


@pytest.fixture
def source(checkpoint: CheckpointFacts) -> AdapterFacts:
    """Return another run's checkpoint that an adapter can be taken from."""
    return AdapterFacts(
        path=Path("OTHER/checkpoints/step-00000400"),
        form="checkpoint of ckptrain",
        base_name=checkpoint.base.name,
        base_fingerprint=checkpoint.base.fingerprint,
        tokenizer_fingerprint=checkpoint.tokenizer_fingerprint,
        lora=checkpoint.lora,
        dtype="float32",
    )


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_an_empty_directory_is_a_fresh_start(config: RunConfig, empty_run: RunFacts, start: str) -> None:
    """Megatron's flag is true, and the first step is 1."""
    plan = plan_start(told(config, train__start=start), empty_run)
    assert isinstance(plan, FreshStart)
    assert (plan.kind, plan.finetune, plan.first_step, plan.notes) == ("FreshStart", True, 1, ())
    assert "holds no checkpoint" in plan.reason


@pytest.mark.parametrize("start", ["auto", "resume"])
def test_a_checkpoint_is_resumed_with_everything_in_it(config: RunConfig, run: RunFacts, start: str) -> None:
    """Megatron's flag is false, and nothing that is the same is noted."""
    plan = plan_start(told(config, train__start=start), run)
    assert isinstance(plan, Resume)
    assert (plan.kind, plan.finetune, plan.first_step) == ("Resume", False, 101)
    assert (plan.step, plan.consumed_samples, plan.consumed_tokens) == (100, 800, 9000)
    assert (plan.restore_optimizer, plan.restore_rng, plan.layout_changed, plan.notes) == (True, True, False, ())
    assert "step 101 of 200" in plan.reason


@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_an_adapter_and_no_checkpoint_is_a_warm_start(
    config: RunConfig, empty_run: RunFacts, source: AdapterFacts, start: str
) -> None:
    """The adapter is taken, its step and optimizer are not."""
    plan = plan_start(
        told(config, model__adapter="OTHER", train__start=start), attrs.evolve(empty_run, warm_start=source)
    )
    assert isinstance(plan, WarmStart)
    assert (plan.kind, plan.finetune, plan.first_step, plan.adapter) == ("WarmStart", True, 1, source.path)


def test_a_checkpoint_beats_an_adapter_and_says_so(config: RunConfig, run: RunFacts, source: AdapterFacts) -> None:
    """A relaunched job goes on instead of starting over, whether or not the adapter is still there."""
    for warm_start in (source, None):
        plan = plan_start(told(config, model__adapter="OTHER"), attrs.evolve(run, warm_start=warm_start))
        assert isinstance(plan, Resume)
        assert any("model.adapter is not used" in note for note in plan.notes)


@pytest.mark.parametrize("steps", [100, 50])
def test_a_checkpoint_at_or_past_the_target_is_already_done(config: RunConfig, run: RunFacts, steps: int) -> None:
    """There is no first step, and the way to train on is told."""
    plan = plan_start(told(config, train__steps=steps), run)
    assert isinstance(plan, AlreadyDone)
    assert (plan.kind, plan.finetune, plan.first_step, plan.step) == ("AlreadyDone", None, None, 100)
    assert "set train.steps higher" in plan.reason


def test_one_step_before_the_target_is_not_done(config: RunConfig, run: RunFacts) -> None:
    """The last step is step `train.steps` itself."""
    assert plan_start(told(config, train__steps=101), run).first_step == 101


def test_fresh_is_refused_where_there_is_a_checkpoint(config: RunConfig, run: RunFacts) -> None:
    """Nothing is overwritten on a word."""
    message = refusal(told(config, train__start="fresh"), run)
    assert "step-00000100; use a new --run-dir, or train.start=resume" in message


def test_resume_is_refused_where_there_is_none(config: RunConfig, empty_run: RunFacts) -> None:
    """A wrong --run-dir does not become a new run."""
    assert "RUN/checkpoints holds no checkpoint" in refusal(told(config, train__start="resume"), empty_run)
    damaged = attrs.evolve(empty_run, damaged=(DAMAGE,))
    assert "holds only damaged checkpoints" in refusal(told(config, train__start="resume"), damaged)


def _another_base(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, base=attrs.evolve(run.base, fingerprint="c" * 64, name="org/other"))


def _changed_base(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, base=attrs.evolve(run.base, fingerprint="c" * 64))


def _fewer_modules(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, lora=attrs.evolve(run.lora, modules=run.lora.modules[:1]))


def _other_modules(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, lora=attrs.evolve(run.lora, modules=("decoder.layers.0.mlp.linear_fc1",)))


def _another_tokenizer(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, tokenizer_fingerprint="u" * 64)


def _other_data(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, data=DataIdentity(fingerprint="e" * 64))


def _other_rows(run: RunFacts) -> RunFacts:
    return attrs.evolve(run, data=attrs.evolve(run.data, num_samples=400, num_rows=51))


REFUSED_FACTS: dict[Change, str] = {
    _another_base: "the base model is org/base (bbbbbbbbbbbb) there and org/other (cccccccccccc) in the config; set"
    " model.pretrained=org/base or use a new --run-dir",
    _changed_base: "the base model org/base is no longer the same",
    _fewer_modules: "select 4 modules there and 1 in the config, only there: decoder.layers.1.self_attention.linear_qkv"
    ", decoder.layers.2.self_attention.linear_qkv and 1 more; set lora.target_modules=[linear_qkv,linear_proj,",
    _other_modules: "only in the config: decoder.layers.0.mlp.linear_fc1;",
    _another_tokenizer: "the tokenizer or its chat template is tttttttttttt there and uuuuuuuuuuuu now",
    _other_data: "the training data is dddddddddddd there and eeeeeeeeeeee now",
    _other_rows: "the training data gives 50 rows there and 51 now",
}

REFUSED_KEYS = {
    "lora__dim": (16, "lora.dim is 8 there and 16 in the config, and it is the shape of the adapters; set lora.dim=8"),
    "lora__kind": ("canonical", "lora.kind is auto there and canonical in the config"),
    "lora__alpha": (16, "lora.alpha is 32 there and 16 in the config"),
    "lora__lora_dtype": ("float32", "lora.lora_dtype is null there and float32 in the config"),
    "model__dtype": ("float32", "model.dtype is bfloat16 there and float32 in the config"),
    "train__global_batch_size": (16, "train.global_batch_size is 8 there and 16 in the config"),
    "train__seed": (1, "train.seed is 1234 there and 1 in the config"),
    "data__packing": (False, "data.packing is true there and false in the config"),
    "data__sequence_length": (512, "data.sequence_length is 1024 there and 512 in the config"),
}


@pytest.mark.parametrize("change", REFUSED_FACTS, ids=lambda change: change.__name__)
def test_another_identity_is_refused_with_what_to_do(config: RunConfig, run: RunFacts, change: Change) -> None:
    """Compared by fingerprint, whatever the paths in the configuration are."""
    message = refusal(config, change(run))
    assert REFUSED_FACTS[change] in message
    assert "use a new --run-dir" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_key_that_decides_identity_or_order_is_refused(config: RunConfig, run: RunFacts, key: str) -> None:
    """One line for one key, with the value to go back to."""
    value, expected = REFUSED_KEYS[key]
    message = refusal(told(config, **{key: value}), run)
    assert expected in message
    assert len(message.splitlines()) == 1


def test_all_contradictions_are_told_at_once(config: RunConfig, run: RunFacts) -> None:
    """And the target step being reached does not hide them."""
    keys = {key: value for key, (value, _) in REFUSED_KEYS.items()}
    changed = _other_data(_another_tokenizer(_fewer_modules(_another_base(run))))
    message = refusal(told(config, **keys, train__start="fresh", train__steps=100), changed)
    assert len(message.splitlines()) == len(keys) + 5
    with pytest.raises(StartRefused, match=r"^cannot resume from RUN/checkpoints/step-00000100\n"):
        plan_start(told(config, **keys), changed)


def test_the_same_base_and_data_under_other_paths_are_resumed(config: RunConfig, run: RunFacts) -> None:
    """A run directory and its inputs can be moved to another machine."""
    moved = told(config, model__pretrained="/new/base", data__train="/new/train.jsonl")
    renamed = attrs.evolve(run, base=attrs.evolve(run.base, name="/new/base"))
    plan = plan_start(moved, renamed)
    assert isinstance(plan, Resume)
    assert plan.notes == ()


def test_the_same_modules_named_otherwise_are_resumed(config: RunConfig, run: RunFacts) -> None:
    """q_proj and linear_qkv are one module under Megatron."""
    plan = plan_start(told(config, lora__target_modules=("q_proj", "k_proj", "v_proj")), run)
    assert isinstance(plan, Resume)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__micro_batch_size", 2),
        ("optimizer__weight_decay", 0.1),
        ("lora__dropout", 0.1),
        ("parallel__tensor", 2),
        ("model__backend", "local"),
    ],
)
def test_what_changes_numbers_only_is_allowed_and_noted(
    config: RunConfig, run: RunFacts, key: str, value: object
) -> None:
    """One note, with the key and both values."""
    plan = plan_start(told(config, **{key: value}), run)
    assert isinstance(plan, Resume)
    [note] = plan.notes
    assert note.startswith(f"{key.replace('__', '.')} is ")
    assert f"and {value} in the config" in note


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint__every_steps", 7),
        ("log__tensorboard", False),
        ("train__max_minutes", 5.0),
        ("model__verify", "never"),
    ],
)
def test_what_is_learnt_does_not_depend_on_is_allowed_silently(
    config: RunConfig, run: RunFacts, key: str, value: object
) -> None:
    """Save policy, logging and the like."""
    plan = plan_start(told(config, **{key: value}), run)
    assert isinstance(plan, Resume)
    assert plan.notes == ()


def test_a_longer_training_says_what_it_does_to_the_learning_rate(config: RunConfig, run: RunFacts) -> None:
    """A cosine is stretched by it, which shows at the very next step."""
    longer = told(config, train__steps=400)
    plan = plan_start(longer, run)
    now, then = learning_rate(longer.optimizer, 400, 101), learning_rate(config.optimizer, 200, 101)
    assert now != then
    assert f"the learning rate at step 101 is {now:.4g}; under the old settings it would be {then:.4g}" in plan.notes


def test_another_learning_rate_is_told_with_the_one_it_replaces(config: RunConfig, run: RunFacts) -> None:
    """Each schedule key by itself brings the note about the next step."""
    changes = {"lr": 2e-4, "min_lr": 1e-5, "schedule": "constant", "warmup_steps": 150}
    for key, value in changes.items():
        changed = told(config, **{f"optimizer__{key}": value})
        plan = plan_start(changed, run)
        now = learning_rate(changed.optimizer, 200, 101)
        assert any(f"the learning rate at step 101 is {now:.4g}; under the old" in note for note in plan.notes), key


def test_a_finished_run_that_trains_on_says_that_the_old_schedule_had_ended(config: RunConfig, run: RunFacts) -> None:
    """There is no old learning rate for a step after the last."""
    assert run.checkpoint is not None
    finished = attrs.evolve(run, checkpoint=attrs.evolve(run.checkpoint, step=200))
    plan = plan_start(told(config, train__steps=300), finished)
    assert any("the old settings ended at step 200" in note for note in plan.notes)


def test_what_a_resume_leaves_out_is_declared(config: RunConfig, run: RunFacts) -> None:
    """The plan carries it, and the notes say it."""
    plan = plan_start(told(config, restore__optimizer=False, restore__rng=False), run)
    assert isinstance(plan, Resume)
    assert (plan.restore_optimizer, plan.restore_rng) == (False, False)
    assert [note.split(":")[0] for note in plan.notes] == ["restore.optimizer is false", "restore.rng is false"]


@pytest.mark.parametrize(("state", "key"), [("has_optimizer", "restore__optimizer"), ("has_rng", "restore__rng")])
def test_state_that_the_checkpoint_lacks_is_not_silently_started_anew(
    config: RunConfig, run: RunFacts, state: str, key: str
) -> None:
    """Leaving it out has to be asked for."""
    assert run.checkpoint is not None
    without: dict[str, Any] = {state: False}
    lacking = attrs.evolve(run, checkpoint=attrs.evolve(run.checkpoint, **without))
    assert f"set {key.replace('__', '.')}=false" in refusal(config, lacking)
    assert isinstance(plan_start(told(config, **{key: False}), lacking), Resume)


def test_an_imported_adapter_is_not_resumed(config: RunConfig, run: RunFacts) -> None:
    """It has no data position; it can start a run, as the message says."""
    assert run.checkpoint is not None
    imported = attrs.evolve(run.checkpoint, data=None, tokenizer_fingerprint=None, has_optimizer=False, has_rng=False)
    assert "give it as model.adapter in a new --run-dir" in refusal(config, attrs.evolve(run, checkpoint=imported))


def test_another_layout_is_allowed_and_noted(config: RunConfig, run: RunFacts) -> None:
    """Masks of dropout are the one thing that cannot be the same."""
    wider = attrs.evolve(run, layout=Layout(tensor=1, pipeline=1, context=1, expert=1, data=4))
    plan = plan_start(config, wider)
    assert isinstance(plan, Resume)
    assert plan.layout_changed
    assert len(plan.notes) == 1
    assert "was tensor 1 x pipeline 1 x data 1 and is tensor 1 x pipeline 1 x data 4 now" in plan.notes[0]
    assert run.checkpoint is not None
    dropout = told(config, lora__dropout=0.1)
    saved = attrs.evolve(run.checkpoint, config=flatten(dropout))
    assert any("masks" in note for note in plan_start(dropout, attrs.evolve(wider, checkpoint=saved)).notes)


def test_other_versions_and_other_validation_data_are_noted(config: RunConfig, run: RunFacts) -> None:
    """Each can be the reason for a number that moved."""
    data = attrs.evolve(run.data, validation_fingerprint="v" * 64)
    plan = plan_start(config, attrs.evolve(run, versions={"torch": "2.12.0", "new": "1"}, data=data))
    assert plan.notes == (
        "the validation data changed: val_loss cannot be compared with that of the steps before",
        "torch was 2.11.0 and is 2.12.0 now",
    )


def test_damage_is_told_and_the_checkpoint_before_is_used(config: RunConfig, run: RunFacts) -> None:
    """Loudly, with the problems."""
    plan = plan_start(config, attrs.evolve(run, damaged=(DAMAGE,)))
    assert isinstance(plan, Resume)
    assert plan.notes == (
        "step-00000150 is damaged (state.json is missing): it is moved to quarantine/, and going on from step-00000100",
    )


def test_a_run_with_only_damaged_checkpoints_starts_over_and_says_so(config: RunConfig, empty_run: RunFacts) -> None:
    """Nothing is left to go on from, and the damaged ones are kept in quarantine."""
    plan = plan_start(config, attrs.evolve(empty_run, damaged=(DAMAGE,)))
    assert isinstance(plan, FreshStart)
    assert "holds only damaged checkpoints" in plan.reason
    assert "the run starts over at step 1" in plan.notes[0]


def test_damage_stops_the_start_where_that_was_asked_for(config: RunConfig, run: RunFacts) -> None:
    """Every problem of every damaged checkpoint is listed."""
    more = attrs.evolve(DAMAGE, name="step-00000170", step=170, problems=("a is missing", "b is missing"))
    with pytest.raises(CheckpointDamaged, match="on_damaged is refuse") as caught:
        plan_start(told(config, checkpoint__on_damaged="refuse"), attrs.evolve(run, damaged=(DAMAGE, more)))
    assert len(caught.value.problems) == 3


def test_an_adapter_that_does_not_fit_is_refused_with_every_difference(
    config: RunConfig, empty_run: RunFacts, source: AdapterFacts
) -> None:
    """Another base, rank, scale or set of modules."""
    settings = attrs.evolve(config.lora, dim=4, alpha=8)
    other = attrs.evolve(source, lora=LoraSpec(settings=settings, modules=("decoder.layers.0.mlp.linear_fc1",)))
    run = _another_base(attrs.evolve(empty_run, warm_start=other))
    message = refusal(told(config, model__adapter="OTHER", train__start="resume"), run)
    for expected in (
        "train.start is resume",
        "the base model is",
        "set lora.dim=4",
        "set lora.alpha=8",
        "select 1 modules",
    ):
        assert expected in message
    assert len(message.splitlines()) == 5


def test_an_adapter_that_was_not_read_is_refused(config: RunConfig, empty_run: RunFacts) -> None:
    """Whoever gathers the facts forgot it: that must not become a fresh start."""
    assert "where no checkpoint was read" in refusal(told(config, model__adapter="OTHER"), empty_run)


def test_what_differs_in_an_adapters_origin_without_harm_is_noted(
    config: RunConfig, empty_run: RunFacts, source: AdapterFacts
) -> None:
    """Another template or number format does not stop a warm start; other data is its purpose."""
    other = attrs.evolve(
        source,
        tokenizer_fingerprint="u" * 64,
        base_name="elsewhere/base",
        base_fingerprint=None,
        dtype="bfloat16",
        notes=("read from a distance",),
    )
    plan = plan_start(told(config, model__adapter="OTHER"), attrs.evolve(empty_run, warm_start=other))
    assert len(plan.notes) == 4
    assert plan.notes[0] == "read from a distance"
    assert "its base is elsewhere/base" in plan.notes[1]


def test_a_kind_that_cannot_hold_the_adapter_is_refused(
    config: RunConfig, empty_run: RunFacts, source: AdapterFacts
) -> None:
    """The message says which to set; that the modules have other names then is not told as well."""
    canonical = attrs.evolve(config.lora, kind="canonical")
    other = attrs.evolve(source, lora=LoraSpec(settings=canonical, modules=("decoder.layers.0.mlp.linear_fc1_up",)))
    message = refusal(told(config, model__adapter="OTHER"), attrs.evolve(empty_run, warm_start=other))
    assert "set lora.kind=canonical or auto" in message
    assert len(message.splitlines()) == 1


def _plans(config: RunConfig, run: RunFacts, source: AdapterFacts) -> list[StartPlan]:
    warm = attrs.evolve(run, checkpoint=None, warm_start=source)
    return [
        plan_start(config, attrs.evolve(run, checkpoint=None)),
        plan_start(told(config, model__adapter="OTHER"), warm),
        plan_start(told(config, restore__rng=False), run),
        plan_start(told(config, train__steps=100), run),
    ]


def test_every_plan_survives_json_and_pickle(config: RunConfig, run: RunFacts, source: AdapterFacts) -> None:
    """Rank 0 sends it to the others, the journal keeps it."""
    plans = _plans(config, run, source)
    assert [plan.kind for plan in plans] == ["FreshStart", "WarmStart", "Resume", "AlreadyDone"]
    for plan in plans:
        values = json.loads(json.dumps(plan.to_dict()))
        assert plan_from_dict(values) == plan
        assert (values["plan"], values["finetune"], values["first_step"]) == (plan.kind, plan.finetune, plan.first_step)
        assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_cannot_be_changed(config: RunConfig, empty_run: RunFacts) -> None:
    """Nothing rewrites it while a run goes on."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan_start(config, empty_run).reason = "another"  # type: ignore[misc]


@given(data=st.data())
def test_a_changed_configuration_is_resumed_exactly_where_no_refused_key_differs(
    config: RunConfig, empty_run: RunFacts, checkpoint: CheckpointFacts, data: st.DataObject
) -> None:
    """Whatever the checkpoint was trained under, the outcome follows the table."""
    movable = sorted(RULES.keys() - {"train.steps"})
    keys = data.draw(st.lists(st.sampled_from(movable), unique=True, max_size=4))
    old = {**checkpoint.config, **{key: f"other {key}" for key in keys if not key.startswith("optimizer.")}}
    changed = {key for key in keys if old[key] != checkpoint.config[key]}
    run = attrs.evolve(empty_run, checkpoint=attrs.evolve(checkpoint, config=old))
    if any(RULES[key].kind in REFUSED for key in changed):
        with pytest.raises(StartRefused):
            plan_start(config, run)
        return
    plan = plan_start(config, run)
    assert isinstance(plan, Resume)
    assert len(plan.notes) == len([key for key in changed if RULES[key].kind is Kind.NOTED])
