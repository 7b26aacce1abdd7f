"""Cross-entropy in chunks: results of the plain computation, in less memory, whatever is done with the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import encke
from encke.integrations import chunk_loss, logits
from encke.integrations.logits import DeferredLogits
from encke.train.models.vision import torchvision_models

VOCABULARY = 101


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(logits, "CHUNK", 7 * VOCABULARY)
    monkeypatch.setattr(logits, "SMALLEST", 1)


class Model(nn.Module):
    """Tokens to logits, as language models do it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY, bias)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    found = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(2))
    found[1, 3:] = -100
    return found


Loss = Callable[[Tensor], Tensor]


def step(model: nn.Module, loss: Loss) -> list[Tensor]:
    """Return the loss and all gradients."""
    model.zero_grad()
    found = loss(model(tokens()))
    (3 * found).backward()
    return [found.detach(), *(p.grad for p in model.parameters())]


def compare(loss: Loss, model: nn.Module | None = None) -> list[Tensor]:
    """Check loss and gradients against those without chunks, and return them."""
    torch.manual_seed(0)
    model = model or Model()
    plain = step(model, loss)
    handle = chunk_loss(model)
    found = step(model, loss)
    handle.remove()
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)
        assert a.dtype == b.dtype
    return found


def flat(x: Tensor) -> Tensor:
    return x.view(-1, VOCABULARY)


WEIGHT = torch.linspace(0.5, 2, VOCABULARY)
CHUNKED: dict[str, Loss] = {
    "mean": lambda x: F.cross_entropy(flat(x), labels().view(-1)),
    "sum": lambda x: F.cross_entropy(flat(x), labels().view(-1), reduction="sum"),
    "module": lambda x: nn.CrossEntropyLoss(ignore_index=5)(flat(x), labels().view(-1).clamp(min=5)),
    "weights of classes": lambda x: F.cross_entropy(flat(x), labels().view(-1), WEIGHT),
    "smoothed": lambda x: F.cross_entropy(flat(x), labels().view(-1), WEIGHT, label_smoothing=0.1),
    "cast": lambda x: F.cross_entropy(x.float().reshape(-1, VOCABULARY), labels().view(-1)),
    "shifted": lambda x: F.cross_entropy(flat(x[..., :-1, :].contiguous()), labels()[:, 1:].reshape(-1)),
    "one sample": lambda x: F.cross_entropy(x[1], labels()[0]),
    "capped": lambda x: F.cross_entropy((5 * torch.tanh(x / 5)).flatten(0, 1), labels().view(-1)),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), labels()),
}
COMPUTED: dict[str, Loss] = {
    "no reduction": lambda x: F.cross_entropy(flat(x), labels().view(-1), reduction="none").square().mean(),
    "probabilities": lambda x: F.cross_entropy(flat(x), torch.softmax(torch.arange(27 * 101.0).view(27, 101), 1)),
    "log-softmax": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), labels().view(-1)),
    "classes selected": lambda x: F.cross_entropy(x[..., :50].reshape(-1, 50), labels().view(-1).clamp(max=49)),
    "classes permuted": lambda x: F.cross_entropy(flat(x[..., torch.arange(VOCABULARY).flip(0)]), labels().view(-1)),
    "bias afterwards": lambda x: F.cross_entropy(flat(x + WEIGHT), labels().view(-1)),
    "scaled by a tensor": lambda x: F.cross_entropy(flat(x * WEIGHT), labels().view(-1)),
    "rows by a mask": lambda x: F.cross_entropy(x[labels() >= 0], labels()[labels() >= 0]),
    "transposed twice": lambda x: F.cross_entropy(flat(x.transpose(1, 2).transpose(1, 2)), labels().view(-1)),
    "logits and loss": lambda x: x.square().mean() + F.cross_entropy(flat(x), labels().view(-1)),
    "a function of the user's": lambda x: Square.apply(x).mean(),
    "in place, read before": lambda x: read_and_double(x),
    "in place": lambda x: F.cross_entropy(flat(x.mul_(2)), labels().view(-1)),
}


