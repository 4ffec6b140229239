"""The zoo: specs, seeds, and that each model trains."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from soak import kept

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import bound_tensor
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.zoo import gpt2, rnn, wresnet

TINY = [f"{known.name}:tiny" for known in zoo.known()]


@pytest.mark.parametrize("spec", TINY)
def test_equal_seeds_give_bit_equal_models_and_batches(spec: str) -> None:
    first, second, other = zoo.load(spec), zoo.load(spec, seed=0), zoo.load(spec, seed=1)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])
    assert all(torch.equal(a, b) for a, b in zip(first.batch, second.batch, strict=True))
    assert any(
        not torch.equal(a, b)
        for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True)
    )
    assert not torch.equal(first.batch[0], other.batch[0])


def test_loading_leaves_the_random_state_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def draws(load: bool) -> list[tuple[float, float, float]]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        first = draw()
        if load:
            zoo.load("mlp:tiny", seed=3)
        return [first, draw()]

    assert draws(load=True) == draws(load=False)


@pytest.mark.parametrize("spec", TINY)
def test_a_few_steps_lower_the_loss(spec: str) -> None:
    name = spec.partition(":")[0]
    (settings,) = (known.defaults for known in zoo.known() if known.name == name)
    loaded = zoo.load(f"{spec},dropout=0" if "dropout" in settings else spec)
    losses = []
    for _ in range(10):
        loaded.optimizer.zero_grad()
        loss = loaded.step(loaded.model, loaded.batch)
        assert loss.shape == ()
        loss.backward()
        assert all(p.grad is not None for p in loaded.model.parameters())
        loaded.optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_settings_change_the_base_they_follow() -> None:
    model = zoo.load("gpt2:tiny,layers=3,dropout=0").model
    assert isinstance(model, gpt2.GPT2)
    assert len(model.blocks) == 3 and model.dropout == 0.0
    assert model.tokens.weight.shape == (41, 24)
    assert model.head.weight is model.tokens.weight


def test_gpt2_defaults_are_gpt2_small() -> None:
    with torch.device("meta"):
        model = gpt2.GPT2(gpt2.Settings())
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_wide_resnets_are_resnets_with_all_channels_widened() -> None:
    with torch.device("meta"):
        plain = wresnet.WideResNet(wresnet.Settings(depth=50, width=1))
        wide = wresnet.WideResNet(wresnet.Settings(depth=50, width=4))
    assert parameters(plain) == 25_557_032  # ResNet-50
    shapes = zip(plain.parameters(), wide.parameters(), strict=True)
    assert all(b.shape[0] in (4 * a.shape[0], 1000) for a, b in shapes)
    # Tofu's WResNet-50-4 has 4.2 GB of weights, gradients and momenta
    assert 12 * parameters(wide) / 2**30 == pytest.approx(4.2, rel=0.05)


@pytest.mark.parametrize(("depth", "count"), [(101, 44_549_160), (152, 60_192_808)])
def test_deeper_resnets(depth: int, count: int) -> None:
    with torch.device("meta"):
        assert parameters(wresnet.WideResNet(wresnet.Settings(depth=depth, width=1))) == count


def test_the_rnn_is_torchs_lstm() -> None:
    settings = rnn.Settings(layers=2, hidden=5, steps=4, vocab=7, batch=3)
    torch.manual_seed(0)
    model, _, (tokens, _) = rnn.build(settings)
    assert isinstance(model, rnn.RNN)
    theirs = torch.nn.LSTM(5, 5, num_layers=2, batch_first=True)
    for layer, cell in enumerate(model.cells):
        assert isinstance(cell, rnn.Cell)
        for ours, name in ((cell.input, "ih"), (cell.state, "hh")):
            for part in ("weight", "bias"):
                # torch's gates are input, forget, cell, output
                a, b, c, d = getattr(ours, part).detach().chunk(4)
                getattr(theirs, f"{part}_{name}_l{layer}").data = torch.cat([b, a, c, d])
    torch.testing.assert_close(model(tokens), model.head(theirs(model.tokens(tokens))[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", kept(TINY, "mlp:tiny", "gpt2:tiny", "wgan-gp:tiny", "rnn:tiny", "alexnet:tiny")
)
def test_without_data_a_model_is_captured_as_the_same_graph(spec: str) -> None:
    real, meta = (zoo.load(spec, meta=without) for without in (False, True))
    assert all(p.is_meta for p in (*meta.model.parameters(), *meta.model.buffers(), *meta.batch))
    graphs = [capture(it.step, it.model, it.optimizer, it.batch).graph for it in (real, meta)]
    assert graphs[0] == graphs[1]


def test_gpt2_decays_matrices_only() -> None:
    decayed, others = zoo.load("gpt2:tiny").optimizer.param_groups
    assert decayed["weight_decay"] > 0 and all(p.dim() > 1 for p in decayed["params"])
    assert others["weight_decay"] == 0 and all(p.dim() == 1 for p in others["params"])


@pytest.mark.slow
def test_known_lists_what_load_accepts() -> None:
    for known in zoo.known():
        assert known.about and known.source and known.tiny.keys() == known.defaults.keys()
        assert zoo.load(f"{known.name}:tiny").name == f"{known.name}:tiny"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            "resnet",
            r"Unknown model 'resnet'; known are mlp, gpt2, .*wresnet.*, and FILE.py:FUNCTION",
        ),
        ("", r"Unknown model ''"),
        ("mlp:", r"'' is not a setting of mlp; its settings are tiny, layers=4, width=1024, batch"),
        ("mlp:small", r"'small' is not a setting of mlp"),
        ("mlp:depth=3", r"'depth=3' is not a setting of mlp"),
        ("mlp:__class__=3", r"'__class__=3' is not a setting of mlp"),
        ("mlp:layers=2,layers=3", r"layers is set twice"),
        ("mlp:layers=two", r"layers must be a positive whole number, not 'two'"),
        ("mlp:layers=0", r"layers must be a positive whole number, not '0'"),
        ("mlp:width=1.5", r"width must be a positive whole number, not '1.5'"),
        ("gpt2:tiny,heads=5", r"width=24 is not a multiple of heads=5"),
        ("gpt2:tiny,dropout=1", r"dropout=1.0 is not below 1"),
        ("wresnet:depth=18", r"depth=18 is none of 14, 50, 101, 152"),
        ("gpt2:tiny,dropout=nan", r"dropout must be a number from 0 up, not 'nan'"),
    ],
)
def test_wrong_specs_get_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        zoo.load(spec)
    assert "\n" not in str(caught.value)


USER = """
import numpy as np
import torch
from helper import WIDTH


