"""Folders as Hugging Face writes them: which files are taken, what they say of a model, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.description import config_facts, describe
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.opening import open_checkpoint

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
W = np.arange(6, dtype=np.float32).reshape(2, 3)


def make(folder: Path, files: Mapping[str, Any] | None = None, config: Any = CONFIG) -> Path:
    """A folder with the weight `w`; a text is written as it is, all else as JSON."""
    folder.mkdir(exist_ok=True)
    save_file({"w": W}, folder / "model.safetensors")
    for name, content in {"config.json": config, **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((5, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- which files -------------------------------------------------------------------------------------------


def test_a_folder_is_its_tensors_and_its_settings(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", {"generation_config.json": {"top_k": 3}, "tokenizer.json": {}})
    with open_checkpoint(str(folder)) as found:
        assert isinstance(found, ModelFolder)
        assert found.config == CONFIG
        assert found.generation_config == {"top_k": 3}
        assert found.tokenizer_config == {}
        assert found.tokenizer_json == folder / "tokenizer.json"
        assert found.tensor_names == ["w"]
        assert found.info("w").shape == (2, 3)
        np.testing.assert_array_equal(found.dequantise("w"), W)
        np.testing.assert_array_equal(found.dequantise_rows("w", 1, 2), W[1:])
        assert found.raw("w").tobytes() == W.tobytes()
        assert found.is_finite("w")
        found.drop_pages()
        with pytest.raises(CheckpointError, match=r"m/model\.safetensors: no tensor 'v' among its 1"):
            found.info("v")


def test_shards_in_a_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(folder) as found:
        np.testing.assert_array_equal(found.dequantise("w"), W)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"2 GGUF files; give one of them: big-00001-of-00002\.gguf, m\.g"
    ):
        open_checkpoint(tmp_path)
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (tmp_path / name).unlink()
    for _ in range(2):
        with open_checkpoint(tmp_path) as found:
            assert isinstance(found, GGUFFile)
            assert found.path == path
        (tmp_path / "config.json").write_text("{}")  # repositories of GGUF files may have one, too
    make(tmp_path)
    with open_checkpoint(tmp_path) as found:
        assert isinstance(found, ModelFolder)


def test_a_gguf_file_is_opened_as_before(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as found:
        assert describe(found).facts.max_position_embeddings == 32
        assert describe(found).facts.vocab_size == 5
        assert describe(found).sampling_defaults == {}


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({"config.json": None}, None, "m: is no model's folder; expected config.json and weights, or a GGUF"),
        ({"model.safetensors": None}, CONFIG, "m: has no weights; expected model.safetensors or model.safet"),
        (
            {"model.safetensors": None, "a.safetensors": ""},
            CONFIG,
            "has no weights beside 'a.safetensors'; exp",
        ),
        (
            {"model.safetensors": None, "pytorch_model.bin": ""},
            CONFIG,
            r"as a pickle \(pytorch_model.bin\), wh",
        ),
        ({"model.safetensors": None, "adapter_config.json": {}}, CONFIG, "m: is an adapter"),
        ({"model.safetensors": ""}, CONFIG, r"m/model\.safetensors: the file is empty"),
        ({}, "{", r"m/config\.json is not JSON: "),
        ({}, "[" * 100_000, r"m/config\.json is not JSON that can be read: it is nested too deep"),
        ({}, [], r"m/config\.json is list; expected a JSON object"),
        ({}, {}, r"m/config\.json's max_position_embeddings is None; expected a positive integer"),
        ({}, {**CONFIG, "vocab_size": True}, r"m/config\.json's vocab_size is True; expected a positive"),
        (
            {},
            {**CONFIG, "vocab_size": 10**30},
            r"m/config\.json's vocab_size is 1000000000.*; expected a positive",
        ),
        (
            {},
            {**CONFIG, "eos_token_id": 2**63},
            r"m/config\.json's eos_token_id is 9223372.*; expected a token's",
        ),
        (
            {},
            '{"vocab_size": 100, "rope_theta": 1e4, "vocab_size": 200}',
            r"m/config\.json has the key 'vocab_size' twice, as 100 and 200; expected it once",
        ),
        (
            {"generation_config.json": '{"a": {"top_k": 3, "top_k": null}}'},
            CONFIG,
            r"n_config\.json has the key 'top_k' twice, as 3 and None",
        ),
        ({}, {**CONFIG, "eos_token_id": "2"}, r"m/config\.json's eos_token_id is '2'; expected a token's id"),
        (
            {"generation_config.json": {"eos_token_id": [-1]}},
            CONFIG,
            r"n_config\.json's eos_token_id is \[-1\]",
        ),
        ({"generation_config.json": {"top_p": 7}}, CONFIG, r"m/generation_config\.json: top_p "),
        ({"generation_config.json": {"top_k": "3"}}, CONFIG, r"m/generation_config\.json: top_k "),
        ({"generation_config.json": "]"}, CONFIG, r"m/generation_config\.json is not JSON"),
        (
            {"tokenizer.json": {"added_tokens": [{"id": "1"}]}, "tokenizer_config.json": {"eos_token": "a"}},
            CONFIG,
            r"m/tokenizer\.json: is no tokenizer: Expected `int`, got `str`",
        ),
    ],
)
def test_what_is_no_model(files: dict[str, Any], config: Any, expected: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "m", {k: v for k, v in files.items() if v is not None}, config)
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
    with pytest.raises(CheckpointError, match=expected) as caught, open_checkpoint(folder) as found:
        describe(found)
    assert "\n" not in str(caught.value)


def test_a_key_that_says_the_same_twice(tmp_path: Path) -> None:
    config = json.dumps(CONFIG)
    with ModelFolder(make(tmp_path, config=f'{config[:-1]}, "vocab_size": 100}}')) as found:
        assert found.config == CONFIG


def test_weights_alone_and_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"weights alone are no model; give their folder, with its config"
    ):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint("m\0")


# ---- what they say -----------------------------------------------------------------------------------------


def facts(tmp_path: Path, files: dict[str, Any], config: Any = CONFIG) -> Any:
    with open_checkpoint(make(tmp_path / "m", files, config)) as found:
        return describe(found).facts


def test_end_tokens_come_from_all_who_name_one(tmp_path: Path) -> None:
    """The tokenizer's own is *the* EOS; the generation config's others end an answer, too, and the config's
    where that is silent."""
    assert facts(tmp_path, {}).eos_token_ids == (2,)
    assert facts(tmp_path, {"generation_config.json": {"eos_token_id": [5, 7]}}).eos_token_ids == (5, 7)
    tokens = {"added_tokens": [{"id": 7, "content": "<end>"}, {"id": 4, "content": "<begin>"}], "model": {}}
    tokenizer = {"tokenizer.json": tokens, "tokenizer_config.json": {"eos_token": "<end>"}}
    assert facts(tmp_path, tokenizer).eos_token_ids == (7, 5)
    tokenizer["tokenizer_config.json"] = {"eos_token": {"content": "<end>"}, "bos_token": "<begin>"}
    assert facts(tmp_path, tokenizer).bos_token_id == 4
    tokenizer["tokenizer_config.json"] = {"eos_token": None, "bos_token": "elsewhere"}
    tokenizer["special_tokens_map.json"] = {"eos_token": {"content": "<end>", "lstrip": False}}
    assert facts(tmp_path, tokenizer).eos_token_ids == (7, 5)
    assert facts(tmp_path, tokenizer).bos_token_id == 1


def test_end_tokens_beyond_the_vocabulary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of 100 tokens cannot say the hundred and first: it is left out, and that is said by file and
    key."""
    tokens = {"added_tokens": [{"id": 100, "content": "<end>"}], "model": {}}
    files = {
        "tokenizer.json": tokens,
        "tokenizer_config.json": {"eos_token": "<end>"},
        "generation_config.json": {"eos_token_id": [99, 101]},
    }
    found = facts(tmp_path, files, {**CONFIG, "bos_token_id": 102, "eos_token_id": 103})
    assert (found.bos_token_id, found.eos_token_ids) == (None, (99,))
    told = [message.removeprefix(f"{tmp_path / 'm'}/") for message in caplog.messages]
    ending = "is beyond the vocabulary of 100, and has no effect"
    assert sorted(told) == [
        f"config.json's bos_token_id 102 {ending}",
        f"config.json's eos_token_id 103 {ending}",
        f"generation_config.json's eos_token_id 101 {ending}",
        f"tokenizer.json's eos_token 100 {ending}",
    ]