def read_and_double(x: Tensor) -> Tensor:
    view, copied = flat(x), x.to(torch.float64).view(-1, VOCABULARY)
    x.mul_(2)
    return F.cross_entropy(view, labels().view(-1)) + F.cross_entropy(copied, labels().view(-1)).float()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Largest(TorchDispatchMode):
    """Remembers the most rows of logits that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if (
                type(each) is Tensor
                and each.device.type != "meta"
                and VOCABULARY in each.shape
                and 16 not in each.shape
            ):
                self.rows = max(self.rows, each.numel() // VOCABULARY)
        return found


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_loss_and_gradients_are_those_of_the_whole(name, bias):
    compare(CHUNKED[name], Model(bias))


@pytest.mark.parametrize("name", CHUNKED)
def test_logits_exist_for_a_chunk_at_a_time(name):
    model = Model()
    with Largest() as plain:
        step(model, CHUNKED[name])
    chunk_loss(model)
    with Largest() as chunked:
        step(model, CHUNKED[name])
    assert 0 < chunked.rows <= 7 and plain.rows == 27


@pytest.mark.parametrize("name", COMPUTED)
def test_any_other_use_gets_the_logits_themselves(name):
    compare(COMPUTED[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_16_bit_logits_and_the_same_loss(dtype):
    torch.manual_seed(0)
    model = Model()

    def run() -> list[Tensor]:
        with torch.autocast("cpu", dtype):
            found = model(tokens())
            assert found.dtype == dtype
            loss = F.cross_entropy(found.float().view(-1, VOCABULARY), labels().view(-1))
        model.zero_grad()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = run()
    chunk_loss(model)
    for a, b in zip(run(), plain, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()


def test_16_bit_weights_have_sums_of_32_bits():
    """Gradients of many chunks, added in 16 bits, would lose most of the later ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    x = torch.randint(VOCABULARY, (64, 64))
    exact = copy.deepcopy(model).double()
    F.cross_entropy(exact(x).flatten(0, 1), x.flatten()).backward()
    model.bfloat16()
    chunk_loss(model, head=model[1])
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    error = (model[1].weight.grad.double() - exact[1].weight.grad).norm() / exact[1].weight.grad.norm()
    assert error < 0.01


def test_with_compressed_training_the_loss_is_exact_and_gradients_have_its_errors_only():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))
    x, y = torch.randint(VOCABULARY, (64, 32)), torch.randint(VOCABULARY, (64 * 32,))

    def run() -> list[Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = run()
    chunk_loss(model, head=model[3])
    with encke.attach(model, encke.policies.Fixed(encke.codecs.ErrorBounded(0)), min_bytes=1):
        for a, b in zip(run(), plain, strict=True):
            torch.testing.assert_close(a, b)
    with encke.attach(model) as handle:
        found = run()
        # The gradient of the output layer is computed in forward, from exact values.
        for i in (0, -2, -1):
            torch.testing.assert_close(found[i], plain[i])
        assert not torch.equal(found[2], plain[2]) and (found[2] - plain[2]).norm() < 0.2 * plain[2].norm()
        assert "GroupQuant" in {site.codec for site in handle.report().sites}


def test_tied_and_frozen_weights():
    torch.manual_seed(0)
    tied = Model(bias=False)
    tied.head.weight = tied.embed.weight
    compare(CHUNKED["mean"], tied)
    frozen = Model()
    frozen.head.requires_grad_(False)
    plain = F.cross_entropy(flat(frozen(tokens())), labels().view(-1))
    plain.backward()
    expected = frozen.embed.weight.grad.clone()
    frozen.zero_grad()
    chunk_loss(frozen)
    with Largest() as seen:
        F.cross_entropy(flat(frozen(tokens())), labels().view(-1)).backward()
    torch.testing.assert_close(frozen.embed.weight.grad, expected)
    assert frozen.head.weight.grad is None and frozen.head.bias.grad is None
    assert 0 < seen.rows <= 7


def test_backward_twice_and_checkpoints():
    torch.manual_seed(0)
    model = Model()
    chunk_loss(model)
    loss = F.cross_entropy(flat(model(tokens())), labels().view(-1))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for p, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * gradient)
    model.zero_grad()
    found = checkpoint(model, tokens(), use_reentrant=False)
    F.cross_entropy(flat(found), labels().view(-1)).backward()
    for p, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_second_derivatives_are_refused():
    model = Model()
    chunk_loss(model)
    loss = F.cross_entropy(flat(model(tokens())), labels().view(-1))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, model.head.weight, create_graph=True)


