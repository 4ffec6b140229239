"""The zoo's models of sequences: that they are what their papers describe, and divide exactly."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F
from compare_runs import compare
from graphs import captured, problem
from soak import kept

from apportion import zoo
from apportion.capture.capture import capture
from apportion.search.baselines.random_strategy import draw
from apportion.search.levels.tofu import tofu
from apportion.split.strategy import space_of
from apportion.zoo import bert, gnmt, llama, moe, nmt, rnnlm, transformer_xl

SEQUENCES = [
    *("rnnlm", "rnntc", "nmt", "gnmt", "transformer-xl", "bert", "llama", "transformer-moe"),
]


def parameters(spec: str) -> int:
    return sum(p.numel() for p in zoo.load(spec, meta=True).model.parameters())


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("bert", 336_226_108),  # as Hugging Face's BertForPreTraining
        ("bert:layers=12,width=768,heads=12", 110_106_428),
        ("llama", 8_030_261_248),  # Llama 3 8B
        ("transformer-xl", 41_055_436),  # 41M in the paper
        ("rnnlm", 2 * 8 * (2048 * 2048 + 2048) + 10000 * 2048 + 10000 * 2049),
        ("rnntc", 4 * 8 * (1024 * 1024 + 1024) + 20480 * 1024 + 2 * 1025),
    ],
)
def test_defaults_have_the_papers_parameters(spec: str, count: int) -> None:
    assert parameters(spec) == count


@pytest.mark.parametrize(
    ("spec", "billions"),
    [
        ("transformer-moe", 0.8),
        ("transformer-moe:hidden=4096,experts=48", 2.5),
        ("transformer-moe:experts=512", 12.9),
    ],
)
def test_experts_of_published_sizes(spec: str, billions: float) -> None:
    assert parameters(spec) / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    kept(
        [*(name for name in SEQUENCES if name != "gnmt"), "gnmt:source=6,target=5"], "bert", "llama"
    ),
)
def test_defaults_are_captured_without_data(spec: str) -> None:
    it = zoo.load(spec, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    begin = [v for v, made in zip(graph.values, graph.producer, strict=True) if made is None]
    assert sum(v.nbytes for v in begin if v.role == "parameter") == 4 * parameters(spec)


def unchanged(task: int, message: torch.Tensor) -> torch.Tensor:
    return message


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(SEQUENCES, "bert", "nmt", "transformer-moe"))
def test_tiny_forms_train_the_same_divided(name: str) -> None:
    program, space = captured(f"{name}:tiny")
    assert len(program.graph.ops) < 1000
    strategies = [tofu(problem(4, f"{name}:tiny")).strategy, draw(space, 3, Random(1))]
    for devices, strategy in zip((4, 3), strategies, strict=True):
        divided = space_of(program.graph, strategy)
        found = compare(program, divided, strategy, devices, corrupt=unchanged)
        assert found.equal, (devices, found)


def changed_last(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab
    return other


@pytest.mark.parametrize("name", ["llama", "transformer-xl", "rnnlm"])
def test_no_token_sees_those_after_it(name: str) -> None:
    it = zoo.load(f"{name}:tiny")
    tokens, _ = it.batch
    other = changed_last(tokens, 14)
    models = [zoo.load(f"{name}:tiny").model.eval() for _ in range(2)]  # each has its own memory
    before, after = models[0](tokens), models[1](other)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


# Transformer-XL


def test_shifted_scores_lie_at_their_keys() -> None:
    """The score of distance d, which is column keys - 1 - d, comes to key i + memory - d."""
    queries, keys = 3, 5
    scores = torch.randn(2, 2, queries, keys)
    found = transformer_xl.shifted(scores)
    for i in range(queries):
        for j in range(i + keys - queries + 1):
            distance = i + keys - queries - j
            assert torch.equal(found[..., i, j], scores[..., i, keys - 1 - distance])


def test_a_segment_sees_the_one_before_it() -> None:
    """Two segments in turn are as one of twice the length, where a layer's past is its input."""
    torch.manual_seed(0)
    settings = transformer_xl.Settings(1, 24, 3, 20, 14, seq=4, memory=6, batch=2, dropout=0)
    halves = transformer_xl.TransformerXL(settings)
    whole = transformer_xl.TransformerXL(
        transformer_xl.Settings(1, 24, 3, 20, 14, seq=8, memory=2, batch=2, dropout=0)
    )
    for p in halves.parameters():
        torch.nn.init.normal_(p, std=0.3)
    whole.load_state_dict(halves.state_dict() | {"blocks.0.memory": torch.zeros(2, 2, 24)})
    tokens = torch.randint(14, (2, 8))
    halves(tokens[:, :4])
    torch.testing.assert_close(halves(tokens[:, 4:]), whole(tokens)[:, 4:])