def test_no_end_token_at_all(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if "token" not in key}
    found = facts(tmp_path, {}, config)
    assert (found.bos_token_id, found.eos_token_ids) == (None, ())
    assert found.path == str(tmp_path / "m")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, 256),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}, 64),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"rope_scaling": None}, 64),
    ],
)
def test_positions(more: dict[str, Any], expected: int) -> None:
    assert config_facts("m", CONFIG | more).max_position_embeddings == expected


def test_other_spellings_of_a_config() -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 9, "n_positions": 7}
    assert config_facts("m", gpt2).max_position_embeddings == 7
    nested = {"model_type": "gemma3", "eos_token_id": [1, 56], "text_config": CONFIG}
    found = config_facts("m", nested)
    assert (found.architecture, found.vocab_size, found.eos_token_ids) == ("gemma3", 100, (1, 56))
    assert found.bos_token_id == 1


def test_advice_of_the_makers(tmp_path: Path) -> None:
    advice = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_new_tokens": 50,
        "min_p": None,
        "do_sample": True,
        "transformers_version": "4.0",
    }
    with open_checkpoint(make(tmp_path / "m", {"generation_config.json": advice})) as found:
        assert describe(found).sampling_defaults == {
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 20,
            "repetition_penalty": 1.1,
            "max_tokens": 50,
        }


