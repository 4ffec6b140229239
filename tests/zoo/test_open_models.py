"""Models by the names that people type: built-in shapes, transformers' cache, folders.

Nothing is asked of the hub: a cache is imitated in a folder, and where the hub would be asked a
function stands in its place.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from apportion import zoo
from apportion.catalogue import OpenModel, known_models, near_open_models, open_model, open_models
from apportion.zoo import hf_names

pytest.importorskip("transformers")

LLAMA = "meta-llama/Llama-3.1-8B"
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no hub."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def put_in_cache(hub: Path, name: str, facts: dict[str, object]) -> None:
    """As `hf download NAME config.json` leaves it."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "config.json").write_text(json.dumps(facts))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)


def shapes(spec: str) -> dict[str, tuple[int, ...]]:
    model = zoo.load(spec, meta=True).model
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def by_family() -> dict[str, list[OpenModel]]:
    return {m.family: [n for n in open_models() if n.family == m.family] for m in open_models()}


@pytest.mark.slow
@pytest.mark.parametrize("family", by_family())
def test_a_built_in_shape_has_the_parameters_of_its_source(family: str) -> None:
    for known in by_family()[family]:
        it = zoo.load(f"{known.name},batch=1,seq=16", meta=True)
        assert all(p.is_meta for p in it.model.parameters())
        assert sum(p.numel() for p in it.model.parameters()) == known.parameters, known.name
        assert any("built-in shape" in note for note in it.notes)


@pytest.mark.slow
def test_every_setting_of_a_built_in_shape_is_one_of_its_config() -> None:
    for known in open_models():
        config = hf_names.found_config(known.name, known.name)
        made = config.config(**config.settings)
        old = {"rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_pct"}
        old |= {"partial_rotary_factor", "num_labels"}
        there = {*made.to_dict(), *made.attribute_map} | old
        assert set(config.settings) <= there, known.name


def test_names_are_one_model_each_and_hide_nothing() -> None:
    names = [name.lower() for m in open_models() for name in (m.name, *m.also)]
    assert len(names) == len(set(names)) and len(open_models()) >= 40
    assert all(name.count("/") == 1 for name in names)
    assert all(m.source and m.parameters > 0 for m in open_models())
    for model in known_models():  # a name of the zoo goes on meaning what it meant
        assert zoo.with_sizes(model.name, 2).startswith(f"{model.name}:")


@pytest.mark.parametrize(
    ("typed", "whole"),
    [
        (LLAMA, f"hf:{LLAMA}"),
        (f"{LLAMA},num_hidden_layers=4", f"hf:{LLAMA},num_hidden_layers=4"),
        (f"{LLAMA}:num_hidden_layers=4", f"hf:{LLAMA},num_hidden_layers=4"),
        ("llama-3.1-8b", f"hf:{LLAMA}"),
        ("bert-base-uncased", "hf:google-bert/bert-base-uncased"),
        ("hf:llama,tiny", "hf:llama,tiny"),
        ("path/to/config.json", "hf:path/to/config.json"),
    ],
)
def test_a_name_without_hf_is_made_whole(typed: str, whole: str) -> None:
    assert zoo.with_sizes(typed, 2) == f"{whole},batch=2"
    assert zoo.with_accumulation(typed, 2) == f"{whole},accumulate=2"
    assert zoo.with_precision(typed, "bf16-mixed") == f"{whole},precision=bf16-mixed"


def test_names_are_found_in_any_case_and_by_other_names() -> None:
    first = open_model(LLAMA)
    assert first is not None and first.parameters == 8_030_261_248
    for name in ("META-LLAMA/llama-3.1-8b", "Meta-Llama-3.1-8B", f"{LLAMA}-Instruct"):
        assert open_model(name) is first
    assert near_open_models("meta-lama/Llama-3.1-8B")[0] == LLAMA
    assert near_open_models("Llama-3.1-9B")[0] == LLAMA
    assert near_open_models("completely/different") == ()


@pytest.mark.parametrize("name", [LLAMA, "nobody/nothing", "hf:no-owner"])
def test_a_configuration_in_the_cache_counts_before_a_built_in_shape(
    name: str, hub: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    put_in_cache(hub, name.removeprefix("hf:"), SMALL)
    it = zoo.load(f"{name},seq=8", meta=True)
    assert type(it.model).__name__ == "LlamaForCausalLM" and it.notes == ()
    assert shapes(name) == shapes(f"hf:{name.removeprefix('hf:')}") == shapes(f"hf:{file}")
    assert len(zoo.load(f"{name},num_hidden_layers=1", meta=True).model.model.layers) == 1


def test_a_folder_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(tmp_path)
    expected = shapes("mine/config.json")
    for spec in ("./mine", "mine", "hf:./mine", "hf:mine", str(tmp_path / "mine")):
        assert shapes(f"{spec},seq=8") == expected
    monkeypatch.chdir(tmp_path / "mine")
    assert shapes(".") == shapes("../mine") == expected


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("meta-lama/Llama-3.1-8B", f"nor a built-in shape (near are {LLAMA}"),
        ("nobody/nothing", "nor a built-in shape (`apportion models` lists those)"),
        ("nobody/nothing", "hf download nobody/nothing config.json"),
        ("nobody/nothing", "HF_HUB_OFFLINE forbids"),
        ("Llama-3.1-9B", f"Unknown model 'Llama-3.1-9B'; near are {LLAMA}"),
        ("hf:Llama-3.1-9B", f"no family 'Llama-3.1-9B'; near are {LLAMA}"),
        (f"{LLAMA},hiden_size=3", "'hiden_size' is no setting of LlamaConfig"),
        (f"{LLAMA},tiny", "tiny is for families"),
        ("./nothing", "there is no folder './nothing'"),
        ("a/b/c", "there is no folder 'a/b/c', and a model of the hub is named as OWNER/NAME"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        zoo.load(spec, meta=True)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_a_folder_without_a_configuration_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; save one"):
        zoo.load(str(tmp_path), meta=True)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"model_type": "not_a_family"}, "not_a_family"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        (
            {"model_type": "not_a_family", "auto_map": {"AutoConfig": "configuration.MyConfig"}},
            "custom code",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_and_no_code_is_run(
    hub: Path, more: dict[str, object], sentence: str
) -> None:
    put_in_cache(hub, "some/model", SMALL | more)
    with pytest.raises(ValueError, match=sentence) as raised:
        zoo.load("some/model", meta=True)
    assert "\n" not in str(raised.value)


def test_the_hub_is_waited_for_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    read = hf_names._read

    def lost(name: str, local: bool) -> object:
        return read(name, local=True) if local else time.sleep(5)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_names, "_HUB_SECONDS", 0.01)
    monkeypatch.setattr(hf_names, "_read", lost)
    with pytest.raises(ValueError, match="the hub was not reached within 0 s"):
        zoo.load("nobody/nothing", meta=True)


def test_what_the_hub_gives_is_taken(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    read = hf_names._read

    def downloads(name: str, local: bool) -> object:
        if not local:
            put_in_cache(hub, name, SMALL)
        return read(name, local=True)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_names, "_read", downloads)
    assert len(zoo.load("some/model", meta=True).model.model.layers) == 3


def test_why_the_hub_gave_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    class GatedRepoError(HfHubHTTPError):
        def __init__(self) -> None:
            Exception.__init__(self, "403")

    def gated(name: str, local: bool) -> object:
        raise OSError("You are trying to access a gated repo.") from (None if local else gate)

    gate = GatedRepoError()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_names, "_read", gated)
    with pytest.raises(ValueError, match="only to those who have accepted its terms"):
        zoo.load("some/model", meta=True)