def test_targets_out_of_range_are_refused_and_no_targets_give_nan():
    model = Model()
    chunk_loss(model)
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(flat(model(tokens())), labels().view(-1) + VOCABULARY + 100)
    assert F.cross_entropy(flat(model(tokens())), torch.full((27,), -100)).isnan()


def test_outside_of_training_and_of_large_outputs_nothing_changes(monkeypatch):
    model = Model()
    chunk_loss(model)
    assert type(model(tokens())) is DeferredLogits
    with torch.no_grad():
        assert type(model(tokens())) is Tensor
    assert type(model.eval()(tokens())) is Tensor
    model.train()
    assert type(model(torch.zeros((), dtype=torch.int64))) is Tensor
    monkeypatch.setattr(logits, "SMALLEST", 28 * VOCABULARY)
    assert type(model(tokens())) is Tensor


def test_inputs_that_are_written_to_before_the_loss_are_refused():
    model = Model()
    chunk_loss(model)
    hidden = model.embed(tokens()).tanh()
    found = model.head(hidden)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after the layer was called"):
        F.cross_entropy(found.view(-1, VOCABULARY), labels().view(-1))
    with pytest.raises(RuntimeError, match="modified in place after the layer was called"):
        found.sum()


def test_the_layer_stays_a_linear_layer_and_comes_back():
    model = Model()
    before = model.state_dict()
    handle = chunk_loss(model)
    assert isinstance(model.head, nn.Linear) and model.state_dict().keys() == before.keys()
    assert type(copy.deepcopy(model)(tokens())) is DeferredLogits
    with pytest.raises(ValueError, match="already: call remove"):
        chunk_loss(model)
    handle.remove()
    handle.remove()
    assert type(model.head) is nn.Linear and type(model(tokens())) is Tensor


def test_models_without_a_linear_output_layer_are_refused():
    with pytest.raises(ValueError, match="Sequential does not tell which layer.*head=model.lm_head"):
        chunk_loss(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match="of a torch.nn.Linear.*got Conv2d"):
        chunk_loss(nn.Conv2d(3, 3, 1), head=nn.Conv2d(3, 3, 1))


def test_deferred_logits_print_as_tensors():
    model = Model()
    chunk_loss(model)
    found = model(tokens())
    assert repr(found).startswith("DeferredLogits(tensor([[[") and found.shape == (3, 9, VOCABULARY)
    assert found.argmax(-1).shape == (3, 9) and found.requires_grad
    assert found.detach().numpy().shape == (3, 9, VOCABULARY) and found[0, 0].tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        found.numpy()


def test_a_compiled_model_computes_its_logits_as_usual():
    model = Model()
    plain = step(model, CHUNKED["mean"])
    chunk_loss(model)
    found = step(torch.compile(model, backend="aot_eager"), CHUNKED["mean"])
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES,
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "OPTForCausalLM": SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "Gemma2ForCausalLM": SIZES | {"head_dim": 8, "num_key_value_heads": 2, "final_logit_softcapping": 2.0},
    "CohereForCausalLM": SIZES | {"num_key_value_heads": 2},
    "BertForMaskedLM": SIZES,
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers_never_have_whole_logits(name):
    torchvision_models()  # transformers imports torchvision, which is made to fit the installed torch
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(vocab_size=VOCABULARY, pad_token_id=0, **FAMILIES[name])
    config.decoder_start_token_id = 0
    model = kind(config)
    model.train()

    def run() -> list[Tensor]:
        torch.manual_seed(1)  # the same dropout
        model.zero_grad()
        loss = model(input_ids=tokens(), labels=labels()).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run()
    chunk_loss(model)
    with Largest() as seen:
        found = run()
    assert 0 < seen.rows <= 7
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)