def test_chat_templates(tmp_path: Path) -> None:
    """The nearest to a file of its own wins; of several, the one called "default"."""

    def found(files: dict[str, Any]) -> tuple[Mapping[str, str], str | None]:
        with ModelFolder(make(tmp_path / "m", files)) as folder:
            return folder.chat_templates, folder.chat_template

    assert found({}) == ({}, None)
    one = {"tokenizer_config.json": {"chat_template": "{{ 1 }}"}}
    assert found(one) == ({"default": "{{ 1 }}"}, "{{ 1 }}")
    named = [{"name": "default", "template": "{{ 2 }}"}, {"name": "tool_use", "template": "{{ 3 }}"}]
    several = {"tokenizer_config.json": {"chat_template": named}}
    assert found(several) == ({"default": "{{ 2 }}", "tool_use": "{{ 3 }}"}, "{{ 2 }}")
    assert found({"tokenizer_config.json": {"chat_template": named[1:]}})[1] == "{{ 3 }}"
    assert found({**several, "chat_template.json": {"chat_template": "{{ 4 }}"}})[1] == "{{ 4 }}"
    files = {"chat_template.jinja": "{{ ü }}", "additional_chat_templates/rag.jinja": "{{ 6 }}"}
    assert found(several | files) == (
        {"default": "{{ ü }}", "tool_use": "{{ 3 }}", "rag": "{{ 6 }}"},
        "{{ ü }}",
    )


@pytest.mark.parametrize("wrong", [7, [], [7], [{"name": "default"}], [{"name": 1, "template": "a"}]])
def test_a_wrong_chat_template(wrong: Any, tmp_path: Path) -> None:
    folder = ModelFolder(make(tmp_path / "m", {"tokenizer_config.json": {"chat_template": wrong}}))
    with pytest.raises(
        CheckpointError, match=r"m/tokenizer_config\.json: chat_template is .*; expected a text"
    ):
        _ = folder.chat_template