def step(model, batch):
    return model(batch).square().mean()


def make():
    model = torch.nn.Linear(WIDTH, 2)
    batch = torch.tensor(np.random.rand(5, WIDTH), dtype=torch.float32)
    return step, model, torch.optim.Adam(model.parameters()), batch


def three():
    return make()[:3]


def nothing():
    pass


def fails():
    x = 1
    raise KeyError("lost")


def asks(what):
    return make()


def leaves():
    raise SystemExit


constant = 3
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 3\n")
    path = tmp_path / "train.py"
    path.write_text(USER)
    return path


def test_a_users_function_is_loaded_and_seeded(user: Path) -> None:
    loaded, again = (zoo.load(f"{user}:make", seed=5) for _ in range(2))
    assert loaded.name == f"{user}:make"
    assert torch.equal(loaded.model.weight, again.model.weight)  # type: ignore[arg-type]
    assert torch.equal(loaded.batch, again.batch)
    assert loaded.step(loaded.model, loaded.batch).shape == ()


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("absent", r"train.py has no function 'absent'"),
        ("constant", r"train.py has no function 'constant'"),
        ("three", r"train.py:three must return .* but it returned \(function, Linear, Adam\)"),
        ("nothing", r"train.py:nothing must return .* but it returned NoneType"),
        ("fails", r"train.py:27 failed with KeyError: 'lost'"),
        ("asks", r"train.py:asks failed with TypeError: .*what"),
        ("leaves", r"train.py:35 failed with SystemExit"),
        ("", r"names no function"),
    ],
)
def test_wrong_functions_get_one_sentence(user: Path, function: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        zoo.load(f"{user}:{function}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = (\n", r"bad.py:1 failed with SyntaxError"),
        ("\nimport absent_module\n", r"bad.py:2 failed with ModuleNotFoundError"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        zoo.load(f"{tmp_path}/bad.py:make")


def test_missing_files_and_functions_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no file '.*none.py'"):
        zoo.load(f"{tmp_path}/none.py:make")
    with pytest.raises(ValueError, match=r"names no function; write FILE.py:FUNCTION"):
        zoo.load("train.py")


@pytest.mark.slow
def test_the_catalogue_is_that_of_the_models() -> None:
    """Else: python tools/catalogue.py"""
    assert zoo.known() == zoo.counted()


@pytest.mark.slow
def test_listing_models_loads_no_torch() -> None:
    script = (
        "import sys; from apportion.cli.main import status; code = status(['models']); "
        "assert code == 0 and not {'torch', 'numba'} & set(sys.modules), 'loaded'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "resnet152" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_model_that_memory_has_no_room_for_is_made_without_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default llama has 8 billion parameters: making them would end some program. It is planned
    all the same; who asks for its data is refused."""
    monkeypatch.setattr(zoo, "free_memory", lambda: 20e9)
    why = r"32\.\d GB, and this machine has 20 GB of memory free"
    with pytest.warns(UserWarning, match=f"{why}: it is made without data"):
        it = zoo.load("llama")
    assert all(p.is_meta for p in it.model.parameters())
    with pytest.raises(ValueError, match=rf"{why}\. .* meta=True"):
        zoo.load("llama", meta=False)
    monkeypatch.setattr(zoo, "free_memory", lambda: 1e3)
    with pytest.warns(UserWarning, match="it is made without data"):
        it = zoo.load("hf:llama,tiny")
    program = capture(it.step, it.model, it.optimizer, it.batch)
    plan = make_plan(program, cluster("2xh100"), "data", 0.0)
    assert plan.feasible and plan.predicted.step_seconds > 0
    first = next(b for b in program.bindings.values() if b.role == "parameter")
    with pytest.raises(ValueError, match="has no data"):
        bound_tensor(program.live, first)