# BERT


def test_a_block_of_bert_is_torchs_encoder_layer() -> None:
    torch.manual_seed(0)
    block = bert.Block(bert.Settings(layers=1, width=12, heads=3, vocab=7, seq=5, masked=1)).eval()
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, 48, activation=F.gelu, layer_norm_eps=1e-12, batch_first=True
    ).train()  # the fast path of eval differs in rounding
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    theirs.self_attn.dropout = 0.0
    attn = block.attn
    pairs = [
        (theirs.self_attn.out_proj, attn.proj), (theirs.linear1, block.up),
        (theirs.linear2, block.proj), (theirs.norm1, block.norm1), (theirs.norm2, block.norm2),
    ]  # fmt: skip
    for mine, ours in pairs:
        mine.load_state_dict(ours.state_dict())
    parts = [attn.query, attn.key, attn.value]
    theirs.self_attn.in_proj_weight.data = torch.cat([p.weight for p in parts]).detach()
    theirs.self_attn.in_proj_bias.data = torch.cat([p.bias for p in parts]).detach()
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(block(x), theirs(x))


def test_only_masked_tokens_are_filled_in() -> None:
    it = zoo.load("bert:tiny,dropout=0")
    tokens, sentences, places, missing, _ = it.batch
    assert places.shape == missing.shape == (6, 4) and (places.diff(dim=1) > 0).all()
    words, follows = it.model(tokens, sentences, places)
    assert words.shape == (6, 4, 22) and follows.shape == (6, 2)
    turned, _ = it.model(tokens, sentences, places.flip(1))
    torch.testing.assert_close(turned, words.flip(1))


# Llama


def test_rotated_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    cosines, sines = llama.rotations(10, 8, q)
    turned = [llama.rotate(x.expand(10, 8), cosines, sines) for x in (q, k)]
    scores = turned[0] @ turned[1].T
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, 0], scores[0, 1])


def test_queries_of_llama_share_keys_and_values() -> None:
    settings = llama.Settings(1, width=24, heads=6, kv_heads=2, hidden=8, vocab=5, seq=5)
    torch.manual_seed(0)
    attn = llama.Attention(settings)
    x = torch.randn(3, 5, 24)
    turn = llama.rotations(5, 4, x)
    q, k, v = (attn._heads(part(x)) for part in (attn.query, attn.key, attn.value))
    q, k = llama.rotate(q, *turn), llama.rotate(k, *turn)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attn(x, *turn), attn.proj(theirs.transpose(1, 2).flatten(2)))
    norm = llama.RMSNorm(24)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (24,), norm.weight, 1e-5))


# Experts


