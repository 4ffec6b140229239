"""Models of transformers by name: what a spec makes, and what is said where it makes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture

pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_family_has_the_sizes_of_its_spec() -> None:
    it = zoo.load("hf:llama,tiny,num_hidden_layers=3,hidden_size=32,batch=2,seq=8", meta=True)
    assert type(it.model).__name__ == "LlamaForCausalLM"
    assert len(it.model.model.layers) == 3 and it.model.config.hidden_size == 32
    assert {k: tuple(t.shape) for k, t in it.batch.items()} == {
        "input_ids": (2, 8),
        "labels": (2, 8),
    }
    assert all(p.is_meta for p in it.model.parameters())
    program = capture(it.step, it.model, it.optimizer, it.batch)
    assert {v.shape for v in program.graph.values if v.role == "input"} == {(2, 8)}


def test_specs_are_bit_equal_for_equal_seeds() -> None:
    first, second = (zoo.load("hf:gpt2,tiny", 5) for _ in range(2))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.batch["input_ids"], second.batch["input_ids"])


def test_a_class_and_a_file_can_be_named(tmp_path: Path) -> None:
    it = zoo.load("hf:BertForSequenceClassification,tiny,num_labels=5", meta=True)
    assert it.model.classifier.out_features == 5 and it.batch["labels"].shape == (4,)
    file = tmp_path / "config.json"
    facts = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 50}
    file.write_text(json.dumps(facts | {"architectures": ["GPT2LMHeadModel"]}))
    it = zoo.load(f"hf:{file},n_layer=1,batch=2,seq=4", meta=True)
    assert len(it.model.transformer.h) == 1 and it.model.config.n_embd == 32


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        ("hf:gemma3,text_config.num_hidden_layers=1,text_config.hidden_size=64", (1, 12)),
        ("hf:gemma3,tiny,text_config.num_hidden_layers=3", (3, 2)),
    ],
)
def test_a_config_inside_has_its_own_settings(spec: str, counts: tuple[int, int]) -> None:
    config = zoo.load(spec, meta=True).model.config
    assert config.text_config.num_hidden_layers == counts[0] == len(config.text_config.layer_types)
    assert config.vision_config.num_hidden_layers == counts[1]


def test_more_tokens_than_positions_make_positions() -> None:
    it = zoo.load("hf:llama,tiny,seq=100", meta=True)
    assert it.model.config.max_position_embeddings == 100
    assert any("max_position_embeddings is 100 instead of 64" in text for text in it.notes)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hf:lama", "no family 'lama'; near are llama"),
        (
            "hf:llama,hiden_size=3",
            "'hiden_size' is no setting of LlamaConfig; near are hidden_size",
        ),
        ("hf:llava,tiny,hidden_size=3", "text_config.hidden_size"),
        ("hf:llama,class=LlamaForCausalLN", "near are LlamaForCausalLM"),
        ("hf:llama,batch=0", "batch must be a positive whole number, not '0'"),
        ("hf:llama,wide", "'wide' is no setting"),
        ("hf:llama,hidden_size=6,hidden_size=7", "hidden_size is set twice"),
        ("hf:llama,hidden_size=30,num_attention_heads=4", "these settings do not go together"),
        ("hf:vitdet", "no class of vitdet in transformers computes a loss"),
        ("hf:no/such/config.json", "There is no file"),
        ("hf:", "names no model"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        zoo.load(spec, meta=True)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "voxtral",  # a config around sets more than the class inside has by itself
        "upernet",  # as many stages of a backbone as are read
        "cvt",  # as many layers of a stage as rates are read
        "udop",  # boxes as shares of the page
        "siglip2",  # pictures in patches
        "clap",  # sounds that belong to texts
        "blip-2",  # words in the place of a picture
        "timesfm",  # a series in a list
    ],
)
def test_a_tiny_family_trains_on_the_batch_made_for_it(family: str) -> None:
    it = zoo.load(f"hf:{family},tiny", 1)
    loss = it.step(it.model, it.batch)
    loss.backward()
    assert torch.isfinite(loss)


def test_a_backbone_of_another_package_is_replaced() -> None:
    it = zoo.load("hf:detr,tiny", meta=True)
    assert it.model.config.backbone_config.model_type == "resnet"
    assert "masks" in it.batch["labels"][0]


def test_channels_follow_the_backbone() -> None:
    config = zoo.load("hf:rt_detr,tiny", meta=True).model.config
    assert config.encoder_in_channels == config.backbone_config.hidden_sizes[1:]
    assert config.decoder_in_channels == [config.encoder_hidden_dim] * 3


def test_without_the_package_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'apportion\[hf\]'"):
        zoo.load("hf:llama")


def test_options_become_settings() -> None:
    assert zoo.with_sizes("gpt2", 4, None) == "gpt2:batch=4"
    assert zoo.with_sizes("gpt2:tiny,batch=3", 4, 8) == "gpt2:tiny,batch=4,seq=8"
    assert zoo.with_sizes("hf:llama,tiny", None, 8) == "hf:llama,tiny,seq=8"
    assert zoo.with_sizes("mine.py:make") == "mine.py:make"
    with pytest.raises(ValueError, match="makes its own batch; --seq is for models of the zoo"):
        zoo.with_sizes("mine.py:make", seq=3)