def routed(top: int, capacity: float) -> tuple[moe.Experts, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = moe.Experts(
        moe.Settings(1, 12, 2, 14, experts=4, top=top, capacity=capacity, vocab=5, seq=10, batch=3)
    )
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(3, 10, 12)
    return layer, x, layer(x)[0]


@pytest.mark.parametrize("top", [1, 2, 3])
def test_with_room_for_all_every_token_meets_its_experts(top: int) -> None:
    layer, x, found = routed(top, capacity=4.0)
    gates, chosen = F.softmax(layer.router.gate(x), dim=-1).topk(top, dim=-1)
    if top > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for place in torch.cartesian_prod(torch.arange(3), torch.arange(10)).tolist():
        b, s = place
        for gate, expert in zip(gates[b, s], chosen[b, s], strict=True):
            expected[b, s] += gate * (F.relu(x[b, s] @ layer.up[expert]) @ layer.proj[expert])
    torch.testing.assert_close(found, expected)


def test_experts_take_no_more_than_their_capacity() -> None:
    layer, x, found = routed(1, capacity=0.5)
    sent, _, _ = layer.router(x)
    places = 2  # half of the even share of ten tokens among four experts, rounded up
    assert sent.shape == (3, 10, 4, places)
    assert sent.sum(1).max() == 1 and sent.sum((2, 3)).max() == 1
    lost = sent.sum((2, 3)) == 0
    assert lost.any() and not lost.all()
    assert torch.equal(found[lost], torch.zeros_like(found[lost])) and found[~lost].all()


def test_the_routers_loss_is_least_where_experts_are_used_evenly() -> None:
    layer = moe.Experts(moe.TINY)
    torch.nn.init.zeros_(layer.router.gate.weight)
    even = layer.router(torch.randn(3, 10, 12))[2]
    torch.testing.assert_close(even, torch.tensor(1.0))
    layer.router.gate.weight.data[0] = 10.0  # all tokens like the first expert
    uneven = layer.router(torch.ones(3, 10, 12))[2]
    torch.testing.assert_close(uneven, torch.tensor(4.0))


# Translation


@pytest.mark.parametrize(("name", "model"), [("nmt", nmt.Translator), ("gnmt", gnmt.GNMT)])
def test_translators_see_all_of_the_source_and_the_past_of_the_target(
    name: str, model: type[torch.nn.Module]
) -> None:
    it = zoo.load(f"{name}:tiny")
    it.model.eval()
    assert isinstance(it.model, model)
    source, target, _ = it.batch
    logits = it.model(source, target)
    later = it.model(source, changed_last(target, 13))
    torch.testing.assert_close(later[:, :-1], logits[:, :-1])
    assert not torch.allclose(later[:, -1], logits[:, -1], atol=1e-6)
    elsewhere = it.model(changed_last(source, 13), target)
    assert not torch.allclose(elsewhere[:, 0], logits[:, 0], atol=1e-6)


def test_the_bottom_of_gnmts_encoder_runs_both_ways() -> None:
    torch.manual_seed(0)
    encoder = gnmt.Encoder(gnmt.Settings(layers=2, hidden=4, dropout=0))
    words = torch.randn(3, 2, 4)  # three words of two samples
    theirs = torch.nn.LSTM(4, 4, bidirectional=True)
    for cell, suffix in ((encoder.ahead, "l0"), (encoder.back, "l0_reverse")):
        for ours, name in ((cell.input, "ih"), (cell.state, "hh")):
            for part in ("weight", "bias"):
                # torch's gates are input, forget, cell, output
                a, b, c, d = getattr(ours, part).detach().chunk(4)
                getattr(theirs, f"{part}_{name}_{suffix}").data = torch.cat([b, a, c, d])
    both = theirs(words)[0]
    second = gnmt.unroll(encoder.second, both.unbind(0), encoder.second.begin(both[0]))[0]
    torch.testing.assert_close(encoder(words.unbind(0)), torch.stack(second, dim=1))


def test_settings_reach_the_model() -> None:
    assert len(zoo.load("rnnlm:tiny,layers=4").model.cells) == 4  # type: ignore[arg-type]
    assert len(zoo.load("gnmt:tiny,layers=4").model.encoder.deep) == 2  # type: ignore[arg-type,union-attr]
    model, optimizer, _ = rnnlm.build(rnnlm.TINY)
    assert isinstance(optimizer, torch.optim.SGD) and model.tokens.weight.shape == (14, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("gnmt:layers=1", "layers=1 is below 2"),
        ("gnmt:dropout=1", "dropout=1.0 is not below 1"),
        ("bert:tiny,masked=11", "masked=11 is more than seq=10"),
        ("bert:tiny,heads=3", "width=16 is not a multiple of heads=3"),
        ("llama:tiny,heads=8", "width=24 is not a multiple of twice heads=8"),
        ("llama:tiny,kv_heads=4", "heads=6 is not a multiple of kv_heads=4"),
        ("transformer-xl:tiny,heads=8", "width=24 is not a multiple of twice heads=8"),
        ("transformer-moe:tiny,top=5", "top=5 is more than experts=4"),
        ("transformer-moe:tiny,capacity=0", "capacity=0 leaves no token to any expert"),
    ],
)
def test_settings_that_do_not_fit(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        zoo.load(spec, meta=True)
    assert "\n" not in str(caught.value)
